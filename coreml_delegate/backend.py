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

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.dynamic_shapes.enumerated_inputs import enumerate_inputs
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
from coreml_delegate.formats.files import temporary_folder
from coreml_delegate.lowering import store
from coreml_delegate.lowering.build import build_files, check_accepted, pass_pipeline
from coreml_delegate.lowering.compression import linear_config
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.lowering.model_files import Conversion, check_compiler, model_files, result_of
from coreml_delegate.lowering.multifunction import lower_methods
from coreml_delegate.options.checks import instance, member
from coreml_delegate.options.compile_specs import ModelType, Precision, WeightSharing, is_own
from coreml_delegate.options.declaration import takes
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.executorch import hide_from_search
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import STATE_OPSET

_Item = TypeVar("_Item")

_MAPPING = "executorch_debug_handle_mapping.json"

MULTIMETHOD_WEIGHT_SHARING_STRATEGY = WeightSharing
"""The name of ``WeightSharing`` in ExecuTorch's own backend."""


class _CompileSpecMethods:
    """Creates and reads compile specs; options without a spec have their defaults.

    Readers use the first spec with their key, and return coremltools' object for its value.
    """

    MODEL_TYPE = ModelType
    MULTIMETHOD_WEIGHT_SHARING_STRATEGY = WeightSharing

    @classmethod
    @takes(CompileOptions.from_keywords, CompileOptions)
    def generate_compile_specs(cls, options: CompileOptions) -> list[CompileSpec]:
        """Return the compile specs for ``CoreMLPartitioner`` or ``to_backend``.

        Args:
            options: See ``CompileOptions``.

        Raises:
            OptionError: A value is not accepted.
        """
        check_accepted(options)
        return options.to_specs()

    @staticmethod
    def generate_multimethod_weight_sharing_strategy_compile_spec(strategy: Any) -> CompileSpec:
        """Return the compile spec of the weight-sharing strategy, to add to the list.

        Args:
            strategy: ``WeightSharing``, or ExecuTorch's own enum of the same names.

        Raises:
            OptionError: The strategy is neither.
        """
        return _spec(weight_sharing=strategy)

    @staticmethod
    def generate_enumerated_shapes_compile_spec(
        ep: ExportedProgram, enumerated_shapes: Mapping[str, Sequence[Sequence[int]]]
    ) -> CompileSpec:
        """Return the compile spec of enumerated input shapes, to add to the list.

        Any other shapes, and any other combination of them, are an error at run time. A program
        may be partly delegated: shapes are mapped to the inputs of each partition.

        Args:
            ep: From ``torch.export``, with every dimension dynamic in which the shapes differ.
            enumerated_shapes: Shapes by input name; the n-th shapes of all inputs form a
                combination. Several inputs need iOS18.

        Raises:
            OptionError: An input is unknown or missing, the program does not take a shape, or there
                are too few, too many or repeated combinations.
        """
        instance(ExportedProgram, "a program from torch.export")("ep", ep)
        shapes = "a dictionary of input names to lists of shapes"
        instance(Mapping, shapes)("enumerated_shapes", enumerated_shapes)
        enumerated = enumerate_inputs(ep, enumerated_shapes)
        return _spec(enumerated_shapes=enumerated)

    @staticmethod
    def enumerated_shapes_from_compile_specs(
        compile_specs: Iterable[CompileSpec],
    ) -> EnumeratedShapes | None:
        """Return the enumerated input shapes; None without enumerated shapes."""
        return CompileOptions.value_in(compile_specs, "enumerated_shapes")

    @staticmethod
    def multimethod_weight_sharing_strategy_from_compile_specs(
        compile_specs: Iterable[CompileSpec],
    ) -> WeightSharing:
        """Return the weight-sharing strategy.

        ``POSITIONAL`` by default, as in ExecuTorch's own backend; ours then shares if possible.
        """
        strategy = CompileOptions.value_in(compile_specs, "weight_sharing")
        return WeightSharing.POSITIONAL if strategy is None else strategy

    @staticmethod
    def generate_compute_unit_compile_spec(compute_unit: Any) -> CompileSpec:
        """Return the compile spec of a ``coremltools.ComputeUnit``."""
        return _spec(compute_unit=compute_unit)

    @staticmethod
    def compute_unit_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.ComputeUnit``, ``ALL`` by default."""
        unit = CompileOptions.value_in(compile_specs, "compute_unit")
        return coremltools().ComputeUnit[unit.name]

    @staticmethod
    def generate_minimum_deployment_target_compile_spec(min_deployment_target: Any) -> CompileSpec:
        """Return the compile spec of a ``coremltools.target``; None for the oldest usable one."""
        return _spec(deployment_target=min_deployment_target)

    @staticmethod
    def min_deployment_target_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.target``, None by default."""
        target = CompileOptions.value_in(compile_specs, "deployment_target")
        return None if target is None else coremltools().target(int(target))

    @staticmethod
    def generate_compute_precision_compile_spec(compute_precision: Any) -> CompileSpec:
        """Return the compile spec of a ``coremltools.precision``."""
        return _spec(precision=compute_precision)

    @staticmethod
    def model_compute_precision_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.precision``, ``FLOAT16`` by default."""
        precision = CompileOptions.value_in(compile_specs, "precision")
        is_auto = precision is Precision.AUTO  # fp16, until a partitioner has chosen
        return coremltools().precision((Precision.FLOAT16 if is_auto else precision).value)

    @staticmethod
    def generate_model_type_compile_spec(model_type: Any) -> CompileSpec:
        """Return the compile spec of a ``MODEL_TYPE``."""
        return _spec(model_type=model_type)

    @staticmethod
    def model_type_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> ModelType:
        """Return the ``MODEL_TYPE``, ``MODEL`` by default."""
        return CompileOptions.value_in(compile_specs, "model_type")

    @staticmethod
    def generate_op_linear_quantizer_config_compile_spec(
        op_linear_quantizer_config: Mapping[str, Any],
    ) -> CompileSpec:
        """Return the compile spec of keyword arguments of ``OpLinearQuantizerConfig``."""
        return _spec(op_linear_quantizer_config=op_linear_quantizer_config)

    @staticmethod
    def op_linear_quantizer_config_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return coremltools' ``OpLinearQuantizerConfig``, None by default."""
        keywords = CompileOptions.value_in(compile_specs, "op_linear_quantizer_config")
        return None if keywords is None else linear_config(keywords)

    @staticmethod
    def generate_pass_pipeline_compile_spec(pass_names: Sequence[str]) -> CompileSpec:
        """Return the compile spec of a list of graph passes."""
        return _spec(pass_names=pass_names)

    @staticmethod
    def pass_pipeline_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.PassPipeline``, ``DEFAULT`` by default."""
        names = CompileOptions.value_in(compile_specs, "pass_names")
        return coremltools().PassPipeline.DEFAULT if names is None else pass_pipeline(names)


@final
class CoreMLBackend(_CompileSpecMethods, BackendDetails):
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
        kind = member(ModelType)("model_type", model_type)
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


def _spec(**option: Any) -> CompileSpec:
    """Return the compile spec of one option of ``CompileOptions``."""
    options = CompileOptions(**option)
    check_accepted(options)
    (name,) = option
    return options.spec_of(name)
