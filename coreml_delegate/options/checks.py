"""Checks of option values."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from coreml_delegate.errors import OptionError

Check = Callable[[str, Any], Any]
"""Takes name and value of an option; returns the value in the form in which it is stored.

Raises ``OptionError`` if the value is not accepted.
"""

_LARGEST = 2**63 - 1
_UNKNOWN = "{} has an unknown value"


def refused(name: str, rule: str, value: Any, *, expected: str | None = None) -> OptionError:
    """Return the error for a value that violates a rule, a text that starts with *must*."""
    return OptionError(f"{name} {rule}", got=f"{type(value).__name__} {value!r}", expected=expected)


def optional(check: Check) -> Check:
    """Return a check that accepts None, and every value that ``check`` accepts."""
    return lambda name, value: None if value is None else check(name, value)


def flag(name: str, value: Any) -> bool:
    """Check that the value is True or False."""
    if not isinstance(value, bool):
        raise refused(name, "must be a bool", value)
    return value


def integer(name: str, value: Any) -> int:
    """Check that the value is an ``int`` of 64 bits and not a ``bool``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(name, "must be an integer", value)
    if not -_LARGEST <= value <= _LARGEST:
        raise refused(name, "must have at most 64 bits", value)
    return value


def positive(name: str, value: Any) -> int:
    """Check that the value is an integer of at least 1."""
    if integer(name, value) < 1:
        raise refused(name, "must be positive", value)
    return value


def values_of(kind: type[enum.Enum]) -> dict[str, Any]:
    """Return the members of an enum by their values, as texts."""
    return {str(member.value): member for member in kind}


def _unknown(what: str, value: Any, expected: Collection[str]) -> OptionError:
    is_named = isinstance(value, str | enum.Enum)
    got = repr(value) if is_named else f"{type(value).__name__} {value!r}"
    return OptionError(what, got=got, expected=" | ".join(expected))


def one_of(texts: Mapping[str, Any], message: str = _UNKNOWN) -> Check:
    """Return a check that the value is a known text; the option gets the object of the text.

    Args:
        texts: Objects by text.
        message: The error of other values; ``{}`` is the option's name.
    """

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in texts:
            return texts[value]
        raise _unknown(message.format(name), value, texts)

    return check


def member(
    kind: type[enum.Enum], message: str = _UNKNOWN, texts: Mapping[str, Any] | None = None
) -> Check:
    """Return a check that the value is a member of ``kind``, or of an enum with the same names.

    Args:
        kind: The enum; the option gets its member.
        message: See ``one_of``.
        texts: Members by texts that are accepted as well.
    """

    def check(name: str, value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if isinstance(value, enum.Enum) and value.name in kind.__members__:
            return kind[value.name]
        if texts is None:
            raise _unknown(message.format(name), value, kind.__members__)
        return one_of(texts, message)(name, value)

    return check


def number(name: str, value: Any) -> float:
    """Check that the value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise refused(name, "must be a finite number", value)
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """Check that the value is a finite number above 0."""
    if number(name, value) <= 0:
        raise refused(name, "must be above 0", value)
    return float(value)


def function(of: str) -> Check:
    """Return a check that the value is a function; ``of`` describes its arguments in messages."""

    def check(name: str, value: Any) -> Any:
        if not callable(value):
            raise refused(name, f"must be a function of {of}, or None", value)
        return value

    return check


def instance(kind: type, called: str) -> Check:
    """Return a check that the value is an instance of ``kind``, described as ``called``."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise refused(name, f"must be {called}", value)
        return value

    return check


def list_of(what: str, kinds: type | tuple[type, ...] = object) -> Check:
    """Return a check that the value is a list, or other collection, of ``kinds``.

    The option is a tuple, because the caller may change the list. A string is refused, because it
    is a collection of one-letter strings.
    """

    def check(name: str, value: Any) -> tuple[Any, ...]:
        must = f"must be a list of {what}"
        if isinstance(value, str | type):
            example = f"[{value!r}]" if isinstance(value, kinds) else None
            raise refused(name, must, value, expected=example)
        if not isinstance(value, Collection) or isinstance(value, bytes | Mapping):
            raise refused(name, must, value)
        for item in cast("Collection[Any]", value):
            if not isinstance(item, kinds):
                raise refused(name, must, item)
        return tuple(cast("Collection[Any]", value))

    return check
