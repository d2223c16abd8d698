"""Methods of ``CoreMLBackend`` that create and read compile specs, one by one or all at once."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from coreml_delegate.compile_options import (
    CompileOptions,
    ComputeUnit,
    KeepFp32,
    ModelType,
    Precision,
    WeightSharing,
)
from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.dynamic_shapes.enumerated_inputs import enumerate_inputs
from coreml_delegate.errors import OptionError
from coreml_delegate.lowering.coremltools_options import (
    check_accepted,
    linear_config,
    pass_pipeline,
)
from coreml_delegate.option_checks import instance, list_of, optional
from coreml_delegate.targets import Opset
from coreml_delegate.third_party import coremltools
from coreml_delegate.weight_compression import Stage, checked_linear, stages_of


class CompileSpecMethods:
    """Creates and reads compile specs; options without a spec have their defaults.

    Readers use the first spec with their key, and return coremltools' object for its value.
    """

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
        """Return the compile specs for ``CoreMLPartitioner`` or ``to_backend``.

        Args:
            compute_unit: ``coremltools.ComputeUnit`` or our ``ComputeUnit``.
            minimum_deployment_target: ``coremltools.target`` or ``Opset``; None for the oldest
                target that the model needs.
            compute_precision: ``coremltools.precision`` or our ``Precision``.
            model_type: ``CoreMLBackend.MODEL_TYPE``.
            op_linear_quantizer_config: Keywords of coremltools' ``OpLinearQuantizerConfig``, to
                quantize the weights after conversion, except embedding tables.
            pass_names: Graph passes of coremltools to run instead of its default pipeline.
            keep_fp32: Parts of an fp16 model that compute in fp32: types of MIL ops under
                ``"ops"``, paths or class names of modules under ``"modules"``; see ``KeepFp32``.
            weight_compression: Compression of the weights after conversion, by quantization,
                palettization or pruning: a dictionary for coremltools'
                ``OptimizationConfig.from_dict``, or a list of dictionaries to apply in turn.

        Raises:
            OptionError: A value is not accepted.
        """
        optional(list_of("names of graph passes", str))("pass_names", pass_names)
        options = CompileOptions(
            compute_unit=member_of(ComputeUnit, compute_unit, "compute_unit"),
            deployment_target=_target(minimum_deployment_target),
            precision=member_of(Precision, compute_precision, "compute_precision"),
            model_type=member_of(ModelType, model_type, "model_type"),
            op_linear_quantizer_config=checked_linear(op_linear_quantizer_config),
            pass_names=None if pass_names is None else tuple(pass_names),
            keep_fp32=KeepFp32() if keep_fp32 is None else KeepFp32.of(keep_fp32),
            weight_compression=(
                None if weight_compression is None else stages_of(weight_compression)
            ),
        )
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
        member = member_of(WeightSharing, strategy, "strategy")
        return CompileOptions(weight_sharing=member).spec_of("weight_sharing")

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
        return CompileOptions(enumerated_shapes=enumerated).spec_of("enumerated_shapes")

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
        unit = member_of(ComputeUnit, compute_unit, "compute_unit")
        return CompileOptions(compute_unit=unit).spec_of("compute_unit")

    @staticmethod
    def compute_unit_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.ComputeUnit``, ``ALL`` by default."""
        unit = CompileOptions.value_in(compile_specs, "compute_unit")
        return coremltools().ComputeUnit[unit.name]

    @staticmethod
    def generate_minimum_deployment_target_compile_spec(min_deployment_target: Any) -> CompileSpec:
        """Return the compile spec of a ``coremltools.target``; None for the oldest usable one."""
        target = _target(min_deployment_target)
        return CompileOptions(deployment_target=target).spec_of("deployment_target")

    @staticmethod
    def min_deployment_target_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.target``, None by default."""
        target = CompileOptions.value_in(compile_specs, "deployment_target")
        return None if target is None else coremltools().target(int(target))

    @staticmethod
    def generate_compute_precision_compile_spec(compute_precision: Any) -> CompileSpec:
        """Return the compile spec of a ``coremltools.precision``."""
        precision = member_of(Precision, compute_precision, "compute_precision")
        return CompileOptions(precision=precision).spec_of("precision")

    @staticmethod
    def model_compute_precision_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.precision``, ``FLOAT16`` by default."""
        precision = CompileOptions.value_in(compile_specs, "precision")
        return coremltools().precision(precision.value)

    @staticmethod
    def generate_model_type_compile_spec(model_type: Any) -> CompileSpec:
        """Return the compile spec of a ``MODEL_TYPE``."""
        kind = member_of(ModelType, model_type, "model_type")
        return CompileOptions(model_type=kind).spec_of("model_type")

    @staticmethod
    def model_type_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> ModelType:
        """Return the ``MODEL_TYPE``, ``MODEL`` by default."""
        return CompileOptions.value_in(compile_specs, "model_type")

    @staticmethod
    def generate_op_linear_quantizer_config_compile_spec(
        op_linear_quantizer_config: Mapping[str, Any],
    ) -> CompileSpec:
        """Return the compile spec of keyword arguments of ``OpLinearQuantizerConfig``."""
        instance(Mapping, "a dictionary")("op_linear_quantizer_config", op_linear_quantizer_config)
        options = CompileOptions(
            op_linear_quantizer_config=checked_linear(op_linear_quantizer_config)
        )
        check_accepted(options)
        return options.spec_of("op_linear_quantizer_config")

    @staticmethod
    def op_linear_quantizer_config_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return coremltools' ``OpLinearQuantizerConfig``, None by default."""
        keywords = CompileOptions.value_in(compile_specs, "op_linear_quantizer_config")
        return None if keywords is None else linear_config(keywords)

    @staticmethod
    def generate_pass_pipeline_compile_spec(pass_names: Sequence[str]) -> CompileSpec:
        """Return the compile spec of a list of graph passes."""
        list_of("names of graph passes", str)("pass_names", pass_names)
        options = CompileOptions(pass_names=tuple(pass_names))
        check_accepted(options)
        return options.spec_of("pass_names")

    @staticmethod
    def pass_pipeline_from_compile_specs(compile_specs: Iterable[CompileSpec]) -> Any:
        """Return the ``coremltools.PassPipeline``, ``DEFAULT`` by default."""
        names = CompileOptions.value_in(compile_specs, "pass_names")
        return coremltools().PassPipeline.DEFAULT if names is None else pass_pipeline(names)


def member_of(kind: type[enum.Enum], value: Any, keyword: str) -> Any:
    """Return our enum member for a member of our enum, or of an enum with the same names.

    Raises:
        OptionError: The value is no member of either.
    """
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
        return Opset(value)  # values of coremltools.target are specification versions, as in Opset
    except ValueError:
        raise OptionError(
            "minimum_deployment_target has no ML Programs",
            got=str(value),
            expected=f"{Opset.iOS15.name} or later",
        ) from None
