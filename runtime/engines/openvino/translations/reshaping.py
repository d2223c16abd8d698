"""Ops that rearrange all elements of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_ints,
    dim_of,
    dims,
    ints,
    normalize_axis,
    rank,
    require_room,
    shape_of,
    static_dims,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import (
    Bools,
    Ints,
    Result,
    Tensor,
    Tensors,
    refusal,
)
from coreml_delegate.targets import Opset


@translation("reshape")
def reshape_ios15(x: Tensor, shape: Tensor) -> Result:
    """``x`` with shape ``shape``; 0 keeps the size at the same index, -1 is inferred."""
    return ops.reshape(x, shape, special_zero=len(dims(x)) == static_dims(shape, (0,))[0])


@translation("reshape", since=Opset.iOS17)
def reshape_ios17(x: Tensor, shape: Tensor) -> Result:
    """``x`` with shape ``shape``; 0 keeps the size at this index from the end, -1 is inferred."""
    sizes = constant_ints(shape)
    old_sizes = dims(x)
    if sizes is None or 0 not in sizes or len(sizes) == len(old_sizes):
        return reshape_ios15(x, shape)
    offset = len(old_sizes) - len(sizes)
    pieces = [
        dim_of(x, index + offset)
        if size == 0 and index + offset >= 0
        else ints(size if size != 0 else 1)
        for index, size in enumerate(sizes)
    ]
    return ops.reshape(x, _vector(pieces), special_zero=False)


@translation("reshape_like")
def reshape_like(
    x: Tensor, ref_tensors: Tensors, begins: Ints, ends: Ints, end_masks: Bools
) -> Result:
    """``x`` with the concatenated slices of the shapes of ``ref_tensors`` as shape."""
    pieces: list[Any] = []
    for reference, begin, end, to_end in zip(ref_tensors, begins, ends, end_masks, strict=True):
        axes = range(rank(reference))[begin : None if to_end else end]
        pieces.extend(dim_of(reference, axis) for axis in axes)
    return ops.reshape(x, _vector(pieces), special_zero=False)


def _vector(scalars: Sequence[Any]) -> Any:
    """Return i32 scalars as a vector."""
    return ops.concat([ops.unsqueeze(item, ints(0)) for item in scalars], 0)


@translation("flatten2d")
def flatten2d(x: Tensor, axis: int = 1) -> Result:
    """``x`` as a matrix: axes before ``axis`` are rows, later axes are columns."""
    axis = normalize_axis(axis, rank(x))
    shape = dims(x)
    before, after = shape[:axis], shape[axis:]
    if None not in before:
        target = (math.prod(size for size in before if size is not None), -1)
    elif None not in after:
        target = (-1, math.prod(size for size in after if size is not None))
    else:
        leading = ops.gather(shape_of(x), ints(list(range(axis))), ints(0))
        return ops.reshape(
            x, _vector([ops.reduce_prod(leading, ints(0), False), ints(-1)]), special_zero=False
        )
    return ops.reshape(x, ints(target), special_zero=False)


@translation("expand_dims")
def expand_dims(x: Tensor, axes: Ints) -> Result:
    """``x`` with new dimensions of size 1 at ``axes`` of the result."""
    total = rank(x) + len(axes)
    return ops.unsqueeze(x, ints(sorted(normalize_axis(axis, total) for axis in axes)))


@translation("squeeze")
def squeeze(x: Tensor, axes: Ints | None = None) -> Result:
    """``x`` without dimensions of size 1; larger dimensions among ``axes`` stay."""
    shape = dims(x)
    chosen = [normalize_axis(axis, len(shape)) for axis in (axes or range(len(shape)))]
    if axes is None and None in shape:
        raise refusal("squeeze of all axes with an unknown dimension", shape)
    removed = [axis for axis in chosen if shape[axis] in (1, None)]
    return ops.squeeze(x, ints(removed)) if removed else x


@translation("transpose")
def transpose(x: Tensor, perm: Ints) -> Result:
    """``x`` with its axes permuted."""
    return ops.transpose(x, ints([normalize_axis(axis, rank(x)) for axis in perm]))


@translation("concat")
def concat(values: Tensors, axis: int, interleave: bool = False) -> Result:
    """``values`` concatenated along ``axis``; ``interleave`` alternates their elements."""
    if rank(values[0]) == 0:
        return _vector(values)
    axis = normalize_axis(axis, rank(values[0]))
    if not interleave:
        return ops.concat(list(values), axis)
    joined = ops.concat([ops.unsqueeze(value, ints(axis + 1)) for value in values], axis + 1)
    sizes = [dim_of(values[0], dimension) for dimension in range(rank(values[0]))]
    sizes[axis] = ops.multiply(sizes[axis], ints(len(values)))
    return ops.reshape(joined, _vector(sizes), special_zero=False)


@translation("stack")
def stack(values: Tensors, axis: int) -> Result:
    """``values`` concatenated along a new axis."""
    axis = normalize_axis(axis, rank(values[0]) + 1)
    return ops.concat([ops.unsqueeze(value, ints(axis)) for value in values], axis)


@translation("split")
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: Ints | None = None
) -> Result:
    """``x`` split along ``axis`` into equal parts or parts of ``split_sizes``."""
    if split_sizes is not None:
        parts = ops.variadic_split(x, ints(axis), ints(split_sizes))
    elif num_splits is not None:
        parts = ops.split(x, ints(axis), num_splits)
    else:
        raise refusal("split", "neither num_splits nor split_sizes", "one of them")
    return tuple(parts.outputs())


@translation("tile")
def tile(x: Tensor, reps: Tensor) -> Result:
    """``x`` repeated ``reps[i]`` times along axis i."""
    return ops.tile(x, require_room(reps, reps, x, repeats_for=x))


@translation("shape")
def shape(x: Tensor) -> Result:
    """The shape of ``x``, an int32 vector."""
    return shape_of(x)


@translation("depth_to_space")
def depth_to_space(x: Tensor, block_size: int) -> Result:
    """[N, C, H, W] to [N, C / b**2, H * b, W * b]; C is (b, b, C / b**2)."""
    return ops.depth_to_space(x, "blocks_first", block_size)


@translation("space_to_depth")
def space_to_depth(x: Tensor, block_size: int) -> Result:
    """[N, C, H, W] to [N, C * b**2, H / b, W / b]; the new C is (b, b, C)."""
    return ops.space_to_depth(x, "blocks_first", block_size)


@translation("pixel_shuffle")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Result:
    """[N, C * f**2, H, W] to [N, C, H * f, W * f]; the old channels are (C, f, f)."""
    return ops.depth_to_space(x, "depth_first", upscale_factor)


@translation("pixel_unshuffle")
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Result:
    """[N, C, H * f, W * f] to [N, C * f**2, H, W]; the new channels are (C, f, f)."""
    return ops.space_to_depth(x, "depth_first", downscale_factor)


@translation("space_to_batch")
def space_to_batch(x: Tensor, block_shape: Ints, paddings: Ints) -> Result:
    """Blocks of the padded spatial axes of ``x`` [N, C, H, W] moved to the batch axis."""
    begin, end = paddings[0::2], paddings[1::2]
    return ops.space_to_batch(
        x, ints((1, 1, *block_shape)), ints((0, 0, *begin)), ints((0, 0, *end))
    )


@translation("batch_to_space")
def batch_to_space(x: Tensor, block_shape: Ints, crops: Ints) -> Result:
    """Inverse of ``space_to_batch``, cropping the spatial axes."""
    begin, end = crops[0::2], crops[1::2]
    return ops.batch_to_space(
        x, ints((1, 1, *block_shape)), ints((0, 0, *begin)), ints((0, 0, *end))
    )
