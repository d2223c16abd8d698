"""Options of a lowering: how to compile, and what to delegate.

``CompileOptions`` are encoded as compile specs, which a ``.pte`` stores. ``PartitionerKeywords``
are the options of ``CoreMLPartitioner``, one of which is a list of compile specs.

Wire format, one ``CompileSpec(key, value)`` each, all values UTF-8::

    compute_units               cpu_only | cpu_and_gpu | cpu_and_ne | all   (read on device)
    min_deployment_target       specification version as decimal, empty for none
    model_compute_precision     float16 | float32 (auto until a partitioner has chosen)
    model_type                  model | compiled_model
    enumerated_shapes           JSON list, see ``dynamic_shapes.enumerated`` (optional)
    op_linear_quantizer_config  JSON object (optional)
    weight_compression          JSON list of objects, see ``options.weight_compression`` (optional)
    keep_fp32                   JSON object: lists "ops", "modules", "nodes" (optional)
    pass_pipeline               JSON list of pass names (optional)
    multimethod_weight_sharing_strategy  positional | disabled (optional)
    device                      neural-engine | gpu | cpu (optional)

The oldest documents have the compute units ``cpu``, ``gpu``, ``ane``, which are read, but not
written. Source: ExecuTorch 1.5, Core ML backend documents and ``coreml_preprocess``.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import (
    Check,
    flag,
    function,
    instance,
    list_of,
    member,
    one_of,
    positive,
    positive_number,
    refused,
    values_of,
)
from coreml_delegate.options.checks import optional as or_none
from coreml_delegate.options.compile_specs import (
    KeepFp32,
    ModelType,
    OwnKey,
    Precision,
    WeightSharing,
    checked_specs,
    decoded_text,
    enum_form,
    json_form,
)
from coreml_delegate.options.declaration import (
    Argument,
    SpecForm,
    check_fields,
    option,
    option_class,
    options_of,
)
from coreml_delegate.options.weight_compression import (
    LINEAR_OPTION,
    Stage,
    checked_linear,
    demand,
    require_target,
    stages_of,
)
from coreml_delegate.options.weight_compression import OPTION as COMPRESSION_KEY
from coreml_delegate.targets import ComputeUnit, Device, Opset

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from torch import nn
    from torch.fx import Node


# How to compile


def _unnamed(check: Callable[[Any], Any]) -> Check:
    """Return a check whose messages name the option themselves."""
    return lambda _, value: None if value is None else check(value)


@option_class()
class CompileOptions:
    """Options of a lowering.

    Attributes:
        options: See the fields.

    Raises:
        OptionError: A value is not accepted.
    """

    compute_unit: ComputeUnit = option(
        default=ComputeUnit.ALL,
        check=member(ComputeUnit, "{} must be a coremltools.ComputeUnit"),
        doc="Processors that the device may use: ``coremltools.ComputeUnit`` or our "
        "``ComputeUnit``.",
        argument=Argument("--compute-unit", choices=values_of(ComputeUnit)),
        is_in_recipes=True,
        spec=enum_form(
            "compute_units",
            ComputeUnit,
            cpu=ComputeUnit.CPU_ONLY,
            gpu=ComputeUnit.CPU_AND_GPU,
            ane=ComputeUnit.CPU_AND_NE,
        ),
    )
    deployment_target: Opset | None = option(
        default=None,
        check=or_none(member(Opset, "{} must be a coremltools.target")),
        doc="Oldest system to support: ``coremltools.target`` or ``Opset``, iOS15 or later; None "
        "for the oldest that the model needs.",
        keyword="minimum_deployment_target",
        argument=Argument("--deployment-target", metavar="iOS17", parse=Opset.from_target_name),
        is_in_recipes=True,
        spec=SpecForm(
            "min_deployment_target",
            lambda value: "" if value is None else str(int(value)),
            one_of(
                {"": None} | {str(int(opset)): opset for opset in Opset},
                "{} is not a specification version with ML Programs",
            ),
        ),
    )
    precision: Precision = option(
        default=Precision.FLOAT16,
        check=member(Precision, texts=values_of(Precision)),
        doc="Floating-point type that Core ML computes in: ``coremltools.precision`` or our "
        "``Precision``. ``auto`` is fp16, but for the calls that lose their numbers on example "
        "inputs; see ``CoreMLPartitioner``.",
        keyword="compute_precision",
        argument=Argument("--precision", choices=values_of(Precision)),
        spec=enum_form("model_compute_precision", Precision),
    )
    model_type: ModelType = option(
        default=ModelType.MODEL,
        check=member(ModelType),
        doc="``CoreMLBackend.MODEL_TYPE``; ``COMPILED_MODEL`` compiles ahead of time, on a Mac.",
        spec=enum_form("model_type", ModelType),
    )
    op_linear_quantizer_config: Mapping[str, Any] | None = option(
        default=None,
        check=_unnamed(checked_linear),
        doc="Keywords of coremltools' ``OpLinearQuantizerConfig``, to quantize the weights after "
        "conversion, except embedding tables; None for no quantization.",
        spec=json_form(LINEAR_OPTION, "a JSON object"),
    )
    weight_compression: tuple[Stage, ...] | None = option(
        default=None,
        check=_unnamed(stages_of),
        doc="Compression of the weights after conversion, by quantization, palettization or "
        "pruning: a dictionary for coremltools' ``OptimizationConfig.from_dict``, or a list of "
        "dictionaries to apply in turn; None for no compression.",
        spec=json_form(COMPRESSION_KEY, "a JSON list"),
    )
    pass_names: tuple[str, ...] | None = option(
        default=None,
        check=or_none(list_of("names of graph passes", str)),
        doc="Graph passes of coremltools to run; None for its default pipeline.",
        spec=json_form("pass_pipeline", "a JSON list of strings"),
    )
    keep_fp32: KeepFp32 = option(
        default=KeepFp32(),
        check=lambda _, value: KeepFp32.of({} if value is None else value),
        doc="Parts of an fp16 model that compute in fp32: types of MIL ops under ``ops``, paths or "
        'class names of modules under ``modules``, as in ``{"ops": ["softmax"]}``; see '
        "``KeepFp32``.",
        spec=json_form("keep_fp32", "a JSON object", KeepFp32.encode),
    )
    enumerated_shapes: EnumeratedShapes | None = option(
        default=None,
        check=or_none(instance(EnumeratedShapes, "an EnumeratedShapes")),
        doc="Supported combinations of input shapes; None for all shapes that the program was "
        "exported for.",
        spec=json_form(
            "enumerated_shapes", "a JSON list", EnumeratedShapes.encode, EnumeratedShapes.decode
        ),
    )
    weight_sharing: WeightSharing | None = option(
        default=None,
        check=or_none(member(WeightSharing)),
        doc="``WeightSharing`` of the methods, or ExecuTorch's own enum of the same names; None to "
        "share if it is safe.",
        keyword="strategy",
        spec=enum_form("multimethod_weight_sharing_strategy", WeightSharing),
    )

    device: Device | None = option(
        default=None,
        check=or_none(member(Device, texts=values_of(Device))),
        doc="Processor to shape the program for, by rewrites of operations that it does not run "
        "well, and calls left to the CPU; see ``docs/check.md``. None for no processor.",
        argument=Argument("--for", choices=values_of(Device), dest="device"),
        is_in_recipes=True,
        spec=enum_form("device", Device),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        device = self.device
        if device is not None and not device.is_in(self.compute_unit):
            raise OptionError(
                f"a program for the {device.text} needs a compute unit that has it",
                got=self.compute_unit.value,
                expected=f"{ComputeUnit.ALL.value} or {device.compute_unit.value}",
            )
        if device is Device.NEURAL_ENGINE and self.precision is Precision.FLOAT32:
            raise OptionError(
                "the neural engine computes in fp16",
                got=f"precision {self.precision.value}",
                remedy="Lower in float16 or auto, or for another processor",
            )

    @classmethod
    def from_keywords(
        cls,
        compute_unit: Any = ComputeUnit.ALL,
        minimum_deployment_target: Any = None,
        compute_precision: Any = Precision.FLOAT16,
        model_type: Any = ModelType.MODEL,
        op_linear_quantizer_config: Mapping[str, Any] | None = None,
        pass_names: Sequence[str] | None = None,
        keep_fp32: Mapping[str, Sequence[str]] | None = None,
        weight_compression: Stage | Sequence[Stage] | None = None,
        device: Any = None,
    ) -> CompileOptions:
        """Return options by the keywords and types of ``CoreMLBackend.generate_compile_specs``.

        Raises:
            OptionError: A value is not accepted.
        """
        values = locals()
        return cls(**{o.name: values[o.keyword] for o in options_of(cls) if o.keyword in values})

    @property
    def compression_demand(self) -> tuple[Opset, str] | None:
        """The oldest opset that weight compression needs, and the feature that needs it."""
        return demand(self.op_linear_quantizer_config, self.weight_compression)

    @property
    def oldest_for_compression(self) -> Opset:
        """The opset of ``compression_demand``."""
        return (self.compression_demand or (Opset.iOS15, ""))[0]

    def check_compression(self) -> None:
        """Check that the deployment target supports weight compression.

        Raises:
            OptionError: The target is too old.
        """
        requirement = self.compression_demand
        if requirement is not None and self.deployment_target is not None:
            require_target(self.deployment_target, *requirement)

    def to_specs(self) -> list[CompileSpec]:
        """Return the compile specs in a fixed order; an option that is None has no spec."""
        # Importing exir takes seconds, and reading options does not need it.
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        texts = ((form.key, self._encoded(name)) for name, form in _SPECS.items())
        return [CompileSpec(OwnKey(key), text.encode()) for key, text in texts if text is not None]

    def _encoded(self, name: str) -> str | None:
        value, form = getattr(self, name), _SPECS[name]
        try:
            return form.encode(value)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{name} has a value that a compile spec cannot hold",
                got=repr(value),
                expected=f"a value that JSON can hold ({error})",
            ) from error

    @classmethod
    def from_specs(cls, specs: Iterable[CompileSpec]) -> CompileOptions:
        """Decode compile specs; options without a spec have their defaults.

        Raises:
            OptionError: This is not a list of compile specs, a key is unknown or duplicate, or a
                value is not accepted.
        """
        return cls.from_pairs((spec.key, spec.value) for spec in checked_specs(specs))

    @classmethod
    def value_in(cls, specs: Iterable[CompileSpec], attribute: str) -> Any:
        """Return one option of compile specs, or its default; other specs are not decoded.

        Raises:
            OptionError: This is not a list of compile specs, or the value is not accepted.
        """
        key = _SPECS[attribute].key
        pairs = [(spec.key, spec.value) for spec in checked_specs(specs) if spec.key == key]
        return getattr(cls.from_pairs(pairs[:1]), attribute)

    def spec_of(self, attribute: str) -> CompileSpec:
        """Return the compile spec of one option.

        Raises:
            OptionError: The option is None, which no spec expresses.
        """
        for spec in self.to_specs():
            if spec.key == _SPECS[attribute].key:
                return spec
        raise refused(attribute, "must have a value", getattr(self, attribute))

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, bytes]]) -> CompileOptions:
        """Decode pairs of key and value, as in a ``.pte``.

        Raises:
            OptionError: See ``from_specs``.
        """
        names = {form.key: name for name, form in _SPECS.items()}
        values: dict[str, Any] = {}
        for key, value in pairs:
            name = names.get(key)
            if name is None:
                raise OptionError("unknown compile spec", got=repr(key), expected=", ".join(names))
            if name in values:
                raise OptionError("compile spec given twice", got=repr(key))
            where = f"compile spec {key!r}"
            values[name] = _SPECS[name].decode(where, decoded_text(where, value))
        return cls(**values)


_SPECS = {o.name: o.spec for o in options_of(CompileOptions) if o.spec is not None}
"""The forms of compile specs by name of the option, in the order of the specs."""


# What to delegate

_OPERATORS = or_none(list_of("operator names", str))
_MODULES = or_none(list_of("paths and classes of modules"))
_PREDICATE = or_none(function("a node of the graph"))

MIN_SQNR_DB = 40.0
"""Default ratio of signal to error, in dB, that the outputs of a program in fp16 have to reach."""


def _is_set(value: object) -> bool:
    return value is not None


def _names(argument: str) -> Argument:
    return Argument(argument, metavar="NAME", is_repeatable=True)


@option_class(kw_only=True, slots=False)
class PartitionerKeywords:
    """The options of ``CoreMLPartitioner``.

    Attributes:
        options: See the fields.

    Raises:
        OptionError: An invalid value, or options that exclude each other.
    """

    skip_ops_for_coreml_delegation: Collection[str] | None = option(
        default=None,
        check=_OPERATORS,
        doc="Operators to keep on the CPU, such as ``aten.add.Tensor``, ``aten::add.Tensor``, "
        "``add.Tensor``, ``aten.add`` (all overloads) or ``add``.",
        argument=_names("--skip-op"),
        is_in_recipes=True,
        leaves_calls=bool,
    )
    compile_specs: Collection[CompileSpec] | None = option(
        default=None,
        check=or_none(lambda _, value: tuple(checked_specs(value))),
        doc="From ``CoreMLBackend.generate_compile_specs``; None for its defaults.",
    )
    take_over_mutable_buffer: bool | None = option(
        default=True,
        check=or_none(flag),  # ExecuTorch's own takes None for False
        doc="Turn suitable mutable buffers into Core ML states (needs iOS18); other buffers become "
        "inputs and outputs. The report lists both.",
        leaves_calls=operator.not_,
    )
    take_over_constant_data: bool = option(
        default=True,
        check=flag,
        doc="Store weights and constants in the Core ML models; otherwise they become inputs.",
        is_in_recipes=True,
        leaves_calls=operator.not_,
    )
    lower_full_graph: bool = option(
        default=False,
        check=flag,
        doc="Fail, listing every obstacle, unless the entire graph can be delegated, and refuse "
        "options that leave calls to the CPU.",
        argument=Argument("--full-graph"),
        is_in_recipes=True,
    )
    only_ops: Collection[str] | None = option(
        default=None,
        check=_OPERATORS,
        doc="Operators to delegate, and no others; None for all.",
        argument=_names("--only-op"),
        leaves_calls=_is_set,
    )
    skip_modules: Collection[str | type[nn.Module]] | None = option(
        default=None,
        check=_MODULES,
        doc="Modules to keep on the CPU, by paths like ``layers.0``, paths with wildcards, or "
        "classes like ``torch.nn.LayerNorm``.",
        argument=_names("--skip-module"),
        leaves_calls=bool,
    )
    only_modules: Collection[str | type[nn.Module]] | None = option(
        default=None,
        check=_MODULES,
        doc="Modules to delegate, and nothing outside them; None for all.",
        argument=_names("--only-module"),
        leaves_calls=_is_set,
    )
    node_filter: Callable[[Node], bool] | None = option(
        default=None,
        check=_PREDICATE,
        doc="Called with every call, first in ATen and then in edge dialect, where nodes have "
        "other names; false keeps the call on the CPU.",
        leaves_calls=_is_set,
    )
    min_partition_nodes: int = option(
        default=1,
        check=positive,
        doc="Keep partitions of fewer operations on the CPU, except partitions with weights that "
        "``quantize_`` compressed, for which the CPU has no kernel.",
        argument=Argument("--min-partition-nodes", metavar="N", parse=int),
        leaves_calls=(1).__ne__,
    )
    max_partitions: int | None = option(
        default=None,
        check=or_none(positive),
        doc="Delegate at most this number of partitions, those with the most estimated FLOPs.",
        argument=Argument("--max-partitions", metavar="N", parse=int),
    )
    strict: bool = option(
        default=False,
        check=flag,
        doc="Fail, listing every obstacle, if any call stays on the CPU, for any reason.",
        argument=Argument("--strict"),
    )
    keep_fp32: Callable[[Node], bool] | None = option(
        default=None,
        check=_PREDICATE,
        doc="Called with every delegated call, in edge dialect; true keeps it in fp32 if the "
        "compile specs demand fp16. Compile specs can name such calls too.",
    )
    precision_data: Collection[Collection[Any]] | None = option(
        default=None,
        check=or_none(list_of("samples, each a tuple of arguments", (list, tuple))),
        doc='With ``compute_precision="auto"``, the inputs to measure with: a list of samples, '
        "each a tuple of the arguments of a call; None for the example inputs of "
        "``torch.export``.",
    )
    min_sqnr_db: float = option(
        default=MIN_SQNR_DB,
        check=positive_number,
        doc='With ``compute_precision="auto"``, the ratio of signal to error in dB that every '
        "floating-point output has to reach; integers and booleans have to be equal.",
        argument=Argument(
            "--min-sqnr",
            "ratio of signal to error that every output has to reach on the example inputs or the "
            "data: the goal of --precision auto, and the least of float16 without a warning",
            "DB",
            float,
        ),
        is_in_recipes=True,
    )

    device: Device | None = option(
        default=None,
        check=or_none(member(Device, texts=values_of(Device))),
        doc='Processor to shape the program for: ``"neural-engine"``, ``"gpu"`` or ``"cpu"``; None '
        "for that of the compile specs.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.precision_data is not None and not self.measures_precision:
            raise OptionError(
                "precision_data is for precision auto",
                got=f"compute_precision={self.compiling.precision.value}",
                remedy='Pass generate_compile_specs(compute_precision="auto")',
            )
        if self.lower_full_graph:
            self._check_full_graph()

    @cached_property
    def compiling(self) -> CompileOptions:
        """The compile options, decoded."""
        options = CompileOptions.from_specs(self.compile_specs or ())
        return options if self.device is None else replace(options, device=self.device)

    @property
    def measures_precision(self) -> bool:
        """Whether a measurement decides which calls compute in fp32."""
        return self.compiling.precision is Precision.AUTO

    @property
    def demands_everything(self) -> bool:
        """Whether an undelegated call is an error."""
        return self.lower_full_graph or self.strict

    @property
    def moves_calls(self) -> bool:
        """Whether calls that the neural engine does not run move to the CPU."""
        return self.compiling.device is Device.NEURAL_ENGINE and not self.demands_everything

    @property
    def shares_weights(self) -> bool:
        """Whether the n-th partitions of all methods have to become one model."""
        return self.compiling.weight_sharing is WeightSharing.POSITIONAL

    def in_fp16(self, in_fp32: Collection[str] = ()) -> Self:
        """Return the options with fp16 for precision ``auto``, and these calls in fp32."""
        keep_fp32 = self.keep_fp32

        def is_kept(node: Node) -> bool:
            return node.name in in_fp32 or (keep_fp32 is not None and keep_fp32(node))

        return replace(
            self,
            compile_specs=replace(self.compiling, precision=Precision.FLOAT16).to_specs(),
            keep_fp32=is_kept if in_fp32 else keep_fp32,
            precision_data=None,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for ``pickle``; name the option that cannot be pickled.

        Raises:
            OptionError: A function among the options cannot be pickled.
        """
        for name, value in self._functions().items():
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise OptionError(
                    f"a partitioner with this {name} cannot be pickled",
                    got=str(error),
                    remedy="Pass a function that is defined at the top of a module, or copy the "
                    "partitioner by copy.deepcopy",
                ) from error
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Only the functions can have state.
        functions = self._functions()
        return replace(self, **{n: copy.deepcopy(value, memo) for n, value in functions.items()})

    def _functions(self) -> dict[str, Any]:
        values = {
            declared.name: getattr(self, declared.name) for declared in options_of(type(self))
        }
        return {name: value for name, value in values.items() if callable(value)}

    def _check_full_graph(self) -> None:
        clashing = [
            declared.name
            for declared in options_of(type(self))
            if declared.leaves_calls is not None
            and declared.leaves_calls(getattr(self, declared.name))
        ]
        if clashing:
            raise OptionError(
                "lower_full_graph=True leaves nothing to the CPU",
                got=f"together with {', '.join(clashing)}",
                remedy="Drop these options, or set lower_full_graph=False",
            )
