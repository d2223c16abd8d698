"""The contents of a ``.pte`` or ``.mlpackage`` as plain data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.blob_layout import metadata_in
from coreml_delegate.formats.mlpackage import map_package
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.quantization.weight_inventory import summarize_weights
from coreml_delegate.runtime.delegate import python_reason, read_blob
from coreml_delegate.runtime.engines.selection import ENGINES, engines_here
from coreml_delegate.runtime.mil.program import (
    Feature,
    Function,
    Program,
)
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.pipeline import Files, PipelineSpec, Suppression, read_pipeline
from coreml_delegate.runtime.program.plan import (
    DelegateInfo,
    MethodInfo,
    TensorSpec,
    ValueSpec,
)
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.program.signature import input_names, output_names
from coreml_delegate.scripts.delegates import CoreMLPartition, open_pte, partitions_of
from coreml_delegate.scripts.stablehlo_files import compile_file
from coreml_delegate.targets import Opset

_CONST = "const"


def summarize_pte(path: Path, data: Sequence[Path] = ()) -> dict[str, Any]:
    """Summarize methods, delegates, and the models inside Core ML delegates.

    Raises:
        BlobFormatError: The file is no ``.pte``, or malformed.
        ProgramError: The file cannot be read.
    """
    program = open_pte(path, data)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "named_data": list(program.named_data_keys),
        "external_tensors": list(program.external_tensors),
        "methods": [_method(program, method) for method in program.methods],
    }


def summarize_package(path: Path) -> dict[str, Any]:
    """Summarize the model, or the models of the pipeline, of an mlpackage.

    Raises:
        BlobFormatError: A part is missing or malformed.
        ProgramError: The package does not exist, or a model is not an ML Program.
    """
    files = map_package(path)
    size = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    pipeline = read_pipeline(files)
    content = (
        {"model": summarize_model(read_files(files))}
        if pipeline is None
        else {"pipeline": _pipeline(pipeline)}
    )
    return {"file": str(path), "bytes": size} | content


def _pipeline(pipeline: PipelineSpec) -> dict[str, Any]:
    return {
        "inputs": list(pipeline.inputs),
        "outputs": list(pipeline.outputs),
        "models": [_stage(stage) for stage in pipeline.stages],
    }


def _stage(stage: Files | Suppression | PipelineSpec) -> dict[str, Any]:
    if isinstance(stage, PipelineSpec):
        return {"type": "pipeline"} | _pipeline(stage)
    if isinstance(stage, Suppression):
        return {
            "type": "non-maximum suppression",
            "iou_threshold": stage.iou_threshold.default,
            "confidence_threshold": stage.confidence_threshold.default,
            "per_class": stage.per_class,
            "fewest_boxes": stage.fewest,
            "most_boxes": stage.most,
        }
    return {"type": "ML Program"} | summarize_model(read_files(stage))


def summarize_stablehlo(path: Path) -> dict[str, Any]:
    """Summarize the model that a StableHLO file is converted to.

    Raises:
        CoreMLDelegateError: See ``stablehlo.compile``.
    """
    model = compile_file(path).executable.model
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "model": summarize_model(model.program),
    }


def summarize_model(program: Program) -> dict[str, Any]:
    """Summarize functions, operations, weights, and which engine runs them here."""
    return {
        "specification_version": program.specification_version,
        "functions": [_function(function) for function in program.functions.values()],
        "weights": summarize_weights(program),
        "metadata": dict(program.metadata),
    }


def _method(program: PteProgram, method: MethodInfo) -> dict[str, Any]:
    ours = {partition.index: partition for partition in partitions_of(program, method)}
    return {
        "name": method.name,
        "inputs": _values(input_names(method), method.input_specs),
        "outputs": _values(output_names(method), method.output_specs),
        "planned_bytes": sum(method.arena_sizes),
        "operators_outside": _ranked(method.operators),
        "delegates": [
            _delegate(info) | (_core_ml(ours[index]) if index in ours else {})
            for index, info in enumerate(method.delegates)
        ],
    }


def _values(names: Sequence[str], specs: Sequence[ValueSpec]) -> list[dict[str, Any]]:
    return [{"name": name} | _value(spec) for name, spec in zip(names, specs, strict=True)]


def _value(spec: ValueSpec) -> dict[str, Any]:
    if not isinstance(spec, TensorSpec):
        return {"value": repr(spec)}
    return {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "dynamism": spec.dynamism.name.lower(),
    }


def _delegate(info: DelegateInfo) -> dict[str, Any]:
    return {
        "backend": info.backend_id,
        "bytes": info.processed.nbytes,
        "compile_specs": {key: value.decode(errors="replace") for key, value in info.compile_specs},
    }


def _core_ml(partition: CoreMLPartition) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "blob_bytes": memoryview(partition.blob).nbytes,
        "options": _options(partition.info),
    }
    if partition.reference is not None:
        summary["shared_as"] = partition.reference.key
        summary["function"] = partition.reference.function_name
    try:
        program, metadata = read_blob(partition.blob)
    except ProgramError as error:  # compiled ahead of time: only Apple devices can read it
        identifier = metadata_in(unflatten(partition.blob)).identifier
        return summary | {"identifier": identifier, "model": None, "unreadable": str(error)}
    model = summarize_model(program)
    name = partition.reference.function_name if partition.reference is not None else None
    function = program.function(name)
    engine = next(f["engine"] for f in model["functions"] if f["name"] == function.name)
    return summary | {
        "identifier": metadata.identifier,
        "python_reason": "no engine here runs it"
        if engine is None
        else python_reason(program, function, engine, summary["blob_bytes"]),
        "model": model,
    }


def _options(info: DelegateInfo) -> dict[str, Any] | None:
    """Return compile options by name; None if another exporter's specs are unknown here."""
    try:
        options = CompileOptions.from_pairs(info.compile_specs)
    except OptionError:
        return None
    target = options.deployment_target
    return {
        "compute_unit": options.compute_unit.value,
        "deployment_target": None if target is None else target.name,
        "precision": options.precision.value,
        "model_type": options.model_type.value,
        "enumerated_shapes": None
        if options.enumerated_shapes is None
        else options.enumerated_shapes.describe(),
        "weight_sharing": None if options.weight_sharing is None else options.weight_sharing.value,
    }


def _function(function: Function) -> dict[str, Any]:
    ops = [op for op in function.block.walk() if op.type != _CONST]
    obstacles = {name: _obstacles(name, function) for name in engines_here()}
    classifier = function.classifier
    summary = {
        "name": function.name,
        "opset": function.opset,
        "deployment_target": _target(function.opset),
        "inputs": [_feature(feature) for feature in function.inputs],
        "outputs": [_feature(feature) for feature in function.outputs],
        "states": [_feature(feature) for feature in function.states],
        "ops": _ranked(Counter(op.type for op in ops)),
        "computed_in": _ranked(
            Counter({dtype.label: count for dtype, count in function.computed_in().items()})
        ),
        "engine": next((name for name, why in obstacles.items() if not why), None),
        "obstacles": {name: why for name, why in obstacles.items() if why},
    }
    return summary | ({} if classifier is None else {"classifier": asdict(classifier)})


def _target(opset: str) -> str | None:
    try:
        return Opset.from_mil_name(opset).name
    except OptionError:
        return None  # newer than this package


def _obstacles(engine: str, function: Function) -> list[str]:
    unavailable = ENGINES[engine].unavailable_reason()
    return ENGINES[engine].unsupported(function) if unavailable is None else [unavailable]


def _feature(feature: Feature) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "name": feature.name,
        "dtype": feature.type.dtype.label,
        "shape": None if feature.type.shape is None else list(feature.type.shape),
    }
    if feature.color_space is not None:
        summary["image"] = feature.color_space.value
    if feature.shapes:
        summary["enumerated_shapes"] = [list(shape) for shape in feature.shapes]
    if feature.bounds:
        summary["bounds"] = [list(bound) for bound in feature.bounds]
    return summary


def _ranked(counts: Counter[str]) -> Mapping[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
