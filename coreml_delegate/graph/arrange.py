"""MIL ops that move elements, shared by the ``compose`` functions of several families.

Values have the storage dtypes fp32, fp16 and int32; hardly any MIL op moves bools. Constants are
moved here, not at run time, so that they stay constants to the ops that need constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, const
from coreml_delegate.graph.emitter import same_shape
from coreml_delegate.graph.tensor_types import Dim, product
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import pad, take


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
        return const(np.transpose(x.val, list(permutation))), new_shape
    if long_axes == sorted(long_axes):
        # A reshape does: axes of size 1 change places, the elements stay in order.
        return c.reshape(x, new_shape), new_shape
    return mb.transpose(x=x, perm=list(permutation)), new_shape


def reshape(c: Composer, x: Var, shape: Sequence[Dim], new_shape: Sequence[Dim]) -> Var:
    """Return ``x``, of shape ``shape``, in another shape."""
    if same_shape(shape, new_shape):
        return x
    if x.val is not None:
        return const(np.reshape(x.val, [int(size) for size in new_shape]))
    return c.reshape(x, new_shape)


def join(values: Sequence[Var], axis: int) -> Var:
    """Concatenate tensors along an axis."""
    return values[0] if len(values) == 1 else mb.concat(values=list(values), axis=axis)


def spread(c: Composer, x: Var, shape: Sequence[Dim], factors: Sequence[int], fill: Var) -> Var:
    """Dilate a tensor: its sizes become ``(size - 1) * factor + 1`` along each axis.

    Args:
        c: The composer.
        x: The tensor, of shape ``shape``.
        shape: Sizes of the graph, which may be symbols.
        factors: For each axis, the new distance of neighbours, filled with ``fill``.
        fill: The number, of rank 0.
    """
    sizes = list(shape)
    for axis, factor in enumerate(factors):
        if factor == 1 or sizes[axis] == 1:
            continue
        size, before, after = sizes[axis], sizes[:axis], sizes[axis + 1 :]
        if len(sizes) == MOST_AXES:  # an axis is added
            before, after = [product(before)], [product(after)]
            x = c.reshape(x, (*before, size, *after))
        gaps = [(0, 0)] * (len(before) + 1) + [(0, factor - 1)] + [(0, 0)] * len(after)
        x = pad(mb.expand_dims(x=x, axes=[len(before) + 1]), gaps, fill)
        sizes[axis] = size * factor
        x = take(c.reshape(x, sizes), axis, 0, 1 - factor)
        sizes[axis] = (size - 1) * factor + 1
    return x


def flip(x: Var, axes: Sequence[int]) -> Var:
    """Return a tensor with the elements along some axes in reverse order."""
    if not axes:
        return x
    if x.val is not None:
        return const(np.flip(x.val, tuple(axes)))
    return mb.reverse(x=x, axes=list(axes))
