"""``CompileOptions``: the options of a lowering, and their encoding as compile specs.

Wire format, one ``CompileSpec(key, value)`` each, all values UTF-8::

    compute_units               cpu_only | cpu_and_gpu | cpu_and_ne | all   (read on device)
    min_deployment_target       specification version as decimal, empty for none
    model_compute_precision     float16 | float32 (auto until a partitioner has chosen)
    model_type                  model | compiled_model
    enumerated_shapes           JSON list, see ``shapes`` (optional)
    op_linear_quantizer_config  JSON object (optional)
    weight_compression          JSON list of objects, see ``weight_compression`` (optional)
    keep_fp32                   JSON object: lists "ops", "modules", "nodes" (optional)
    pass_pipeline               JSON list of pass names (optional)
    multimethod_weight_sharing_strategy  positional | disabled (optional)
    device                      neural-engine | gpu | cpu (optional)

The oldest documents have the compute units ``cpu``, ``gpu``, ``ane``, which are read, but not
written. Source: ExecuTorch 1.5, Core ML backend documents and ``coreml_preprocess``.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import (
    Check,
    instance,
    list_of,
    member,
    one_of,
    optional,
    refused,
    values_of,
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


class Precision(enum.Enum):
    """The floating-point type that Core ML computes in, independent of the PyTorch model's.

    ``AUTO`` is fp16, with fp32 for the calls that need it on example inputs. ``CoreMLPartitioner``
    replaces it: a ``.pte`` has fp16, and the names of these calls in ``keep_fp32``.
    """

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    AUTO = "auto"


class ModelType(enum.Enum):
    """The kind of model in a blob: an mlpackage, or an mlmodelc compiled ahead of time on macOS."""

    MODEL = "model"
    COMPILED_MODEL = "compiled_model"


class WeightSharing(enum.Enum):
    """Weight sharing among methods; without a strategy, partitions share weights if it is safe.

    Attributes:
        POSITIONAL: The n-th partitions of all methods become one model with a function per method;
            an error if they cannot.
        DISABLED: Every partition becomes a separate model.
    """

    POSITIONAL = "positional"
    DISABLED = "disabled"


class OwnKey(str):
    """The key of a compile spec that this package wrote; other code sees a plain string.

    A ``.pte`` has only the string. During lowering, the type marks the subgraphs of our backend, if
    another backend has the same name.
    """

    __slots__ = ()


def is_own(specs: Iterable[CompileSpec]) -> bool:
    """Whether this package wrote any of the compile specs."""
    return any(isinstance(spec.key, OwnKey) for spec in specs)


@dataclass(frozen=True, slots=True)
class KeepFp32:
    """Ops, modules and calls that compute in fp32 in a model that computes in fp16.

    Attributes:
        ops: Types of MIL ops, for example ``softmax``.
        modules: Paths of modules (``layers.0``, including submodules), paths with wildcards
            (``layers.*.norm``), or class names (``RMSNorm``).
        nodes: Names of calls in the subgraph.
    """

    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: KeepFp32 | Mapping[str, Any]) -> KeepFp32:
        """Read lists of names by kind.

        Raises:
            OptionError: A kind is unknown, or a value is not a list of names.
        """
        if isinstance(value, KeepFp32):
            return value
        kinds = [f.name for f in fields(cls)]
        instance(Mapping, "a dictionary of lists of names")("keep_fp32", value)
        for kind, names in value.items():
            if kind not in kinds or not _is_names(names):
                raise OptionError(
                    "keep_fp32 takes lists of names",
                    got=f"{kind!r}: {names!r}",
                    expected=", ".join(f"{k!r}: [...]" for k in kinds),
                )
        return cls(**{kind: tuple(sorted(set(names))) for kind, names in value.items()})


def checked_specs(specs: Iterable[CompileSpec]) -> Sequence[CompileSpec]:
    """Check that a value is a list of compile specs, and return it.

    Raises:
        OptionError: It is not a list of compile specs.
    """
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    list_of("CompileSpec", CompileSpec)("compile_specs", specs)
    return cast("Sequence[CompileSpec]", specs)


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(name, str) for name in cast("Sequence[object]", value)
    )


_JSON: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "a JSON object": lambda content: isinstance(content, dict),
        "a JSON list": lambda content: isinstance(content, list),
        "a JSON list of strings": _is_names,
    }
)


def _enum_form(key: str, kind: type[enum.Enum], **old: enum.Enum) -> SpecForm:
    texts = {**values_of(kind), **old}
    return SpecForm(key, lambda value: None if value is None else value.value, one_of(texts))


def _json_form(
    key: str,
    kind: str,
    encode: Callable[[Any], Any] = lambda value: value,
    build: Callable[[Any], Any] = lambda content: content,
) -> SpecForm:
    """Return a spec in JSON.

    Args:
        key: Key of the spec.
        kind: A kind of ``_JSON``.
        encode: Returns the content of a value, or None for no spec.
        build: Returns the value of content.
    """

    def as_text(value: Any) -> str | None:
        content = None if value is None else encode(value)
        return None if content is None else json.dumps(content, sort_keys=True)

    def decode(name: str, text: str) -> Any:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{name} is not JSON", got=str(error)) from error
        if not _JSON[kind](content):
            raise OptionError(name, got=repr(content), expected=kind)
        return build(content)

    return SpecForm(key, as_text, decode)


def _keep_fp32_names(value: KeepFp32) -> dict[str, Any] | None:
    return {kind: names for kind, names in asdict(value).items() if names} or None


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
        spec=_enum_form(
            "compute_units",
            ComputeUnit,
            cpu=ComputeUnit.CPU_ONLY,
            gpu=ComputeUnit.CPU_AND_GPU,
            ane=ComputeUnit.CPU_AND_NE,
        ),
    )
    deployment_target: Opset | None = option(
        default=None,
        check=optional(member(Opset, "{} must be a coremltools.target")),
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
        spec=_enum_form("model_compute_precision", Precision),
    )
    model_type: ModelType = option(
        default=ModelType.MODEL,
        check=member(ModelType),
        doc="``CoreMLBackend.MODEL_TYPE``; ``COMPILED_MODEL`` compiles ahead of time, on a Mac.",
        spec=_enum_form("model_type", ModelType),
    )
    op_linear_quantizer_config: Mapping[str, Any] | None = option(
        default=None,
        check=_unnamed(checked_linear),
        doc="Keywords of coremltools' ``OpLinearQuantizerConfig``, to quantize the weights after "
        "conversion, except embedding tables; None for no quantization.",
        spec=_json_form(LINEAR_OPTION, "a JSON object"),
    )
    weight_compression: tuple[Stage, ...] | None = option(
        default=None,
        check=_unnamed(stages_of),
        doc="Compression of the weights after conversion, by quantization, palettization or "
        "pruning: a dictionary for coremltools' ``OptimizationConfig.from_dict``, or a list of "
        "dictionaries to apply in turn; None for no compression.",
        spec=_json_form(COMPRESSION_KEY, "a JSON list"),
    )
    pass_names: tuple[str, ...] | None = option(
        default=None,
        check=optional(list_of("names of graph passes", str)),
        doc="Graph passes of coremltools to run; None for its default pipeline.",
        spec=_json_form("pass_pipeline", "a JSON list of strings"),
    )
    keep_fp32: KeepFp32 = option(
        default=KeepFp32(),
        check=lambda _, value: KeepFp32.of({} if value is None else value),
        doc="Parts of an fp16 model that compute in fp32: types of MIL ops under ``ops``, paths or "
        'class names of modules under ``modules``, as in ``{"ops": ["softmax"]}``; see '
        "``KeepFp32``.",
        spec=_json_form("keep_fp32", "a JSON object", _keep_fp32_names),
    )
    enumerated_shapes: EnumeratedShapes | None = option(
        default=None,
        check=optional(instance(EnumeratedShapes, "an EnumeratedShapes")),
        doc="Supported combinations of input shapes; None for all shapes that the program was "
        "exported for.",
        spec=_json_form(
            "enumerated_shapes", "a JSON list", EnumeratedShapes.encode, EnumeratedShapes.decode
        ),
    )
    weight_sharing: WeightSharing | None = option(
        default=None,
        check=optional(member(WeightSharing)),
        doc="``WeightSharing`` of the methods, or ExecuTorch's own enum of the same names; None to "
        "share if it is safe.",
        keyword="strategy",
        spec=_enum_form("multimethod_weight_sharing_strategy", WeightSharing),
    )

    device: Device | None = option(
        default=None,
        check=optional(member(Device, texts=values_of(Device))),
        doc="Processor to shape the program for, by rewrites of operations that it does not run "
        "well, and calls left to the CPU; see ``docs/check.md``. None for no processor.",
        argument=Argument("--for", choices=values_of(Device), dest="device"),
        is_in_recipes=True,
        spec=_enum_form("device", Device),
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

        texts = ((form.key, self._text_of(name)) for name, form in _SPECS.items())
        return [CompileSpec(OwnKey(key), text.encode()) for key, text in texts if text is not None]

    def _text_of(self, name: str) -> str | None:
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
            values[name] = _SPECS[name].decode(where, _text(where, value))
        return cls(**values)


def _text(name: str, value: bytes) -> str:
    try:
        return bytes(value).decode()
    except (UnicodeDecodeError, TypeError) as error:
        raise OptionError(f"{name} is not UTF-8 text", got=repr(value)) from error


_SPECS = {o.name: o.spec for o in options_of(CompileOptions) if o.spec is not None}
"""The forms of compile specs by name of the option, in the order of the specs."""
