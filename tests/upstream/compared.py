"""Results of the public functions of both backends for the same arguments."""

from __future__ import annotations

import enum
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import coremltools as ct
import torch
from executorch.exir import to_edge
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch import nn
from torch.export import Dim, ExportedProgram

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.formats.blob_layout import DebugInfo, ModelMetadata
from coreml_delegate.runtime.delegate import blob_files

LINEAR = {"mode": "linear_symmetric", "dtype": "int8", "weight_threshold": 9}
_PASSES = ["common::const_elimination", "common::dead_code_elimination"]
_SHAPES = {"input": [[2, 4], [3, 4]]}


def names_of(backend: Any) -> dict[str, list[str] | None]:
    """The public names of a class: parameters of functions, None for anything else."""
    return {
        name: [*inspect.signature(value).parameters] if inspect.isroutine(value) else None
        for name in dir(backend)
        if not name.startswith("_") and (value := getattr(backend, name)) is not None
    }


def results_of(backend: Any, strategies: Any) -> dict[str, Any]:
    """Return the results of a backend's functions, as plain data."""
    made: dict[str, Any] = {}
    for name, arguments in _generated(backend, strategies).items():
        made[name] = [getattr(backend, name)(*given) for given in arguments]
    specs = {
        "model_type": made["generate_model_type_compile_spec"],
        "model_compute_precision": made["generate_compute_precision_compile_spec"],
        "min_deployment_target": made["generate_minimum_deployment_target_compile_spec"],
        "compute_unit": made["generate_compute_unit_compile_spec"],
        "op_linear_quantizer_config": made["generate_op_linear_quantizer_config_compile_spec"],
        "pass_pipeline": made["generate_pass_pipeline_compile_spec"],
        "enumerated_shapes": made["generate_enumerated_shapes_compile_spec"],
        "multimethod_weight_sharing_strategy": made[
            "generate_multimethod_weight_sharing_strategy_compile_spec"
        ],
    }
    others = [CompileSpec("of another backend", b"1")]
    for name, singles in specs.items():
        read = getattr(backend, f"{name}_from_compile_specs")
        # Beside a spec of another kind, and the first of several count; none gives the default.
        listed = [[*others, spec, *singles] for spec in singles]
        made[f"{name}_from_compile_specs"] = [read(given) for given in ([], others, *listed)]
    made |= _of_models(backend)
    return {name: _plain(value) for name, value in made.items()}


def _generated(backend: Any, strategies: Any) -> dict[str, list[tuple[Any, ...]]]:
    kinds = backend.MODEL_TYPE
    units = (
        *(ct.ComputeUnit.ALL, ct.ComputeUnit.CPU_ONLY),
        *(ct.ComputeUnit.CPU_AND_GPU, ct.ComputeUnit.CPU_AND_NE),
    )
    targets = (ct.target.iOS15, ct.target.macOS13, ct.target.iOS18, None)
    return {
        "generate_model_type_compile_spec": [(kinds.MODEL,), (kinds.COMPILED_MODEL,)],
        "generate_compute_precision_compile_spec": [(p,) for p in ct.precision],
        "generate_minimum_deployment_target_compile_spec": [(target,) for target in targets],
        "generate_compute_unit_compile_spec": [(unit,) for unit in units],
        "generate_op_linear_quantizer_config_compile_spec": [(LINEAR,), ({},)],
        "generate_pass_pipeline_compile_spec": [(_PASSES,), ([],)],
        "generate_multimethod_weight_sharing_strategy_compile_spec": [
            (strategies.POSITIONAL,),
            (strategies.DISABLED,),
        ],
        "generate_enumerated_shapes_compile_spec": [(_program(dynamic=True), _SHAPES)],
        "generate_compile_specs": [
            (),
            (units[1], targets[0], ct.precision.FLOAT32, kinds.COMPILED_MODEL, LINEAR, _PASSES),
        ],
    }


def _of_models(backend: Any) -> dict[str, Any]:
    edge = to_edge(_program())
    for number, node in enumerate(edge.exported_program().graph.nodes, start=1):
        node.meta["debug_handle"] = number
    model = ct.convert(
        edge.exported_program(),
        source="pytorch",
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    paths = [[], [{"Output": "y"}], [{}, {"Output": "y", "Operator": "linear"}]]
    metadata = backend.model_metadata_from_spec(model.get_spec(), "name")
    saved: dict[str, Any] = {"get_debug_symbol": [backend.get_debug_symbol(p) for p in paths]}
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "model.mlpackage"
        model.save(str(package))
        info = backend.get_model_debug_info(package)
        saved["get_model_debug_info"] = [info, backend.get_model_debug_info(Path(folder))]
        backend.save_model_metadata(metadata, Path(folder))
        backend.save_model_debug_info(info, Path(folder))
        for name in ("metadata", "debug_info"):
            saved[f"save_model_{name}"] = json.loads((Path(folder) / f"{name}.json").read_text())
    saved["model_metadata_from_spec"] = metadata
    saved["preprocess_model"] = backend.preprocess_model(model, backend.MODEL_TYPE.MODEL)
    return saved


def _program(*, dynamic: bool = False) -> ExportedProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    shapes = ({0: Dim.AUTO(min=2, max=8)},) if dynamic else None
    return torch.export.export(model, (torch.zeros(3, 4),), dynamic_shapes=shapes)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    return value if isinstance(value, dict | str | None) else _foreign(value)


def _foreign(value: Any) -> Any:
    """Return an object of ExecuTorch's or coremltools' own classes as plain data."""
    if hasattr(value, "to_json"):  # their enumerated shapes
        return json.loads(value.to_json())
    if hasattr(value, "passes"):
        return list(value.passes)
    if hasattr(value, "__dataclass_fields__"):  # their metadata and debug info
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return repr(value)


def _text(value: bytes) -> Any:
    text = value.decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def _blob(result: PreprocessResult) -> Any:
    files, metadata = blob_files(result.processed_bytes)
    names = sorted(name for name in files if name.endswith((".mlmodel", ".bin")))
    handles = {s: list(h) for s, h in (result.debug_handle_map or {}).items()}
    return [names, _plain(ModelMetadata("", metadata.methods)), handles]


_PLAIN: dict[type, Any] = {
    enum.Enum: lambda value: value.name,
    CompileSpec: lambda value: [str(value.key), _text(bytes(value.value))],
    EnumeratedShapes: lambda value: value.encode(),
    ModelMetadata: lambda value: json.loads(value.encode()),
    DebugInfo: lambda value: json.loads(value.encode()),
    PreprocessResult: _blob,
}
