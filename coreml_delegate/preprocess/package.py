"""From a subgraph to the bytes of its blob."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from torch.export import ExportedProgram

from coreml_delegate import op_rules
from coreml_delegate.blob import Buffer, flatten
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.metadata import FILE_NAME as METADATA
from coreml_delegate.metadata import MethodMetadata, ModelMetadata
from coreml_delegate.mlpackage import assemble, locate, map_folder
from coreml_delegate.preprocess import contract, precision
from coreml_delegate.preprocess.convert import Conversion, converted
from coreml_delegate.preprocess.passes import prepare
from coreml_delegate.targets import Opset

MODEL = "model.mlpackage"
COMPILED_MODEL = "model.mlmodelc"
_COREMLTOOLS = "com.github.apple.coremltools"


def build_blob(program: ExportedProgram, options: CompileOptions) -> bytes:
    """Lower a whole subgraph.

    Args:
        program: The subgraph, in edge or ATen dialect; it may be modified.
        options: How to lower.

    Returns:
        The blob; equal arguments give equal bytes.

    Raises:
        UnsupportedOperatorError: An operator has no translation; lists every one.
        ConversionError: Coremltools failed.
        ContractError: The device would refuse the result.
    """
    boundary = contract.boundary_of(program)
    contract.check_program(boundary, options.deployment_target)
    contract.check_states(program)
    check_supported(program, options.deployment_target)
    if options.deployment_target is None:
        needed = required_opset(program)
        # Left at None, coremltools itself starts from the oldest; only a demand above it is stated.
        options = replace(options, deployment_target=needed if needed > Opset.iOS15 else None)
    in_fp32 = precision.mark(program, options.keep_fp32)
    prepare(program)
    with converted(program, options, in_fp32) as conversion:
        names = contract.check_model(boundary, conversion.spec)
        return pack(_model_files(conversion), {"": names})[1]


def pack(model: Mapping[str, Buffer], methods: Mapping[str, MethodMetadata]) -> tuple[str, bytes]:
    """Make a blob.

    Args:
        model: The model's files, in a folder by the name that the device looks for.
        methods: See ``ModelMetadata``.

    Returns:
        The model's identifier, and the blob; equal arguments give equal bytes.
    """
    identifier = _identifier(model)
    metadata = ModelMetadata(identifier, methods)
    return identifier, flatten({**model, METADATA: metadata.encode()})


def check_supported(program: ExportedProgram, target: Opset | None) -> None:
    """Raise one error that lists every operator Core ML cannot take.

    Raises:
        UnsupportedOperatorError: There is at least one.
    """
    obstacles: dict[str, list[str]] = {}
    for node, reason in op_rules.obstacles_in(program, target).items():
        obstacles.setdefault(str(reason), []).append(node.name)
    if obstacles:
        raise unsupported_error(obstacles)


def unsupported_error(obstacles: Mapping[str, list[str]]) -> UnsupportedOperatorError:
    """The error that lists every obstacle with the nodes it concerns."""
    listed = "; ".join(
        f"{', '.join(nodes[:3])}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}: {why}"
        for why, nodes in sorted(obstacles.items())
    )
    return UnsupportedOperatorError(
        f"Core ML cannot take {sum(map(len, obstacles.values()))} node(s) of the graph",
        got=listed,
        remedy="Lower with CoreMLPartitioner(lower_full_graph=False) to run them on the CPU",
    )


def required_opset(program: ExportedProgram) -> Opset:
    """The oldest opset that can express a whole subgraph, its boundary and states included."""
    boundary = contract.boundary_of(program)
    calls = op_rules.required_opset(program.graph.nodes)
    return max(calls, contract.required_opset(boundary))


def _model_files(conversion: Conversion) -> dict[str, Buffer]:
    if conversion.compiled is not None:
        return below(COMPILED_MODEL, map_folder(Path(conversion.compiled)))
    parts = locate(map_folder(conversion.package))
    weights = {name.removeprefix("weights/"): data for name, data in parts.weights.items()}
    _forget_circumstances(conversion.spec.description.metadata.userDefined)
    # Map entries have no order in protobuf; deterministic serialization gives them one.
    spec = conversion.spec.SerializeToString(deterministic=True)
    return below(MODEL, assemble(spec, weights))


def _forget_circumstances(metadata: MutableMapping[str, str]) -> None:
    """Drop what coremltools notes of the day, and of torch's build (as in ``2.13.0+cpu``).

    The bytes of equal models, and with them their identifiers, would differ by it.
    """
    metadata.pop(f"{_COREMLTOOLS}.conversion_date", None)
    source = f"{_COREMLTOOLS}.source"
    if source in metadata:
        metadata[source] = metadata[source].partition("+")[0]


def below(folder: str, files: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Files, moved into a folder."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def _identifier(files: Mapping[str, Buffer]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{memoryview(content).nbytes}\0".encode())
        digest.update(content)
    return f"coreml_delegate_{digest.hexdigest()[:32]}"
