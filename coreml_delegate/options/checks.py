"""Checks of option values; a caller has a table of one check per option."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from coreml_delegate.errors import OptionError

Check = Callable[[str, Any], None]
"""Takes name and value of an option; raises ``OptionError`` if the value is not accepted."""


def check_all(values: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Apply the checks to the option values by name; options without a check are skipped.

    Raises:
        OptionError: A value is not accepted.
    """
    for name, value in values.items():
        if name in checks:
            checks[name](name, value)


def refused(name: str, rule: str, value: Any, *, expected: str | None = None) -> OptionError:
    """Return the error for a value that violates a rule, a text that starts with *must*."""
    return OptionError(f"{name} {rule}", got=f"{type(value).__name__} {value!r}", expected=expected)


def optional(check: Check) -> Check:
    """Return a check that accepts None, and every value that ``check`` accepts."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


def flag(name: str, value: Any) -> None:
    """Check that the value is True or False."""
    if not isinstance(value, bool):
        raise refused(name, "must be a bool", value)


def integer(name: str, value: Any) -> None:
    """Check that the value is an ``int`` and not a ``bool``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(name, "must be an integer", value)


def positive(name: str, value: Any) -> None:
    """Check that the value is an integer of at least 1."""
    integer(name, value)
    if value < 1:
        raise refused(name, "must be positive", value)


def number(name: str, value: Any) -> None:
    """Check that the value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise refused(name, "must be a finite number", value)


def function(of: str) -> Check:
    """Return a check that the value is a function; ``of`` describes its arguments in messages."""

    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise refused(name, f"must be a function of {of}, or None", value)

    return check


def instance(kind: type, called: str) -> Check:
    """Return a check that the value is an instance of ``kind``, described as ``called``."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise refused(name, f"must be {called}", value)

    return check


def list_of(what: str, kinds: type | tuple[type, ...] = object) -> Check:
    """Return a check that the value is a list, or other collection, of ``kinds``.

    A string is refused, because it is a collection of one-letter strings.
    """

    def check(name: str, value: Any) -> None:
        must = f"must be a list of {what}"
        if isinstance(value, str | type):
            example = f"[{value!r}]" if isinstance(value, kinds) else None
            raise refused(name, must, value, expected=example)
        if not isinstance(value, Collection) or isinstance(value, bytes | Mapping):
            raise refused(name, must, value)
        for item in cast("Collection[Any]", value):
            if not isinstance(item, kinds):
                raise refused(name, must, item)

    return check
