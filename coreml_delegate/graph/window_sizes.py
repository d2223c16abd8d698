"""Sizes of windows: how many fit along an axis, and what is around it."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.tensor_types import Dim, simplify

Pairs = tuple[tuple[int, int], ...]
"""Elements before and after, for each axis; negative amounts crop."""


def each_axis(what: str, given: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return a positive number for each axis; ones by default.

    Raises:
        GraphError: Another number of them, or one below 1.
    """
    found = (1,) * count if given is None else tuple(int(number) for number in given)
    if len(found) != count or any(number < 1 for number in found):
        raise GraphError(
            f"{what}: wrong numbers", got=str(list(found)), expected=f"{count} of 1 or more"
        )
    return found


def dilated_size(size: Dim, factor: int) -> Dim:
    """Return the size of an axis whose neighbours are moved apart."""
    return simplify((size - 1) * factor + 1) if size != 0 else 0


def window_count(size: Dim, reach: int, stride: int, pads: tuple[int, int]) -> Dim:
    """Return how many windows of a reach an axis has, stride by stride."""
    free = size + sum(pads) - reach
    if isinstance(free, int):
        return max(free // stride + 1, 0)
    return simplify((sympy.floor(free / stride) if stride != 1 else free) + 1)


def window_padding(
    name: str,
    given: str | Sequence[tuple[int, int]] | None,
    sizes: Sequence[Dim],
    reach: Sequence[int],
    strides: Sequence[int],
) -> Pairs:
    """Return elements before and after, for each axis.

    Args:
        name: Of the operation.
        given: Pairs, ``"SAME"``, ``"VALID"`` or None for none.
        sizes: Of the axes.
        reach: Of the window.
        strides: Of the window.

    Raises:
        GraphError: Another word, another number of pairs, or a size that is not known.
    """
    if given is None or given == "VALID":
        return ((0, 0),) * len(sizes)
    if given == "SAME":
        return tuple(_same(*of_axis) for of_axis in zip(sizes, reach, strides, strict=True))
    if isinstance(given, str):
        raise GraphError(f"{name}: padding", got=repr(given), expected="pairs, 'SAME' or 'VALID'")
    found = tuple((int(low), int(high)) for low, high in given)
    if len(found) != len(sizes):
        raise GraphError(
            f"{name}: wrong number of pairs of padding", got=str(found), expected=str(len(sizes))
        )
    return found


def _same(size: Dim, reach: int, stride: int) -> tuple[int, int]:
    if isinstance(size, int):
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    elif stride == 1:
        total = reach - 1
    else:
        raise GraphError(
            "padding 'SAME' with strides wants fixed sizes", got=str(size), remedy="Give pairs"
        )
    return total // 2, total - total // 2
