"""Sliding windows of reductions and convolutions: sizes, padding, number of windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.tensor_types import Dim, simplify

Pairs = tuple[tuple[int, int], ...]
"""Elements before and after, for each axis; negative amounts crop."""


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """Sliding windows, by axis.

    Attributes:
        window: Sizes of a window.
        strides: Steps between windows.
        padding: Elements before and after the tensor.
        base_dilation: Distance of neighbours of the tensor.
        window_dilation: Distance of neighbours of a window.
    """

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    @classmethod
    def of(
        cls,
        name: str,
        shape: Sequence[Dim],
        window: Sequence[int],
        strides: Sequence[int] | None,
        padding: str | Sequence[tuple[int, int]] | None,
        dilations: Mapping[str, Sequence[int] | None],
    ) -> SlidingWindows:
        """Return windows with checked numbers, by default 1.

        Padding is pairs, ``"SAME"``, ``"VALID"`` or None for no padding. Dilations are of the
        tensor and of a window, by the names of the arguments.

        Raises:
            GraphError: A wrong number of numbers, a number below 1, an unknown word, or "SAME"
                with strides for a symbolic size.
        """
        steps, base, dilation = (
            each_axis(f"{name}: {what}", numbers, len(shape))
            for what, numbers in {"strides": strides, **dilations}.items()
        )
        unpadded = cls(tuple(window), steps, ((0, 0),) * len(shape), base, dilation)
        sizes = unpadded.padded_shape(shape)
        pads = _padding(name, padding, sizes, unpadded.reach, steps)
        return cls(tuple(window), steps, pads, base, dilation)

    @property
    def reach(self) -> list[int]:
        """Sizes of a dilated window."""
        pairs = zip(self.window, self.window_dilation, strict=True)
        return [int(_dilated_size(size, factor)) for size, factor in pairs]

    def padded_shape(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the sizes of a dilated and padded tensor."""
        axes = zip(shape, self.base_dilation, self.padding, strict=True)
        return tuple(simplify(_dilated_size(n, factor) + sum(pair)) for n, factor, pair in axes)

    def counts(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the number of windows along each axis of a tensor."""
        axes = zip(self.padded_shape(shape), self.reach, self.strides, strict=True)
        return tuple(window_count(*axis, (0, 0)) for axis in axes)


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


def _dilated_size(size: Dim, factor: int) -> Dim:
    """Return the size of a dilated axis: ``(size - 1) * factor + 1``."""
    return simplify((size - 1) * factor + 1) if size != 0 else 0


def window_count(size: Dim, reach: int, stride: int, pads: tuple[int, int]) -> Dim:
    """Return the number of windows: ``floor((size + sum(pads) - reach) / stride) + 1``."""
    span = size + sum(pads) - reach
    if isinstance(span, int):
        return max(span // stride + 1, 0)
    return simplify((sympy.floor(span / stride) if stride != 1 else span) + 1)


def _padding(
    name: str,
    padding: str | Sequence[tuple[int, int]] | None,
    sizes: Sequence[Dim],
    reach: Sequence[int],
    strides: Sequence[int],
) -> Pairs:
    """Return elements before and after, for each axis; see ``SlidingWindows.of``."""
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
