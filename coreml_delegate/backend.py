"""``CoreMLBackend``: the ahead-of-time half of the delegate, as ExecuTorch calls it."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, final

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from coreml_delegate.blob import flatten
from coreml_delegate.compile_options import (
    ENUMERATED_SHAPES_KEY,
    WEIGHT_SHARING_KEY,
    CompileOptions,
    ComputeUnit,
    KeepFp32,
    ModelType,
    Precision,
    WeightSharing,
    is_own,
)
from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.preprocess import kept
from coreml_delegate.preprocess.enumerated_shapes import enumerate_inputs
from coreml_delegate.preprocess.multifunction import lower_methods
from coreml_delegate.preprocess.package import build_files
from coreml_delegate.targets import Opset
from coreml_delegate.weight_compression import Stage, checked_linear, stages_of

_Item = TypeVar("_Item")

MULTIMETHOD_WEIGHT_SHARING_STRATEGY = WeightSharing
"""``WeightSharing`` by the name it has in ExecuTorch's own backend."""


@final
class CoreMLBackend(BackendDetails):
    """The backend ExecuTorch knows by the name ``CoreMLBackend``."""

    MODEL_TYPE = ModelType
    MULTIMETHOD_WEIGHT_SHARING_STRATEGY = WeightSharing

    @staticmethod
    def generate_compile_specs(
        compute_unit: Any = ComputeUnit.ALL,
        minimum_deployment_target: Any = None,
        compute_precision: Any = Precision.FLOAT16,
        model_type: Any = ModelType.MODEL,
        op_linear_quantizer_config: Mapping[str, Any] | None = None,
        pass_names: Sequence[str] | None = None,
        keep_fp32: Mapping[str, Sequence[str]] | None = None,
        weight_compression: Stage | Sequence[Stage] | None = None,
    ) -> list[CompileSpec]:
        """Compile specs for ``CoreMLPartitioner`` or ``to_backend``.

        Args:
            compute_unit: ``coremltools.ComputeUnit`` or our ``ComputeUnit``.
            minimum_deployment_target: ``coremltools.target`` or ``Opset``; None for the smallest
                that the model needs.
            compute_precision: ``coremltools.precision`` or our ``Precision``.
            model_type: ``CoreMLBackend.MODEL_TYPE``.
            op_linear_quantizer_config: Keywords of coremltools' ``OpLinearQuantizerConfig``, to
                quantize the weights after conversion; embedding tables keep theirs.
            pass_names: Graph passes of coremltools to run instead of its default pipeline.
            keep_fp32: What computes in fp32 all the same: types of MIL ops under ``"ops"``, paths
                or class names of modules under ``"modules"``; see ``KeepFp32``.
            weight_compression: Compression of the weights after conversion, by quantization,
                palettization or pruning: the dictionary that coremltools'
                ``OptimizationConfig.from_dict`` takes, or several, to be applied in turn.

        Raises:
            OptionError: A value that is not accepted.
        """
        return CompileOptions(
            compute_unit=_member(ComputeUnit, compute_unit, "compute_unit"),
            deployment_target=_target(minimum_deployment_target),
            precision=_member(Precision, compute_precision, "compute_precision"),
            model_type=_member(ModelType, model_type, "model_type"),
            op_linear_quantizer_config=checked_linear(op_linear_quantizer_config),
            pass_names=None if pass_names is None else tuple(pass_names),
            keep_fp32=KeepFp32.of(keep_fp32 or {}),
            weight_compression=(
                None if weight_compression is None else stages_of(weight_compression)
            ),
        ).to_specs()

    @staticmethod
    def generate_multimethod_weight_sharing_strategy_compile_spec(strategy: Any) -> CompileSpec:
        """The compile spec, to be added to the others, of how methods share weights.

        Args:
            strategy: ``WeightSharing``, or ExecuTorch's own enum of the same names.

        Raises:
            OptionError: Neither.
        """
        member = _member(WeightSharing, strategy, "strategy")
        return _single(CompileOptions(weight_sharing=member), WEIGHT_SHARING_KEY)

    @staticmethod
    def generate_enumerated_shapes_compile_spec(
        ep: ExportedProgram, enumerated_shapes: Mapping[str, Sequence[Sequence[int]]]
    ) -> CompileSpec:
        """The compile spec, to be added to the others, of input shapes to choose among.

        Any other shapes, and any other combination of them, are an error at run time. A program
        may be delegated in part: shapes are carried to the inputs of each partition.

        Args:
            ep: From ``torch.export``, with every dimension dynamic in which the shapes differ.
            enumerated_shapes: By input name its shapes; the n-th shapes of all inputs go together.
                Several such inputs need iOS18.

        Raises:
            OptionError: The program does not have such an input, or does not take such a shape; an
                input is left out; combinations are too few, too many, or listed twice.
        """
        enumerated = enumerate_inputs(ep, enumerated_shapes)
        return _single(CompileOptions(enumerated_shapes=enumerated), ENUMERATED_SHAPES_KEY)

    @classmethod
    def copy_exported_program_for_preprocess(
        cls,
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],
    ) -> ExportedProgram:
        """A copy to be passed to ``preprocess``, which changes no tensor: it has the same ones."""
        owner = owner_of(compile_specs)
        if owner is not cls:
            return owner.copy_exported_program_for_preprocess(edge_program, compile_specs)
        held: list[Any] = [*edge_program.state_dict.values(), *edge_program.constants.values()]
        shared = {id(value): value for value in held if isinstance(value, torch.Tensor)}
        return copy.deepcopy(edge_program, shared)

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Lower a whole subgraph to a blob.

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
        files = kept.take(edge_program, options) or build_files(edge_program, options)
        compile_specs[:] = options.to_specs()
        return PreprocessResult(processed_bytes=flatten(files))

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Lower the partitions of all methods; those that can share weights do.

        Args:
            edge_programs: The subgraphs of each method; ExecuTorch passes copies.
            compile_specs: Of each subgraph; rewritten in place, see ``preprocess``.

        Raises:
            CoreMLDelegateError: See ``lower_methods`` and ``owner_of``.
        """
        results: dict[str, list[PreprocessResult | None]] = {
            method: [None] * len(programs) for method, programs in edge_programs.items()
        }
        for owner, places in _places_by_owner(compile_specs).items():
            lower = lower_methods if owner is cls else owner.preprocess_multimethod
            lowered = lower(_chosen(edge_programs, places), _chosen(compile_specs, places))
            for method, made in lowered.items():
                for place, result in zip(places[method], made, strict=True):
                    results[method][place] = result
        return cast("dict[str, list[PreprocessResult]]", results)


def _single(options: CompileOptions, key: str) -> CompileSpec:
    (spec,) = (spec for spec in options.to_specs() if spec.key == key)
    return spec


class DeregisteredBackend(BackendDetails):
    """Base of the backends that have our name and gave up being found by it.

    ExecuTorch looks for a name among the direct subclasses of ``BackendDetails``, and takes the
    first match on one path, the last on another. See ``claim_name``.
    """


def claim_name() -> None:
    """Make ours the only backend that ExecuTorch finds by its name.

    Any other loaded class of that name gets ``DeregisteredBackend`` between itself and
    ``BackendDetails``. It works as before, and our backend hands it its subgraphs.
    """
    for backend in BackendDetails.__subclasses__():
        if backend.__name__ == CoreMLBackend.__name__ and backend is not CoreMLBackend:
            backend.__bases__ = tuple(
                DeregisteredBackend if b is BackendDetails else b for b in backend.__bases__
            )


def owner_of(compile_specs: Iterable[CompileSpec]) -> type[BackendDetails]:
    """The backend that lowers a subgraph with these compile specs.

    Ours, unless another of its name is loaded and this package wrote none of them.

    Raises:
        LoweringError: Several others are loaded.
    """
    claim_name()
    others = DeregisteredBackend.__subclasses__()
    if not others or is_own(compile_specs):
        return CoreMLBackend
    if len(others) > 1:
        raise LoweringError(
            "several backends beside this one are named CoreMLBackend",
            got=", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in others),
            expected="one at most, to lower the programs of other partitioners",
        )
    return others[0]


def _places_by_owner(
    compile_specs: Mapping[str, Sequence[Sequence[CompileSpec]]],
) -> dict[type[BackendDetails], dict[str, list[int]]]:
    """The subgraphs of each backend, by method, as positions among those of the method."""
    found: dict[type[BackendDetails], dict[str, list[int]]] = {}
    for method, of_subgraphs in compile_specs.items():
        for place, specs in enumerate(of_subgraphs):
            found.setdefault(owner_of(specs), {}).setdefault(method, []).append(place)
    return found


def _chosen(
    by_method: Mapping[str, Sequence[_Item]], places: Mapping[str, Sequence[int]]
) -> dict[str, list[_Item]]:
    return {name: [by_method[name][place] for place in chosen] for name, chosen in places.items()}


def _member(kind: type[enum.Enum], value: Any, keyword: str) -> Any:
    """Our enum member for a member of ours or of coremltools' enum of the same names."""
    if isinstance(value, kind):
        return value
    name = getattr(value, "name", None)
    if isinstance(name, str) and name in kind.__members__ and isinstance(value, enum.Enum):
        return kind[name]
    raise OptionError(
        f"{keyword} has an unknown value", got=repr(value), expected=" | ".join(kind.__members__)
    )


def _target(value: Any) -> Opset | None:
    if value is None or isinstance(value, Opset):
        return value
    try:
        return Opset(value)  # coremltools.target counts in specification versions, as Opset does
    except ValueError:
        raise OptionError(
            "minimum_deployment_target has no ML Programs",
            got=str(value),
            expected=f"{Opset.iOS15.name} or later",
        ) from None


claim_name()
