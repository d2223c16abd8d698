"""From a subgraph to the bytes of its blob."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch.export import ExportedProgram

from coreml_delegate import op_rules
from coreml_delegate.blob import Buffer, flatten
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.metadata import FILE_NAME as METADATA
from coreml_delegate.metadata import ModelMetadata
from coreml_delegate.mlpackage import assemble, locate, map_folder
from coreml_delegate.preprocess import contract, precision
from coreml_delegate.preprocess.convert import Conversion, converted
from coreml_delegate.preprocess.passes import prepare
from coreml_delegate.targets import Opset

MODEL = "model.mlpackage"
COMPILED_MODEL = "model.mlmodelc"


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
        model = _model_files(conversion)
        identifier = _identifier(model)
        metadata = ModelMetadata(identifier, {"": names})
        return flatten({**model, METADATA: metadata.encode()})


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
        return _below(COMPILED_MODEL, map_folder(Path(conversion.compiled)))
    parts = locate(map_folder(conversion.package))
    weights = {name.removeprefix("weights/"): data for name, data in parts.weights.items()}
    # Map entries have no order in protobuf; deterministic serialization gives them one.
    spec = conversion.spec.SerializeToString(deterministic=True)
    return _below(MODEL, assemble(spec, weights))


def _below(folder: str, files: Mapping[str, Buffer]) -> dict[str, Buffer]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def _identifier(files: Mapping[str, Buffer]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{memoryview(content).nbytes}\0".encode())
        digest.update(content)
    return f"coreml_delegate_{digest.hexdigest()[:32]}"
