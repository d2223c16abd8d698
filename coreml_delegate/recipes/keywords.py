"""The keywords of recipes, each checked: none is ignored, and no value is bent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.third_party import coremltools

_Check = Callable[[str, Any], None]
_BITS = range(1, 9)
WHOLE = -1


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(name, "must be a bool", value)


def _callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        _refuse(name, "must be a function of a module and its path, or None", value)


def _names(name: str, value: Any) -> None:
    # A string would be taken for a list of one-letter names.
    listed = isinstance(value, list | tuple | set | frozenset)
    if value is None or (listed and _all(value, str)):
        return
    _refuse(name, "must be a list of operator names, or None", value)


def _group_size(name: str, value: Any) -> None:
    _integer(name, value)
    if value <= 0:
        _refuse(name, "must be positive", value)


def _bits(name: str, value: Any) -> None:
    _integer(name, value)
    if value not in _BITS:
        _refuse(name, f"must be between {_BITS[0]} and {_BITS[-1]}", value)


def _block_size(name: str, value: Any) -> None:
    if not isinstance(value, list):
        _refuse(name, "must be a list", value)
    sizes = cast("list[Any]", value)
    if len(sizes) != 2 or not _all(sizes, int) or not all(s == WHOLE or s > 0 for s in sizes):
        _refuse(name, "must be a list of rows and columns that share a table, -1 for all", value)
    if WHOLE not in sizes:
        _refuse(name, "must leave rows or columns whole, by -1", value)


def _target(name: str, value: Any) -> None:
    if not isinstance(value, coremltools().target):
        _refuse(name, "must be a coremltools.target", value)


def _compute_unit(name: str, value: Any) -> None:
    if not isinstance(value, coremltools().ComputeUnit):
        _refuse(name, "must be a coremltools.ComputeUnit", value)


COMMON: Mapping[str, _Check] = MappingProxyType(
    {
        "minimum_deployment_target": _target,
        "compute_unit": _compute_unit,
        "skip_ops_for_coreml_delegation": _names,
        "lower_full_graph": _flag,
        "take_over_constant_data": _flag,
    }
)
"""Keywords of every recipe."""

FILTER: Mapping[str, _Check] = MappingProxyType({"filter_fn": _callable})
"""Keyword of the recipes that quantize modules."""

GROUP: Mapping[str, _Check] = MappingProxyType({"group_size": _group_size})
"""Keyword of the recipes by group."""

CODEBOOK: Mapping[str, _Check] = MappingProxyType({"bits": _bits, "block_size": _block_size})
"""Keywords, all required, of the codebook's recipe."""


def check(
    recipe: str,
    given: Mapping[str, Any],
    accepted: Mapping[str, _Check],
    required: Collection[str] = (),
) -> None:
    """Check the keywords of a recipe.

    Raises:
        OptionError: One is unknown, missing, of the wrong type or out of range.
    """
    for name in given:
        if name not in accepted:
            raise OptionError(
                f"{recipe} has no such keyword",
                got=repr(name),
                expected=near_matches(name, accepted),
            )
    missing = [name for name in required if name not in given]
    if missing:
        raise OptionError(f"{recipe} requires {' and '.join(missing)}")
    for name, value in given.items():
        accepted[name](name, value)


def _integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse(name, "must be an integer", value)


def _all(values: Any, kind: type) -> bool:
    return all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def _refuse(name: str, what: str, value: Any) -> None:
    raise OptionError(f"{name} {what}", got=f"{type(value).__name__} {value!r}")
