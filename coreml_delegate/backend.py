"""``CoreMLBackend``: the ahead-of-time half of the delegate, as ExecuTorch calls it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, final

from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from coreml_delegate.compile_options import (
    WEIGHT_SHARING_KEY,
    CompileOptions,
    ComputeUnit,
    KeepFp32,
    ModelType,
    Precision,
    WeightSharing,
)
from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.preprocess import kept
from coreml_delegate.preprocess.multifunction import lower_methods
from coreml_delegate.preprocess.package import build_blob
from coreml_delegate.targets import Opset

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
        op_linear_quantizer_config: dict[str, Any] | None = None,
        pass_names: Sequence[str] | None = None,
        keep_fp32: Mapping[str, Sequence[str]] | None = None,
    ) -> list[CompileSpec]:
        """Compile specs for ``CoreMLPartitioner`` or ``to_backend``.

        Args:
            compute_unit: ``coremltools.ComputeUnit`` or our ``ComputeUnit``.
            minimum_deployment_target: ``coremltools.target`` or ``Opset``; None for the smallest
                that the model needs.
            compute_precision: ``coremltools.precision`` or our ``Precision``.
            model_type: ``CoreMLBackend.MODEL_TYPE``.
            op_linear_quantizer_config: Keywords of coremltools' ``OpLinearQuantizerConfig``.
            pass_names: Graph passes of coremltools to run instead of its default pipeline.
            keep_fp32: What computes in fp32 all the same: types of MIL ops under ``"ops"``, paths
                or class names of modules under ``"modules"``; see ``KeepFp32``.

        Raises:
            OptionError: A value that is not accepted.
        """
        return CompileOptions(
            compute_unit=_member(ComputeUnit, compute_unit, "compute_unit"),
            deployment_target=_target(minimum_deployment_target),
            precision=_member(Precision, compute_precision, "compute_precision"),
            model_type=_member(ModelType, model_type, "model_type"),
            op_linear_quantizer_config=op_linear_quantizer_config,
            pass_names=None if pass_names is None else tuple(pass_names),
            keep_fp32=KeepFp32.of(keep_fp32 or {}),
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
        (spec,) = (
            spec
            for spec in CompileOptions(weight_sharing=member).to_specs()
            if spec.key == WEIGHT_SHARING_KEY
        )
        return spec

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
            CoreMLDelegateError: See ``build_blob``.
        """
        check_single_backend()
        options = CompileOptions.from_specs(compile_specs)
        blob = kept.take(edge_program, options) or build_blob(edge_program, options)
        compile_specs[:] = options.to_specs()
        return PreprocessResult(processed_bytes=blob)

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
            CoreMLDelegateError: See ``lower_methods``.
        """
        check_single_backend()
        return lower_methods(edge_programs, compile_specs)


def check_single_backend() -> None:
    """Refuse to lower next to another backend of the same name.

    ExecuTorch looks backends up by class name, taking the first match on one path and the last on
    another; with two of them a partition of ours could reach the other's ``preprocess``.

    Raises:
        LoweringError: Another class named ``CoreMLBackend`` is loaded.
    """
    others = [
        cls
        for cls in BackendDetails.__subclasses__()
        if cls.__name__ == CoreMLBackend.__name__ and cls is not CoreMLBackend
    ]
    if others:
        raise LoweringError(
            "two backends are named CoreMLBackend",
            got=", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in others),
            remedy="Do not import it in the process that lowers with coreml_delegate",
        )


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
