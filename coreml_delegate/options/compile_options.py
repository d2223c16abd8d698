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

The oldest documents have the compute units ``cpu``, ``gpu``, ``ane``, which are read, but not
written. Source: ExecuTorch 1.5, Core ML backend documents and ``coreml_preprocess``.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import instance, list_of
from coreml_delegate.options.weight_compression import (
    LINEAR_OPTION,
    Stage,
    checked_linear,
    demand,
    require_target,
    stages_of,
)
from coreml_delegate.options.weight_compression import OPTION as COMPRESSION_KEY
from coreml_delegate.targets import ComputeUnit, Opset

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


_OLD_COMPUTE_UNITS = {
    "cpu": ComputeUnit.CPU_ONLY,
    "gpu": ComputeUnit.CPU_AND_GPU,
    "ane": ComputeUnit.CPU_AND_NE,
}


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
    def of(cls, value: Mapping[str, Any]) -> KeepFp32:
        """Read lists of names by kind.

        Raises:
            OptionError: A kind is unknown, or a value is not a list of names.
        """
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


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of a lowering.

    Attributes:
        compute_unit: Processors that the model may run on.
        deployment_target: Oldest opset to support, or None for the oldest possible opset.
        precision: Floating-point type to compute in.
        model_type: Whether to compile ahead of time.
        op_linear_quantizer_config: Keywords of coremltools' ``OpLinearQuantizerConfig``, to
            quantize the weights after conversion; None for no quantization.
        weight_compression: Stages of coremltools' compression, applied in turn after conversion;
            None for no compression.
        pass_names: Names of the coremltools graph passes to run, or None for its default pipeline.
        keep_fp32: Parts of the model that compute in fp32 if ``precision`` is fp16.
        weight_sharing: Strategy of weight sharing among methods, or None to share if it is safe.
        enumerated_shapes: The supported combinations of input shapes; None for all shapes that the
            program was exported for.
    """

    compute_unit: ComputeUnit = ComputeUnit.ALL
    deployment_target: Opset | None = None
    precision: Precision = Precision.FLOAT16
    model_type: ModelType = ModelType.MODEL
    op_linear_quantizer_config: Mapping[str, Any] | None = None
    pass_names: tuple[str, ...] | None = None
    keep_fp32: KeepFp32 = KeepFp32()
    weight_sharing: WeightSharing | None = None
    enumerated_shapes: EnumeratedShapes | None = None
    weight_compression: tuple[Stage, ...] | None = None

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
        """Return the compile specs in a fixed order, without options that are None."""
        # Importing exir takes seconds, and reading options does not need it.
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        encoded = ((f.key, f.encoded(self)) for f in _FIELDS)
        return [
            CompileSpec(OwnKey(key), value.encode()) for key, value in encoded if value is not None
        ]

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
        field = _BY_ATTRIBUTE[attribute]
        for spec in checked_specs(specs):
            if spec.key == field.key:
                return field.decode(field.key, _text(field.key, spec.value))
        return getattr(cls(), attribute)

    def spec_of(self, attribute: str) -> CompileSpec:
        """Return the compile spec of one option; it must not be None."""
        (spec,) = (spec for spec in self.to_specs() if spec.key == _BY_ATTRIBUTE[attribute].key)
        return spec

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, bytes]]) -> CompileOptions:
        """Decode pairs of key and value, as in a ``.pte``.

        Raises:
            OptionError: See ``from_specs``.
        """
        by_key = {f.key: f for f in _FIELDS}
        values: dict[str, Any] = {}
        for key, value in pairs:
            field = by_key.get(key)
            if field is None:
                raise OptionError("unknown compile spec", got=repr(key), expected=", ".join(by_key))
            if field.attribute in values:
                raise OptionError("compile spec given twice", got=repr(key))
            values[field.attribute] = field.decode(key, _text(key, value))
        return cls(**values)


class _Encode(Protocol):
    def __call__(self, value: Any, /) -> str | None: ...


@dataclass(frozen=True, slots=True)
class _Field:
    key: str
    attribute: str
    encode: _Encode
    decode: Callable[[str, str], Any]

    def encoded(self, options: CompileOptions) -> str | None:
        value = getattr(options, self.attribute)
        try:
            return self.encode(value)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{self.attribute} has a value that a compile spec cannot hold",
                got=repr(value),
                expected=f"a value that JSON can hold ({error})",
            ) from error


def _text(key: str, value: bytes) -> str:
    try:
        return bytes(value).decode()
    except (UnicodeDecodeError, TypeError) as error:
        raise OptionError(f"compile spec {key!r} is not UTF-8 text", got=repr(value)) from error


def _decode_enum(kind: type[enum.Enum], aliases: Mapping[str, enum.Enum]) -> Callable[..., Any]:
    accepted = {str(member.value): member for member in kind} | dict(aliases)

    def decode(key: str, text: str) -> enum.Enum:
        try:
            return accepted[text]
        except KeyError:
            raise OptionError(
                f"compile spec {key!r} has an unknown value",
                got=repr(text),
                expected=" | ".join(str(member.value) for member in kind),
            ) from None

    return decode


def _decode_target(key: str, text: str) -> Opset | None:
    if not text:
        return None
    try:
        return Opset(int(text))
    except ValueError:
        raise OptionError(
            f"compile spec {key!r} is not a specification version with ML Programs",
            got=repr(text),
            expected=", ".join(f"{o.value} ({o.name})" for o in Opset),
        ) from None


def _decode_json(key: str, text: str, check: Callable[[Any], bool], expected: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"compile spec {key!r} is not JSON", got=str(error)) from error
    if not check(value):
        raise OptionError(f"compile spec {key!r}", got=repr(value), expected=expected)
    return value


def _decode_object(key: str, text: str) -> dict[str, Any]:
    return _decode_json(key, text, lambda v: isinstance(v, dict), "a JSON object")


def _decode_linear(key: str, text: str) -> Mapping[str, Any] | None:
    return checked_linear(_decode_object(key, text))


def _decode_compression(key: str, text: str) -> tuple[Stage, ...]:
    return stages_of(_decode_json(key, text, lambda v: isinstance(v, list), "a JSON list"))


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(name, str) for name in cast("Sequence[object]", value)
    )


def _decode_names(key: str, text: str) -> tuple[str, ...]:
    return tuple(_decode_json(key, text, _is_names, "a JSON list of strings"))


def _decode_keep(key: str, text: str) -> KeepFp32:
    return KeepFp32.of(_decode_object(key, text))


def _encode_keep(value: KeepFp32) -> str | None:
    content = {kind: names for kind, names in asdict(value).items() if names}
    return _encode_json(content) if content else None


def _encode_shapes(value: EnumeratedShapes | None) -> str | None:
    return None if value is None else _encode_json(value.encode())


def _decode_shapes(key: str, text: str) -> EnumeratedShapes:
    content = _decode_json(key, text, lambda v: isinstance(v, list), "a JSON list")
    return EnumeratedShapes.decode(content)


def _encode_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)


_FIELDS = (
    _Field(
        "compute_units",
        "compute_unit",
        lambda v: v.value,
        _decode_enum(ComputeUnit, _OLD_COMPUTE_UNITS),
    ),
    _Field(
        "min_deployment_target",
        "deployment_target",
        lambda v: "" if v is None else str(int(v)),
        _decode_target,
    ),
    _Field("model_compute_precision", "precision", lambda v: v.value, _decode_enum(Precision, {})),
    _Field("model_type", "model_type", lambda v: v.value, _decode_enum(ModelType, {})),
    _Field(LINEAR_OPTION, "op_linear_quantizer_config", _encode_json, _decode_linear),
    _Field(COMPRESSION_KEY, "weight_compression", _encode_json, _decode_compression),
    _Field("pass_pipeline", "pass_names", _encode_json, _decode_names),
    _Field("keep_fp32", "keep_fp32", _encode_keep, _decode_keep),
    _Field("enumerated_shapes", "enumerated_shapes", _encode_shapes, _decode_shapes),
    _Field(
        "multimethod_weight_sharing_strategy",
        "weight_sharing",
        lambda v: None if v is None else v.value,
        _decode_enum(WeightSharing, {}),
    ),
)

_BY_ATTRIBUTE = {f.attribute: f for f in _FIELDS}

if set(_BY_ATTRIBUTE) != {f.name for f in fields(CompileOptions)}:
    raise ImportError("every compile option needs exactly one wire field")
