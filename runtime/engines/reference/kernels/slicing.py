"""Regions of tensors: slices with masks and strides of either sign, padding, windows, reversal.

Source: coremltools' MIL op reference, ``tensor_transformation`` and ``tensor_operation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Bools, Ints, kernel
from coreml_delegate.runtime.engines.reference.kernels.convolution import pad_spatial
from coreml_delegate.targets import Opset


@dataclass(frozen=True, slots=True)
class _Region:
    """A slice for torch: positive strides, then dimensions to reverse and to drop."""

    index: tuple[slice, ...]
    reversed: Ints
    dropped: Ints

    def view(self, x: Tensor) -> Tensor:
        """Return a view of the region in ``x``, before dimensions are reversed and dropped."""
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
    no_mask = (False,) * rank
    index: list[slice] = []
    backwards: list[int] = []
    for axis, (size, first, last, step, from_start, to_end, squeeze) in enumerate(
        zip(
            shape,
            begin,
            end,
            stride or (1,) * rank,
            begin_mask or no_mask,
            end_mask or no_mask,
            squeeze_mask or no_mask,
            strict=True,
        )
    ):
        if squeeze:
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
    """``x[begin[0]:end[0]:stride[0], ...]``; a squeezed axis is indexed by its ``begin``."""
    region = _region(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    view = region.view(x)
    if region.reversed:
        view = view.flip(region.reversed)
    return view.squeeze(region.dropped)


@kernel("slice_by_size")
def slice_by_size(x: Tensor, begin: Ints, size: Ints) -> Tensor:
    """``x[begin[i]:begin[i] + size[i]]`` along each axis i; a size of -1 takes all that follow."""
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


@kernel("band_part")
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """``x`` [*, M, N], zero where ``i - j > lower >= 0`` or ``j - i > upper >= 0``."""
    row = torch.arange(x.shape[-2])[:, None]
    column = torch.arange(x.shape[-1])
    inside = torch.ones(x.shape[-2:], dtype=torch.bool)
    if lower >= 0:
        inside &= row - column <= lower
    if upper >= 0:
        inside &= column - row <= upper
    return torch.where(inside, x, torch.zeros_like(x))


@kernel("reverse")
def reverse(x: Tensor, axes: Ints | None = None) -> Tensor:
    """``x`` reversed along ``axes`` (all by default)."""
    return x.flip(tuple(range(x.dim())) if axes is None else axes)


@kernel("reverse_sequence")
def reverse_sequence(x: Tensor, lengths: Tensor, seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    """``x`` with the first ``lengths[b]`` elements of each sequence reversed."""
    moved = x.movedim((batch_axis, seq_axis), (0, 1))
    position = torch.arange(moved.shape[1])
    lengths = lengths.to(torch.int64)[:, None]
    source = torch.where(position < lengths, lengths - 1 - position, position)
    rows = torch.arange(moved.shape[0])[:, None]
    return moved[rows, source].movedim((0, 1), (batch_axis, seq_axis))


@kernel("sliding_windows")
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    """Windows of ``size`` elements along ``axis``; their elements are along a new axis after it."""
    axis %= x.dim()
    return x.unfold(axis, size, stride).movedim(-1, axis + 1)


@kernel("pad")
def pad(x: Tensor, pad: Ints, mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """``x`` padded along its last axes; ``pad`` is (before, after) of each axis."""
    amounts = list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        return pad_spatial(x, amounts, constant_val)
    for axis, (before, after) in enumerate(amounts, start=x.dim() - len(amounts)):
        x = x.index_select(axis, _border(mode, x.shape[axis], before, after))
    return x


@kernel("crop")
def crop(x: Tensor, crop_height: Ints, crop_width: Ints) -> Tensor:
    """``x`` [*, H, W] without ``crop_height`` rows and ``crop_width`` columns at (begin, end)."""
    return pad_spatial(x, [(-first, -last) for first, last in (crop_height, crop_width)])


def _border(mode: str, size: int, before: int, after: int) -> Tensor:
    positions = torch.arange(-before, size + after)
    if mode == "replicate":
        return positions.clamp(0, size - 1)
    if mode != "reflect":
        raise ValueError(f"pad mode is {mode!r}, not constant, reflect or replicate")
    if max(before, after) >= size:
        raise ValueError(f"cannot reflect {max(before, after)} elements of a size of {size}")
    return size - 1 - (size - 1 - positions.abs()).abs()
