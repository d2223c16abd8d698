"""Checks of the recipes' keywords: every keyword is used or refused, and no value is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.options.checks import (
    Check,
    check_all,
    flag,
    function,
    instance,
    integer,
    list_of,
    optional,
    positive,
    refused,
)
from coreml_delegate.patches.third_party import coremltools

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


def _of_coremltools(kind: str) -> Check:
    # Importing coremltools takes seconds.
    return lambda name, value: instance(getattr(coremltools(), kind), f"a coremltools.{kind}")(
        name, value
    )


COMMON: Mapping[str, Check] = MappingProxyType(
    {
        "minimum_deployment_target": _of_coremltools("target"),
        "compute_unit": _of_coremltools("ComputeUnit"),
        "skip_ops_for_coreml_delegation": optional(list_of("operator names", str)),
        "lower_full_graph": flag,
        "take_over_constant_data": flag,
    }
)
"""Keywords of every recipe."""

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
    accepted: Mapping[str, Check],
    required: Collection[str] = (),
) -> None:
    """Check the keywords of a recipe.

    Raises:
        OptionError: A keyword is unknown, missing, of the wrong type or out of range.
    """
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
    check_all(values, accepted)
