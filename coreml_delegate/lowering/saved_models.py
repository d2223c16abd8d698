"""Blobs, metadata and debug handles of models that the caller converted with coremltools.

``executorch_debug_handle_mapping.json``, which coremltools saves with a model converted from an
ExecuTorch program, lists for each debug handle the paths of its call's operations::

    {"version": text, "mapping": {handle: [[{"Output": name, "Operator": type}, ...]]}}

Source: coremltools 9.0, ``MLModel.save``; ExecuTorch 1.5, ``ModelDebugInfo`` of the runtime.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult

from coreml_delegate.compile_options import ModelType
from coreml_delegate.errors import ContractError
from coreml_delegate.formats.blob_layout import (
    DEBUG_INFO,
    PACKAGE,
    DebugInfo,
    MethodMetadata,
    ModelMetadata,
    OperationPath,
    debug_symbol,
    identify,
)
from coreml_delegate.lowering.build import model_files, result_of
from coreml_delegate.lowering.convert import Conversion, check_compiler, temporary_folder
from coreml_delegate.targets import STATE_OPSET

_MAPPING = "executorch_debug_handle_mapping.json"


def symbol_of(operation_path: OperationPath) -> str | None:
    """Return the debug symbol of a path's last operation; None for an incomplete path."""
    last = operation_path[-1] if operation_path else {}
    output, operator = last.get("Output"), last.get("Operator")
    return None if output is None or operator is None else debug_symbol(output, operator)


def read_debug_info(package: Path) -> DebugInfo | None:
    """Return the debug info of a saved model; None if it is missing or unreadable."""
    try:
        content: Any = json.loads((package / _MAPPING).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    mapping: Any = content.get("mapping") if isinstance(content, dict) else None
    if mapping is None:
        return None
    paths: dict[str, OperationPath] = {}
    handles: dict[str, list[int]] = {}
    for handle, operation_paths in mapping.items():
        if not handle.lstrip("-").isdecimal():
            continue
        for path in operation_paths:
            symbol = symbol_of(path)
            if symbol is not None:
                handles.setdefault(symbol, []).append(int(handle))
                paths[symbol] = path
    return DebugInfo(content.get("version", {}), paths, handles)


def metadata_of(spec: Any, identifier: str) -> ModelMetadata:
    """Return the metadata of the model with this specification.

    Raises:
        ContractError: The model has no output; or it has no input, and is for an opset before
            iOS18.
    """
    inputs, outputs = (
        tuple(feature.name for feature in features)
        for features in (spec.description.input, spec.description.output)
    )
    if not outputs:
        raise ContractError("the model has no output", expected="at least one")
    if not inputs and spec.specificationVersion < STATE_OPSET:
        raise ContractError(
            f"a model without inputs needs {STATE_OPSET.name} ({STATE_OPSET.platforms})",
            got=f"specification version {spec.specificationVersion}",
            remedy="Raise minimum_deployment_target",
        )
    return ModelMetadata(identifier, {"": MethodMetadata(inputs, outputs)})


def lower_model(model: Any, model_type: ModelType) -> PreprocessResult:
    """Return the blob of a ``coremltools.models.MLModel``; equal models give equal bytes.

    Raises:
        ContractError: See ``metadata_of``.
        LoweringError: ``model_type`` is a compiled model, and there is no compiler.
    """
    is_compiled = model_type is ModelType.COMPILED_MODEL
    if is_compiled:
        check_compiler()
    spec = model.get_spec()
    names = metadata_of(spec, "").methods
    with temporary_folder() as folder:
        package = folder / PACKAGE
        model.save(str(package))
        info = read_debug_info(package)
        compiled = Path(model.get_compiled_model_path()) if is_compiled else None
        _, files = identify(
            model_files(Conversion(spec, package, compiled), is_declared=False), names
        )
        if info is not None:
            files[DEBUG_INFO] = info.encode()
        return result_of(files)
