"""Shape arithmetic of windows: dilation, number of windows, padding."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.tensor_types import Dim, simplify

Pairs = tuple[tuple[int, int], ...]
"""Elements before and after, for each axis; negative amounts crop."""


def each_axis(what: str, numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return a positive number for each axis; 1 by default.

    Raises:
        GraphError: A wrong number of numbers, or a number below 1.
    """
    per_axis = (1,) * count if numbers is None else tuple(int(number) for number in numbers)
    if len(per_axis) != count or any(number < 1 for number in per_axis):
        raise GraphError(
            f"{what}: wrong numbers", got=str(list(per_axis)), expected=f"{count} of 1 or more"
        )
    return per_axis


def dilated_size(size: Dim, factor: int) -> Dim:
    """Return the size of a dilated axis: ``(size - 1) * factor + 1``."""
    return simplify((size - 1) * factor + 1) if size != 0 else 0


def window_count(size: Dim, reach: int, stride: int, pads: tuple[int, int]) -> Dim:
    """Return the number of windows: ``floor((size + sum(pads) - reach) / stride) + 1``."""
    span = size + sum(pads) - reach
    if isinstance(span, int):
        return max(span // stride + 1, 0)
    return simplify((sympy.floor(span / stride) if stride != 1 else span) + 1)


def window_padding(
    name: str,
    padding: str | Sequence[tuple[int, int]] | None,
    sizes: Sequence[Dim],
    reach: Sequence[int],
    strides: Sequence[int],
) -> Pairs:
    """Return elements before and after, for each axis.

    Args:
        name: Name of the operation, for messages.
        padding: Pairs, ``"SAME"``, ``"VALID"`` or None for no padding.
        sizes: Sizes of the axes.
        reach: Sizes of the dilated window.
        strides: Steps between windows.

    Raises:
        GraphError: An unknown word, a wrong number of pairs, or a symbolic size with strides.
    """
    if padding is None or padding == "VALID":
        return ((0, 0),) * len(sizes)
    if padding == "SAME":
        return tuple(_same(*of_axis) for of_axis in zip(sizes, reach, strides, strict=True))
    if isinstance(padding, str):
        raise GraphError(f"{name}: padding", got=repr(padding), expected="pairs, 'SAME' or 'VALID'")
    pairs = tuple((int(low), int(high)) for low, high in padding)
    if len(pairs) != len(sizes):
        raise GraphError(
            f"{name}: wrong number of pairs of padding", got=str(pairs), expected=str(len(sizes))
        )
    return pairs


def _same(size: Dim, reach: int, stride: int) -> tuple[int, int]:
    if isinstance(size, int):
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    elif stride == 1:
        total = reach - 1
    else:
        raise GraphError(
            "padding 'SAME' with strides needs fixed sizes", got=str(size), remedy="Give pairs"
        )
    return total // 2, total - total // 2
