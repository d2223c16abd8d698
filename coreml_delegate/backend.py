"""``CoreMLBackend``: the backend that ExecuTorch calls to lower subgraphs to blobs.

``executorch_debug_handle_mapping.json``, which coremltools saves with a model converted from an
ExecuTorch program, lists for each debug handle the paths of its call's operations::

    {"version": text, "mapping": {handle: [[{"Output": name, "Operator": type}, ...]]}}

Source: coremltools 9.0, ``MLModel.save``; ExecuTorch 1.5, ``ModelDebugInfo`` of the runtime.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from coreml_delegate.compile_options import CompileOptions, ModelType, WeightSharing, is_own
from coreml_delegate.compile_spec_methods import CompileSpecMethods, member_of
from coreml_delegate.errors import ContractError, LoweringError
from coreml_delegate.formats.blob_layout import (
    DEBUG_INFO,
    METADATA,
    PACKAGE,
    DebugInfo,
    MethodMetadata,
    ModelMetadata,
    OperationPath,
    debug_symbol,
    identify,
)
from coreml_delegate.lowering import store
from coreml_delegate.lowering.build import build_files, model_files, result_of
from coreml_delegate.lowering.convert import Conversion, check_compiler, temporary_folder
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.lowering.multifunction import lower_methods
from coreml_delegate.patches.executorch import hide_from_search
from coreml_delegate.targets import STATE_OPSET

_Item = TypeVar("_Item")

_MAPPING = "executorch_debug_handle_mapping.json"

MULTIMETHOD_WEIGHT_SHARING_STRATEGY = WeightSharing
"""The name of ``WeightSharing`` in ExecuTorch's own backend."""


@final
class CoreMLBackend(CompileSpecMethods, BackendDetails):
    """The backend that ExecuTorch finds by the name ``CoreMLBackend``."""

    @staticmethod
    def model_metadata_from_spec(model_spec: Any, identifier: str) -> ModelMetadata:
        """Return the metadata of a model with this specification.

        Raises:
            ContractError: The model has no output; or it has no input, and its opset is older than
                iOS18.
        """
        inputs, outputs = (
            tuple(feature.name for feature in features)
            for features in (model_spec.description.input, model_spec.description.output)
        )
        if not outputs:
            raise ContractError("the model has no output", expected="at least one")
        if not inputs and model_spec.specificationVersion < STATE_OPSET:
            raise ContractError(
                f"a model without inputs needs {STATE_OPSET.name} ({STATE_OPSET.platforms})",
                got=f"specification version {model_spec.specificationVersion}",
                remedy="Raise minimum_deployment_target",
            )
        return ModelMetadata(identifier, {"": MethodMetadata(inputs, outputs)})

    @staticmethod
    def get_debug_symbol(operation_path: OperationPath) -> str | None:
        """Return ``output:operator`` of a path's last operation; None for an incomplete path."""
        last = operation_path[-1] if operation_path else {}
        output, operator = last.get("Output"), last.get("Operator")
        return None if output is None or operator is None else debug_symbol(output, operator)

    @classmethod
    def get_model_debug_info(cls, model_package_dir: Path) -> DebugInfo | None:
        """Return the debug info of an mlpackage that coremltools saved.

        Returns:
            None if it is missing or unreadable.
        """
        try:
            content: Any = json.loads((Path(model_package_dir) / _MAPPING).read_bytes())
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
                symbol = cls.get_debug_symbol(path)
                if symbol is not None:
                    handles.setdefault(symbol, []).append(int(handle))
                    paths[symbol] = path
        return DebugInfo(content.get("version", {}), paths, handles)

    @staticmethod
    def save_model_metadata(model_metadata: ModelMetadata, model_dir_path: Path) -> None:
        """Write ``metadata.json``, which the device reads."""
        (Path(model_dir_path) / METADATA).write_bytes(model_metadata.encode())

    @staticmethod
    def save_model_debug_info(model_debug_info: DebugInfo, model_dir_path: Path) -> None:
        """Write ``debug_info.json``, which profilers read."""
        (Path(model_dir_path) / DEBUG_INFO).write_bytes(model_debug_info.encode())

    @classmethod
    def preprocess_model(cls, mlmodel: Any, model_type: Any) -> PreprocessResult:
        """Return the blob of a ``coremltools.models.MLModel``; equal models give equal bytes.

        Raises:
            ContractError: See ``model_metadata_from_spec``.
            LoweringError: ``model_type`` is a compiled model, and there is no compiler.
            OptionError: ``model_type`` is not a model type.
        """
        kind = member_of(ModelType, model_type, "model_type")
        is_compiled = kind is ModelType.COMPILED_MODEL
        if is_compiled:
            check_compiler()
        spec = mlmodel.get_spec()
        names = cls.model_metadata_from_spec(spec, "").methods
        with temporary_folder() as folder:
            package = folder / PACKAGE
            mlmodel.save(str(package))
            info = cls.get_model_debug_info(package)
            compiled = Path(mlmodel.get_compiled_model_path()) if is_compiled else None
            conversion = Conversion(spec, package, compiled)
            _, files = identify(model_files(conversion, is_declared=False), names)
            if info is not None:
                files[DEBUG_INFO] = info.encode()
            return result_of(files)

    @classmethod
    def copy_exported_program_for_preprocess(
        cls,
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],
    ) -> ExportedProgram:
        """Return a copy that shares the tensors, which ``preprocess`` only reads."""
        owner = owner_of(compile_specs)
        if owner is not cls:
            return owner.copy_exported_program_for_preprocess(edge_program, compile_specs)
        values: list[Any] = [*edge_program.state_dict.values(), *edge_program.constants.values()]
        shared = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return copy.deepcopy(edge_program, shared)

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Lower a subgraph to a blob.

        Args:
            edge_program: The subgraph; ExecuTorch passes a copy.
            compile_specs: See ``CompileOptions``; rewritten in place to the canonical form, because
                ExecuTorch stores this very list in the ``.pte`` and the device reads no other form.

        Raises:
            CoreMLDelegateError: See ``build_files`` and ``owner_of``.
        """
        owner = owner_of(compile_specs)
        if owner is not CoreMLBackend:
            return owner.preprocess(edge_program, compile_specs)
        options = CompileOptions.from_specs(compile_specs)
        handles = handles_of(edge_program)
        files = store.take(edge_program, options) or build_files(edge_program, options)
        compile_specs[:] = options.to_specs()
        return result_of(with_handles(files, handles))

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Lower the partitions of all methods, and share weights where possible.

        Args:
            edge_programs: The subgraphs of each method; ExecuTorch passes copies.
            compile_specs: The compile specs of each subgraph; rewritten in place, see
                ``preprocess``.

        Raises:
            CoreMLDelegateError: See ``lower_methods`` and ``owner_of``.
        """
        results: dict[str, list[PreprocessResult | None]] = {
            method: [None] * len(programs) for method, programs in edge_programs.items()
        }
        for owner, indices in _indices_by_owner(compile_specs).items():
            lower = lower_methods if owner is cls else owner.preprocess_multimethod
            lowered = lower(_select(edge_programs, indices), _select(compile_specs, indices))
            for method, blobs in lowered.items():
                for index, blob in zip(indices[method], blobs, strict=True):
                    results[method][index] = blob
        return cast("dict[str, list[PreprocessResult]]", results)


class DeregisteredBackend(BackendDetails):
    """Base class of other backends with our name, which hides them from ExecuTorch's search."""


def claim_name() -> None:
    """Make our backend the only backend that ExecuTorch finds by the name.

    Any other loaded class of that name gets ``DeregisteredBackend`` between itself and
    ``BackendDetails``. It works as before, and our backend forwards its subgraphs to it.
    """
    hide_from_search(CoreMLBackend.__name__, keep=CoreMLBackend, base=DeregisteredBackend)


def owner_of(compile_specs: Iterable[CompileSpec]) -> type[BackendDetails]:
    """Return the backend that lowers a subgraph with these compile specs.

    This is our backend, unless another backend with the same name is loaded and this package wrote
    no spec of the list.

    Raises:
        LoweringError: Several other backends with the name are loaded.
    """
    claim_name()
    backends = DeregisteredBackend.__subclasses__()
    if not backends or is_own(compile_specs):
        return CoreMLBackend
    if len(backends) > 1:
        raise LoweringError(
            "several backends beside this one are named CoreMLBackend",
            got=", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in backends),
            expected="one at most, to lower the programs of other partitioners",
        )
    return backends[0]


def _indices_by_owner(
    compile_specs: Mapping[str, Sequence[Sequence[CompileSpec]]],
) -> dict[type[BackendDetails], dict[str, list[int]]]:
    """Return the indices of each backend's subgraphs, by method."""
    by_owner: dict[type[BackendDetails], dict[str, list[int]]] = {}
    for method, subgraph_specs in compile_specs.items():
        for index, specs in enumerate(subgraph_specs):
            by_owner.setdefault(owner_of(specs), {}).setdefault(method, []).append(index)
    return by_owner


def _select(
    by_method: Mapping[str, Sequence[_Item]], indices: Mapping[str, Sequence[int]]
) -> dict[str, list[_Item]]:
    return {name: [by_method[name][index] for index in own] for name, own in indices.items()}


claim_name()
