"""MIL ops that move elements, shared by the ``compose`` functions of several families.

Values have the storage dtypes fp32, fp16 and int32; hardly any MIL op moves bools. Constants are
moved here, not at run time, so that they stay constants to the ops that need constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.emitter import same_shape
from coreml_delegate.graph.tensor_types import Dim, product


def transpose(
    c: Composer, x: Var, shape: Sequence[Dim], permutation: Sequence[int]
) -> tuple[Var, tuple[Dim, ...]]:
    """Return a tensor with its axes in another order, and the new shape.

    Args:
        c: The composer.
        x: The tensor, of shape ``shape``.
        shape: Sizes of the graph, which may be symbols.
        permutation: The axis of ``x`` for each axis of the result.
    """
    new_shape = tuple(shape[axis] for axis in permutation)
    long_axes = [axis for axis in permutation if shape[axis] != 1]
    if list(permutation) == sorted(permutation):
        return x, new_shape
    if x.val is not None:
        return c.const(np.transpose(x.val, list(permutation))), new_shape
    if long_axes == sorted(long_axes):
        # A reshape does: axes of size 1 change places, the elements stay in order.
        return c.reshape(x, new_shape), new_shape
    return c.mb.transpose(x=x, perm=list(permutation)), new_shape


def reshape(c: Composer, x: Var, shape: Sequence[Dim], new_shape: Sequence[Dim]) -> Var:
    """Return ``x``, of shape ``shape``, in another shape."""
    if same_shape(shape, new_shape):
        return x
    if x.val is not None:
        return c.const(np.reshape(x.val, [int(size) for size in new_shape]))
    return c.reshape(x, new_shape)


def take(
    c: Composer,
    x: Var,
    axis: int,
    start: int = 0,
    stop: int | None = None,
    step: int = 1,
) -> Var:
    """Return a slice along one axis; ``stop`` below zero counts from the end."""
    if (start, stop, step) == (0, None, 1):
        return x
    rank = x.rank
    begin, end, stride = [0] * rank, [0] * rank, [1] * rank
    begin[axis], end[axis], stride[axis] = start, stop or 0, step
    is_unsliced = [n != axis for n in range(rank)]
    return c.mb.slice_by_index(
        x=x,
        begin=begin,
        end=end,
        stride=stride,
        begin_mask=is_unsliced,
        end_mask=[unsliced or stop is None for unsliced in is_unsliced],
    )


def join(c: Composer, values: Sequence[Var], axis: int) -> Var:
    """Concatenate tensors along an axis."""
    return values[0] if len(values) == 1 else c.mb.concat(values=list(values), axis=axis)


def pad(
    c: Composer,
    x: Var,
    shape: Sequence[Dim],
    padding: Sequence[tuple[int, int]],
    fill: Var,
) -> tuple[Var, tuple[Dim, ...]]:
    """Return a tensor padded with a number, and the new shape; negative amounts crop.

    Args:
        c: The composer.
        x: The tensor, of shape ``shape``.
        shape: Sizes of the graph, which may be symbols.
        padding: Elements before and after, for each axis.
        fill: The number, of rank 0.
    """
    sizes = list(shape)
    for axis, (low, high) in enumerate(padding):
        x = take(c, x, axis, max(-low, 0), min(high, 0) or None)
        sizes[axis] = sizes[axis] + min(low, 0) + min(high, 0)
    additions = [(max(low, 0), max(high, 0)) for low, high in padding]
    is_float = fill.val is not None and np.asarray(fill.val).dtype.kind == "f"
    if is_float and any(map(any, additions)):
        amounts = [amount for pair in additions for amount in pair]
        x = c.mb.pad(x=x, pad=amounts, mode="constant", constant_val=fill.val)
    for axis, (low, high) in enumerate(additions):
        if not is_float and (low or high):
            edges = [
                [c.broadcast(fill, [*sizes[:axis], n, *sizes[axis + 1 :]])] if n else []
                for n in (low, high)
            ]
            x = join(c, [*edges[0], x, *edges[1]], axis)
        sizes[axis] = sizes[axis] + low + high
    return x, tuple(sizes)


def spread(
    c: Composer, x: Var, shape: Sequence[Dim], factors: Sequence[int], fill: Var
) -> tuple[Var, tuple[Dim, ...]]:
    """Dilate a tensor; return it and its shape, ``(size - 1) * factor + 1`` along each axis.

    Args:
        c: The composer.
        x: The tensor, of shape ``shape``.
        shape: Sizes of the graph, which may be symbols.
        factors: For each axis, the new distance of neighbours, filled with ``fill``.
        fill: The number, of rank 0.
    """
    sizes = list(shape)
    for axis, factor in enumerate(factors):
        if factor == 1:
            continue
        # [before, size, after] and one new axis: devices take at most five.
        before, after = product(sizes[:axis]), product(sizes[axis + 1 :])
        size = sizes[axis]
        column = c.reshape(x, (before, size, 1, after))
        column, _ = pad(
            c, column, (before, size, 1, after), [(0, 0), (0, 0), (0, factor - 1), (0, 0)], fill
        )
        column = c.reshape(column, (before, size * factor, after))
        x = take(c, column, 1, 0, 1 - factor)
        sizes[axis] = (size - 1) * factor + 1
        x = c.reshape(x, sizes)
    return x, tuple(sizes)


def flip(c: Composer, x: Var, axes: Sequence[int]) -> Var:
    """Return a tensor with the elements along some axes in reverse order."""
    if not axes:
        return x
    if x.val is not None:
        return c.const(np.flip(x.val, tuple(axes)))
    return c.mb.reverse(x=x, axes=list(axes))
