"""Ops that extract, pad or replace regions of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino.graph import (
    INT_MAX,
    INT_MIN,
    constant_ints,
    convert_to,
    dim_of,
    dims,
    element_type,
    ints,
    normalize_axis,
    rank,
    replace_slices,
    require_room,
    scalar,
    shape_of,
    static_dims,
    with_equal_sizes,
)
from coreml_delegate.runtime.engines.openvino.plugin import integers
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Bools, Ints, Result, Tensor, refusal

_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def _flags(mask: Bools | None, size: int) -> list[int]:
    return [int(flag) for flag in mask] if mask else [0] * size


def _steps(stride: Ints | None, squeezed: list[int]) -> list[int]:
    """Return the steps of a slice, 1 along squeezed axes.

    A squeezed axis ignores its stride, but OpenVINO requires a positive stride there.
    """
    strides = stride or [1] * len(squeezed)
    return [1 if drop else step for drop, step in zip(squeezed, strides, strict=True)]


@translation("slice_by_index")
def slice_by_index(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Result:
    """``x[begin[0]:end[0]:stride[0], ...]``; a squeezed axis is indexed by its ``begin``."""
    axes = rank(x)
    squeezed = _flags(squeeze_mask, axes)
    steps = _steps(stride, squeezed)
    masks = _flags(begin_mask, axes), _flags(end_mask, axes)
    element = _find_single_index(x, begin, end, steps, *masks, squeezed)
    if element is not None:
        axis, index = element
        # The plugin makes a gather a view where memory allows; a strided slice is always a copy.
        return ops.gather(x, ints(index), ints(axis))
    if any(step != 1 for step in steps):
        return _slice_with_steps(x, begin, end, steps, *masks, squeezed)
    return ops.strided_slice(x, begin, end, ints(steps), *masks, [0] * axes, squeezed, [0] * axes)


def _slice_with_steps(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    steps: list[int],
    begin_mask: list[int],
    end_mask: list[int],
    squeezed: list[int],
) -> Result:
    """Return ``slice_by_index`` with steps as a Slice.

    OpenVINO 2026.4 loses the steps of a StridedSlice: if such slices are concatenated, its
    EliminateConcatStridedSlice takes them for contiguous parts.
    """
    begin, end = ops.convert(begin, "i32"), ops.convert(end, "i32")
    is_zero = [flag and drop for flag, drop in zip(begin_mask, squeezed, strict=True)]
    begin = ops.select(_constant_flags(is_zero), ints(0), begin)
    after = ops.select(ops.equal(begin, ints(-1)), ints(INT_MAX), ops.add(begin, ints(1)))
    end = ops.select(_constant_flags(squeezed), after, end)
    firsts = [INT_MIN if step > 0 else INT_MAX for step in steps]
    lasts = [INT_MAX if step > 0 else INT_MIN for step in steps]
    # A squeezed axis has its begin and end already.
    is_first, is_last = (
        _constant_flags([flag and not drop for flag, drop in zip(mask, squeezed, strict=True)])
        for mask in (begin_mask, end_mask)
    )
    begin = ops.select(is_first, ints(firsts), begin)
    end = ops.select(is_last, ints(lasts), end)
    sliced = ops.slice(x, begin, end, ints(steps))
    dropped = [axis for axis, drop in enumerate(squeezed) if drop]
    return ops.squeeze(sliced, ints(dropped)) if dropped else sliced


def _constant_flags(flags: list[Any]) -> Tensor:
    return ops.constant(np.array(flags, np.bool_))


def _find_single_index(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    steps: list[int],
    begin_mask: list[int],
    end_mask: list[int],
    squeezed: list[int],
) -> tuple[int, int] | None:
    """Match ``x[:, ..., index, ..., :]``; return (axis, index), or None."""
    first, last, sizes = constant_ints(begin), constant_ints(end), dims(x)
    if first is None or last is None or squeezed.count(1) != 1:
        return None

    def is_full(axis: int) -> bool:
        size = sizes[axis]
        from_start = begin_mask[axis] or first[axis] == 0
        to_end = end_mask[axis] or (size is not None and last[axis] >= size)
        return steps[axis] == 1 and bool(from_start and to_end)

    axis = squeezed.index(1)
    size, index = sizes[axis], first[axis]
    if begin_mask[axis] or size is None or not -size <= index < size:
        return None
    other_axes = (other_axis for other_axis in range(len(sizes)) if other_axis != axis)
    return (axis, index % size) if all(is_full(other_axis) for other_axis in other_axes) else None


@translation("slice_by_size")
def slice_by_size(x: Tensor, begin: Tensor, size: Tensor) -> Result:
    """``x[begin[i]:begin[i] + size[i]]`` along each axis i; a size of -1 takes all that follow."""
    axes = rank(x)
    start, count = constant_ints(begin), constant_ints(size)
    lengths = dims(x)
    is_known = start is not None and all(
        begin_ >= 0 or length is not None for begin_, length in zip(start, lengths, strict=True)
    )
    if is_known and start is not None and count is not None:
        first = [
            begin_ + (length or 0) if begin_ < 0 else begin_
            for begin_, length in zip(start, lengths, strict=True)
        ]
        stop = [
            INT_MAX if count_ == -1 else begin_ + count_
            for begin_, count_ in zip(first, count, strict=True)
        ]
        return ops.slice(x, ints(first), ints(stop), ints([1] * axes))
    zero = ints(0)
    # Indices may have 8 bits, which may overflow when a size is added.
    begin, size = (convert_to(value, element_type(zero)) for value in (begin, size))
    first = ops.select(ops.less(begin, zero), ops.add(begin, shape_of(x)), begin)
    stop = ops.select(ops.less(size, zero), ints(INT_MAX), ops.add(first, size))
    result = ops.slice(x, first, stop, ints([1] * axes))
    if count is None or min(count) < 0:
        return result
    # The sizes are constant, although ``begin`` is not.
    return ops.reshape(result, ints(count), special_zero=False)


@translation("slice_update")
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: Tensor,
    end: Tensor,  # noqa: ARG001 - the shape of the update says where the region ends
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Result:
    """``x`` with the region that ``slice_by_index`` would return replaced by ``update``.

    Each axis that the region does not span takes one scatter, on the slice that earlier axes
    select. The CPU plugin of OpenVINO 2026.4 crashes on SliceScatter with bounds known at run time
    only.
    """
    axes = rank(x)
    squeezed = _flags(squeeze_mask, axes)
    dropped = [axis for axis, drop in enumerate(squeezed) if drop]
    if dropped:
        update = ops.unsqueeze(update, ints(dropped))
    steps = _steps(stride, squeezed)
    masks = _flags(begin_mask, axes), _flags(end_mask, axes)
    first = _first_indices(x, begin, steps, masks[0])
    sizes, counts = dims(x), dims(update)
    regions: list[tuple[int, Any]] = []
    for axis, (size, count, step) in enumerate(zip(sizes, counts, steps, strict=True)):
        is_open = step == 1 and masks[0][axis] and masks[1][axis] and not squeezed[axis]
        is_as_large = step > 0 and size is not None and size == count
        if is_open:
            x, update = with_equal_sizes(x, axis, update, axis)
        elif not is_as_large:
            regions.append((axis, _slice_indices(first, update, axis, step)))
    return _replace_region(x, update, regions)


def _first_indices(x: Tensor, begin: Tensor, steps: list[int], begin_mask: list[int]) -> Any:
    """Return the first index of a slice along every axis, by numpy's rules."""
    begin = convert_to(begin, element_type(ints(0)))  # 8 bits may overflow when a size is added
    static_sizes = [size for size in dims(x) if size is not None]
    sizes = ints(static_sizes) if len(static_sizes) == rank(x) else shape_of(x)
    backward = ints([int(step < 0) for step in steps])
    last = ops.subtract(sizes, backward)
    start = ops.select(ops.less(begin, ints(0)), ops.add(begin, sizes), begin)
    start = ops.minimum(ops.maximum(start, ints(0)), last)
    return ops.select(
        ops.constant(np.asarray(begin_mask, bool)), ops.multiply(last, backward), start
    )


def _slice_indices(first: Any, update: Tensor, axis: int, step: int) -> Any:
    """Return the indices of a slice along ``axis``, as many as ``update`` has."""
    start = ops.gather(first, ints((axis,)), ints(0))
    count = dims(update)[axis]
    if count is not None:
        return ops.add(start, ints((np.arange(count) * step).tolist()))
    steps = ops.range(ints(0), dim_of(update, axis), ints(1), "i32")
    return ops.add(start, ops.multiply(steps, ints(step)))


def _replace_region(x: Tensor, update: Tensor, regions: list[tuple[int, Any]]) -> Any:
    """Return ``x`` with ``update`` at these (axis, indices); all indices along other axes."""
    if not regions:
        return update
    (axis, indices), inner_regions = regions[0], regions[1:]
    inner = (
        _replace_region(ops.gather(x, indices, ints(axis)), update, inner_regions)
        if inner_regions
        else update
    )
    return replace_slices(x, indices, inner, axis)


@translation("crop")
def crop(x: Tensor, crop_height: Ints, crop_width: Ints) -> Result:
    """``x`` [*, H, W] without ``crop_height`` rows and ``crop_width`` columns at (begin, end)."""
    stops = [-after if after else INT_MAX for after in (crop_height[1], crop_width[1])]
    return ops.slice(
        x, ints((crop_height[0], crop_width[0])), ints(stops), ints((1, 1)), ints((-2, -1))
    )


@translation("pad")
def pad(x: Tensor, pad: Tensor, mode: str = "constant", constant_val: float = 0.0) -> Result:
    """``x`` padded along its last axes; ``pad`` is (before, after) of each axis."""
    if mode not in _PAD_MODES:
        raise refusal("unknown pad mode", mode, ", ".join(_PAD_MODES))
    axes = rank(x)
    amounts = constant_ints(pad)
    if amounts is None:
        begin = ops.strided_slice(pad, ints((0,)), ints((0,)), ints((2,)), [0], [1])
        end = ops.strided_slice(pad, ints((1,)), ints((0,)), ints((2,)), [0], [1])
        end = require_room(end, ops.add(shape_of(x), ops.add(begin, end)), x)
    else:
        leading = [0] * (axes - len(amounts) // 2)
        begin = ints([*leading, *amounts[0::2]])
        end = ints([*leading, *amounts[1::2]])
    fill = scalar(constant_val, x) if mode == "constant" else None
    return ops.pad(x, begin, end, _PAD_MODES[mode], fill)


@translation("reverse")
def reverse(x: Tensor, axes: Ints | None = None) -> Result:
    """``x`` with the order along ``axes`` reversed."""
    over = list(range(rank(x))) if axes is None else list(axes)
    if not over:
        return x
    backwards = ints([-1] * len(over))
    return ops.slice(x, backwards, ints([INT_MIN] * len(over)), backwards, ints(over))


@translation("reverse_sequence")
def reverse_sequence(x: Tensor, lengths: Tensor, seq_axis: int = 0, batch_axis: int = 0) -> Result:
    """``x`` with the first ``lengths[b]`` elements of each sequence reversed."""
    axes = rank(x)
    return ops.reverse_sequence(
        x, lengths, normalize_axis(batch_axis, axes), normalize_axis(seq_axis, axes)
    )


@translation("sliding_windows")
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Result:
    """Windows of ``size`` elements along ``axis``; their elements are along a new axis after it."""
    axis = normalize_axis(axis, rank(x))
    (length,) = static_dims(x, (axis,))
    starts = np.arange(0, length - size + 1, stride)
    limits.require_constant(len(starts) * size, f"{len(starts)} windows of {size} elements")
    indices = (starts[:, None] + np.arange(size)).astype(np.int32)
    return ops.gather(x, ops.constant(indices), ints(axis))


@translation("band_part")
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Result:
    """``x`` [*, M, N], zero where ``i - j > lower >= 0`` or ``j - i > upper >= 0``."""
    rows = ops.unsqueeze(_arange(x, -2), ints(1))
    columns = ops.unsqueeze(_arange(x, -1), ints(0))
    below = ops.subtract(rows, columns)
    keep = ops.logical_and(
        ops.less_equal(below, ints(lower if lower >= 0 else INT_MAX)),
        ops.greater_equal(below, ints(-upper if upper >= 0 else INT_MIN)),
    )
    return integers.exact_select(keep, x, scalar(0, x))


def _arange(x: Tensor, axis: int) -> Any:
    return ops.range(ints(0), dim_of(x, axis), ints(1), "i32")
