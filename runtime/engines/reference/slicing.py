"""Slices with masks and strides of either sign.

Source: coremltools' MIL op reference, ``tensor_transformation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from coreml_delegate.runtime.engines.reference.registry import Bools, Ints, kernel
from coreml_delegate.runtime.mil.opset import Opset


@dataclass(frozen=True, slots=True)
class _Region:
    """A slice as torch takes it: positive strides, then dimensions to reverse and to drop."""

    index: tuple[slice, ...]
    reversed: Ints
    dropped: Ints

    def view(self, x: Tensor) -> Tensor:
        """The region of ``x``, before reversing and dropping, on its memory."""
        return x[self.index]


def _region(
    shape: Sequence[int],
    begin: Ints,
    end: Ints,
    stride: Ints | None,
    begin_mask: Bools | None,
    end_mask: Bools | None,
    squeeze_mask: Bools | None,
) -> _Region:
    rank = len(shape)
    nothing = (False,) * rank
    index: list[slice] = []
    backwards: list[int] = []
    for axis, (size, first, last, step, from_start, to_end, single) in enumerate(
        zip(
            shape,
            begin,
            end,
            stride or (1,) * rank,
            begin_mask or nothing,
            end_mask or nothing,
            squeeze_mask or nothing,
            strict=True,
        )
    ):
        if single:
            position = 0 if from_start else first + size if first < 0 else first
            if not 0 <= position < size:
                raise IndexError(f"index {first} is outside of a size of {size} (axis {axis})")
            index.append(slice(position, position + 1))
            continue
        chosen = slice(None if from_start else first, None if to_end else last, step)
        positions = range(*chosen.indices(size))
        if step < 0:
            backwards.append(axis)
            positions = positions[::-1]
        index.append(slice(positions.start, positions.stop, positions.step))
    dropped = tuple(axis for axis in range(rank) if squeeze_mask and squeeze_mask[axis])
    return _Region(tuple(index), tuple(backwards), dropped)


@kernel("slice_by_index")
def slice_by_index(
    x: Tensor,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Tensor:
    """``x[begin:end:stride]`` per dimension; masked ends are open, squeezed dimensions indexed."""
    region = _region(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    view = region.view(x)
    if region.reversed:
        view = view.flip(region.reversed)
    return view.squeeze(region.dropped)


@kernel("slice_by_size")
def slice_by_size(x: Tensor, begin: Ints, size: Ints) -> Tensor:
    """``size`` elements from ``begin`` on per dimension; a size of -1 takes all that follow."""
    index: list[slice] = []
    for length, first, count in zip(x.shape, begin, size, strict=True):
        start = first + length if first < 0 else first
        stop = length if count < 0 else start + count
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{count} elements from {first} on exceed a size of {length}")
        index.append(slice(start, stop))
    return x[tuple(index)]


@kernel("slice_update", since=Opset.iOS18)
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Tensor:
    """``x`` with the region that ``slice_by_index`` would return replaced by ``update``."""
    region = _region(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    result = x.clone()
    target = region.view(result)
    replacement = update.reshape(target.shape)
    target.copy_(replacement.flip(region.reversed) if region.reversed else replacement)
    return result
