"""Checks of the values of options: a table says for each option which check it has to pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from coreml_delegate.errors import OptionError

Check = Callable[[str, Any], None]
"""Takes the name of an option and its value; raises ``OptionError`` if it is not accepted."""


def check_all(given: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Check each option by the check of its name; those that have none pass.

    Raises:
        OptionError: A value is not accepted.
    """
    for name, value in given.items():
        if name in checks:
            checks[name](name, value)


def refused(name: str, what: str, value: Any, *, expected: str | None = None) -> OptionError:
    """The error for a value; ``what`` begins with *must*."""
    return OptionError(f"{name} {what}", got=f"{type(value).__name__} {value!r}", expected=expected)


def optional(check: Check) -> Check:
    """None passes, and what passes ``check``."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


def flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise refused(name, "must be a bool", value)


def integer(name: str, value: Any) -> None:
    """An ``int``, but no ``bool``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(name, "must be an integer", value)


def positive(name: str, value: Any) -> None:
    """An integer of at least 1."""
    integer(name, value)
    if value < 1:
        raise refused(name, "must be positive", value)


def function(of: str) -> Check:
    """Something to call with ``of``."""

    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise refused(name, f"must be a function of {of}, or None", value)

    return check


def instance(kind: type, called: str) -> Check:
    """An instance of ``kind``, which the user knows as ``called``."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise refused(name, f"must be {called}", value)

    return check


def list_of(what: str, kinds: type | tuple[type, ...] = object) -> Check:
    """A list, or other collection, of ``kinds``; a string would be one of one-letter names."""

    def check(name: str, value: Any) -> None:
        must = f"must be a list of {what}"
        if isinstance(value, str | type):
            one = f"[{value!r}]" if isinstance(value, kinds) else None
            raise refused(name, must, value, expected=one)
        if not isinstance(value, Collection) or isinstance(value, bytes | Mapping):
            raise refused(name, must, value)
        for item in cast("Collection[Any]", value):
            if not isinstance(item, kinds):
                raise refused(name, must, item)

    return check
