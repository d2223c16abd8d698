"""Checks of the recipes' keywords: every keyword is used or refused, and no value is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.options.checks import (
    Check,
    function,
    integer,
    optional,
    positive,
    refused,
)
from coreml_delegate.options.compile_options import CompileOptions
from coreml_delegate.options.declaration import Option, options_of
from coreml_delegate.options.partitioner_options import PartitionerKeywords

_BITS = range(1, 9)
FULL = -1


def _bits(name: str, value: Any) -> None:
    integer(name, value)
    if value not in _BITS:
        raise refused(name, f"must be between {_BITS[0]} and {_BITS[-1]}", value)


def _block_size(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise refused(name, "must be a list", value)
    sizes = cast("list[Any]", value)
    if len(sizes) != 2 or not all(type(s) is int and (s == FULL or s > 0) for s in sizes):
        problem = "must be a list of rows and columns that share a table, -1 for all"
        raise refused(name, problem, value)
    if FULL not in sizes:
        raise refused(name, "must have -1 for rows or columns", value)


def shared(kind: type[Any]) -> tuple[Option, ...]:
    """Return the options of a dataclass that every recipe takes."""
    return tuple(option for option in options_of(kind) if option.is_in_recipes)


COMMON = (*shared(CompileOptions), *shared(PartitionerKeywords))
"""Options that every recipe takes."""

FILTER: Mapping[str, Check] = MappingProxyType(
    {"filter_fn": optional(function("a module and its path"))}
)
"""Keyword of the recipes that quantize modules."""

GROUP: Mapping[str, Check] = MappingProxyType({"group_size": positive})
"""Keyword of the recipes that quantize by groups."""

CODEBOOK: Mapping[str, Check] = MappingProxyType({"bits": _bits, "block_size": _block_size})
"""Keywords of the codebook recipe; all are required."""


def check(
    recipe: str,
    values: Mapping[str, Any],
    own: Mapping[str, Check],
    required: Collection[str] = (),
) -> None:
    """Check the keywords of a recipe.

    Args:
        recipe: Its name.
        values: The keywords.
        own: Checks of the keywords that not every recipe takes.
        required: Names of required keywords.

    Raises:
        OptionError: A keyword is unknown, missing, of the wrong type or out of range.
    """
    accepted = {option.keyword: option.check for option in COMMON} | dict(own)
    for name in values:
        if name not in accepted:
            raise OptionError(
                f"{recipe} has no such keyword",
                got=repr(name),
                expected=near_matches(name, accepted),
            )
    missing = [name for name in required if name not in values]
    if missing:
        raise OptionError(f"{recipe} requires {' and '.join(missing)}")
    for name, value in values.items():
        accepted[name](name, value)
