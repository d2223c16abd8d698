"""Moving elements with MIL ops: what several families of operations need when they compose.

Values have the storage dtypes fp32, fp16 and int32; hardly any MIL op moves bools. Constants are
moved here, not at run time, so that they stay constants to the ops that need some.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.emitter import same_shape
from coreml_delegate.graph.tensor_types import Dim


def transpose(
    c: Composer, x: Var, shape: Sequence[Dim], permutation: Sequence[int]
) -> tuple[Var, tuple[Dim, ...]]:
    """Return a tensor with its axes in another order, and its shape.

    Args:
        c: The composer.
        x: Of this shape.
        shape: See ``x``.
        permutation: For each axis of the result, that of ``x``.
    """
    moved = tuple(shape[axis] for axis in permutation)
    wide = [axis for axis in permutation if shape[axis] != 1]
    if list(permutation) == sorted(permutation):
        return x, moved
    if x.val is not None:
        return c.const(np.transpose(x.val, list(permutation))), moved
    if wide == sorted(wide):
        # Axes of one element change places without any element doing so.
        return c.reshape(x, moved), moved
    return c.mb.transpose(x=x, perm=list(permutation)), moved


def reshape(c: Composer, x: Var, shape: Sequence[Dim], wanted: Sequence[Dim]) -> Var:
    """Return the elements of ``x``, which has ``shape``, in another shape."""
    if same_shape(shape, wanted):
        return x
    if x.val is not None:
        return c.const(np.reshape(x.val, [int(size) for size in wanted]))
    return c.reshape(x, wanted)


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
    others = [n != axis for n in range(rank)]
    return c.mb.slice_by_index(
        x=x,
        begin=begin,
        end=end,
        stride=stride,
        begin_mask=others,
        end_mask=[other or stop is None for other in others],
    )


def join(c: Composer, values: Sequence[Var], axis: int) -> Var:
    """Return tensors one after the other along an axis."""
    return values[0] if len(values) == 1 else c.mb.concat(values=list(values), axis=axis)


def pad(
    c: Composer,
    x: Var,
    shape: Sequence[Dim],
    padding: Sequence[tuple[int, int]],
    fill: Var,
) -> tuple[Var, tuple[Dim, ...]]:
    """Return a tensor with a number around it, and its shape; negative amounts crop.

    Args:
        c: The composer.
        x: Of this shape.
        shape: See ``x``.
        padding: Elements before and after, for each axis.
        fill: The number, of rank 0.
    """
    sizes = list(shape)
    for axis, (low, high) in enumerate(padding):
        x = take(c, x, axis, max(-low, 0), min(high, 0) or None)
        sizes[axis] = sizes[axis] + min(low, 0) + min(high, 0)
    wanted = [(max(low, 0), max(high, 0)) for low, high in padding]
    is_float = fill.val is not None and np.asarray(fill.val).dtype.kind == "f"
    if is_float and any(map(any, wanted)):
        amounts = [amount for pair in wanted for amount in pair]
        x = c.mb.pad(x=x, pad=amounts, mode="constant", constant_val=fill.val)
    for axis, (low, high) in enumerate(wanted):
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
    """Return a tensor with a number between its elements, and its shape.

    Args:
        c: The composer.
        x: Of this shape.
        shape: See ``x``.
        factors: For each axis, the distance of elements that were neighbours.
        fill: The number, of rank 0.
    """
    sizes = list(shape)
    for axis, factor in enumerate(factors):
        if factor == 1:
            continue
        # Few axes are enough to insert one more; devices take five.
        before, after = _count(sizes[:axis]), _count(sizes[axis + 1 :])
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


def _count(sizes: Sequence[Dim]) -> Dim:
    count: Dim = 1
    for size in sizes:
        count = count * size
    return count


def flip(c: Composer, x: Var, axes: Sequence[int]) -> Var:
    """Return a tensor with the elements along some axes in reverse order."""
    if not axes:
        return x
    if x.val is not None:
        return c.const(np.flip(x.val, tuple(axes)))
    return c.mb.reverse(x=x, axes=list(axes))
