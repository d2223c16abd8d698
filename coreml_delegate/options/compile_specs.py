"""Compile specs: types of their values, and their encoding.

The wire format is listed in ``lowering_options``, beside the declarations.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import instance, list_of, one_of, values_of
from coreml_delegate.options.declaration import SpecForm

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

    def encode(self) -> dict[str, Any] | None:
        """Return the names by kind, without kinds that have no names; None without any names."""
        return {kind: names for kind, names in asdict(self).items() if names} or None


# Compile specs


class OwnKey(str):
    """The key of a compile spec that this package wrote; other code sees a plain string.

    A ``.pte`` has only the string. During lowering, the type marks the subgraphs of our backend, if
    another backend has the same name.
    """

    __slots__ = ()


def is_own(specs: Iterable[CompileSpec]) -> bool:
    """Whether this package wrote any of the compile specs."""
    return any(isinstance(spec.key, OwnKey) for spec in specs)


def checked_specs(specs: Iterable[CompileSpec]) -> Sequence[CompileSpec]:
    """Check that a value is a list of compile specs, and return it.

    Raises:
        OptionError: It is not a list of compile specs.
    """
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    list_of("CompileSpec", CompileSpec)("compile_specs", specs)
    return cast("Sequence[CompileSpec]", specs)


def decoded_text(name: str, value: bytes) -> str:
    """Return the text of a compile spec.

    Raises:
        OptionError: It is not UTF-8; ``name`` is the spec's, for the message.
    """
    try:
        return bytes(value).decode()
    except (UnicodeDecodeError, TypeError) as error:
        raise OptionError(f"{name} is not UTF-8 text", got=repr(value)) from error


# Forms


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


def enum_form(key: str, kind: type[enum.Enum], **old: enum.Enum) -> SpecForm:
    """Return a spec with the values of an enum; ``old`` has members by texts no longer written."""
    texts = {**values_of(kind), **old}
    return SpecForm(key, lambda value: None if value is None else value.value, one_of(texts))


def json_form(
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
