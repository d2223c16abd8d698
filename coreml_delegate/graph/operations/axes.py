"""MIL ops that move elements, for several families: merged axes, labelled axes, indices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError, UnsupportedOperatorError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, const
from coreml_delegate.graph.emitter import same_shape
from coreml_delegate.graph.tensor_types import (
    Dim,
    Dimension,
    DType,
    TensorType,
    product,
    simplify,
)
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import pad, take


def sizes_of(name: str, sizes: Sequence[Any], least: int = 0) -> tuple[Dim, ...]:
    """Return ints, expressions or dimensions, of ``least`` or more, as entries of a shape.

    Raises:
        GraphError: An entry is not a size, or too small.
    """
    simplified: list[Dim] = []
    for size in sizes:
        size = size.symbol if isinstance(size, Dimension) else size
        if not isinstance(size, int | np.integer | sympy.Expr) or isinstance(size, bool):
            raise GraphError(f"{name}: not a size", got=repr(size), expected="an int")
        size = simplify(size)
        if isinstance(size, int) and size < least:
            raise GraphError(f"{name}: a size is too small", got=str(size), expected=f">= {least}")
        simplified.append(size)
    return tuple(simplified)


def require_rank(name: str, what: str, entries: Sequence[Any], rank: int) -> None:
    """Refuse a list without exactly one entry per dimension.

    Raises:
        GraphError: A wrong length; names the list.
    """
    if len(entries) != rank:
        raise GraphError(
            f"{name}: wrong number of {what}",
            got=str(len(entries)),
            expected=f"{rank}, one per dimension",
        )


def require_few_axes(name: str, type: TensorType) -> None:
    """Refuse a tensor of more than five dimensions.

    Raises:
        GraphError: It has more; names it.
    """
    if type.rank > MOST_AXES:
        raise GraphError(
            f"{name}: too many dimensions for Core ML",
            got=str(type),
            expected=f"at most {MOST_AXES}",
        )


def around_axis(type: TensorType, axis: int) -> tuple[tuple[int, int, int], int]:
    """Return the shape [before, size, after] around an axis, and the axis in it: 1."""
    shape = type.static_shape
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])), 1


@dataclass(frozen=True)
class Axes:
    """Axes of a tensor in groups: an op sees each group as one axis.

    Attributes:
        groups: Neighbouring axes that the op treats alike; single axes if there are at most five.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kinds: Sequence[Any]) -> Axes:
        """Return groups of neighbours of equal kinds, not None, if a tensor has too many axes.

        Raises:
            UnsupportedOperatorError: More than five groups.
        """
        groups: list[tuple[int, ...]] = []
        for axis, kind in enumerate(kinds):
            alike = axis > 0 and kind is not None and kind == kinds[axis - 1]
            if alike and len(kinds) > MOST_AXES:
                groups[-1] = (*groups[-1], axis)
            else:
                groups.append((axis,))
        if len(groups) > MOST_AXES:
            raise UnsupportedOperatorError(
                "an operation treats too many dimensions differently",
                got=str(len(groups)),
                expected=f"{MOST_AXES}, the highest rank of Core ML",
            )
        return cls(tuple(groups))

    @property
    def are_merged(self) -> bool:
        """Whether any group has several axes."""
        return any(len(group) > 1 for group in self.groups)

    def shape(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the shape after the merge: a size for each group."""
        return tuple(product([shape[axis] for axis in group]) for group in self.groups)

    def pick(self, entries: Sequence[Any]) -> list[Any]:
        """Return an entry for each group: the entry of its first axis."""
        return [entries[group[0]] for group in self.groups]

    def merge(self, c: Composer, x: Var, shape: Sequence[Dim]) -> Var:
        """Reshape a tensor of all axes to one axis per group."""
        return c.reshape(x, self.shape(shape)) if self.are_merged else x

    def split(self, c: Composer, x: Var, shape: Sequence[Dim]) -> Var:
        """Reshape a tensor of one axis per group to ``shape``, with all axes."""
        return c.reshape(x, shape) if self.are_merged else x


def permute(c: Composer, x: Var, shape: Sequence[Dim], order: Sequence[int]) -> Var:
    """Return ``x``, of a shape, with its dimensions in another order: ``order[n]`` becomes n."""
    new_shape = [shape[axis] for axis in order]
    long_axes = [axis for axis in order if shape[axis] != 1]
    if list(order) == sorted(order):
        return x
    if long_axes == sorted(long_axes) and all(isinstance(size, int) for size in shape):
        return c.reshape(x, new_shape)
    if len(order) <= MOST_AXES:
        return mb.transpose(x=x, perm=list(order))
    # Dimensions that stay neighbours become one.
    runs: list[list[int]] = []
    for axis in long_axes:
        last = runs[-1][-1] if runs else axis
        if last < axis and all(shape[between] == 1 for between in range(last + 1, axis)):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    sorted_runs = sorted(runs)
    sizes = [product([shape[axis] for axis in run]) for run in sorted_runs]
    return c.reshape(
        _permute_runs(c, x, sizes, [sorted_runs.index(run) for run in runs]), new_shape
    )


def _permute_runs(c: Composer, x: Var, sizes: Sequence[Dim], order: Sequence[int]) -> Var:
    if len(order) <= MOST_AXES:
        return mb.transpose(x=c.reshape(x, sizes), perm=list(order))
    current = list(range(len(order)))
    for target, axis in enumerate(order):
        position = current.index(axis)
        if position == target:
            continue
        parts = [current[:target], current[target:position], [axis], current[position + 1 :]]
        x = c.reshape(x, [product([sizes[n] for n in part]) for part in parts])
        x = mb.transpose(x=x, perm=[0, 2, 1, 3])
        current = [n for part in (parts[0], parts[2], parts[1], parts[3]) for n in part]
    return x


def arrange(x: Var, have: Sequence[Hashable], want: Sequence[Hashable]) -> Var:
    """Return a tensor with its axes, labelled ``have``, in the order of the labels ``want``.

    Axes without a label in ``want`` have size 1 and are dropped; labels that ``x`` lacks become
    axes of size 1.
    """
    dropped = [axis for axis, label in enumerate(have) if label not in want]
    if dropped:
        x = mb.squeeze(x=x, axes=dropped)
    shared = [label for label in have if label in want]
    order = [shared.index(label) for label in want if label in shared]
    if order != sorted(order):
        x = mb.transpose(x=x, perm=order)
    added = [axis for axis, label in enumerate(want) if label not in shared]
    return mb.expand_dims(x=x, axes=added) if added else x


def counting(c: Composer, size: Dim) -> Var:
    """Return the int32 vector 0, 1, ..., size - 1; the size may be symbolic."""
    if isinstance(size, int):
        return const(np.arange(size, dtype=np.int32))
    return mb.range_1d(start=np.int32(0), end=c.size(size), step=np.int32(1))


def as_index(x: Var, dtype: DType) -> Var:
    """Convert indices to int32; uint32 indices from 2**31 on become 2**31 - 1."""
    if dtype is not DType.UINT32:
        return x
    return mb.select(cond=mb.less(x=x, y=np.int32(0)), a=np.int32(2**31 - 1), b=x)


# Constants are moved here, not at run time, so that they stay constants to ops that need constants.


def transpose(
    c: Composer, x: Var, shape: Sequence[Dim], permutation: Sequence[int]
) -> tuple[Var, tuple[Dim, ...]]:
    """Return ``x``, of a shape, with axis ``permutation[n]`` as axis n, and the new shape."""
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

    The elements between neighbours are ``fill``, a number of rank 0.
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
