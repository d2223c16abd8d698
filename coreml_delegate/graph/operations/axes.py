"""Shared by operations that move elements: sizes, merged axes, labelled axes, known elements."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError, UnsupportedOperatorError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var
from coreml_delegate.graph.node import Value
from coreml_delegate.graph.tensor_types import Dim, Dimension, DType, simplify

_MOST_KNOWN = 16


def product(sizes: Sequence[Dim]) -> Dim:
    """Return the product of sizes."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return simplify(total)


def sizes_of(name: str, sizes: Sequence[Any], least: int = 0) -> tuple[Dim, ...]:
    """Return sizes as they stand in shapes.

    Args:
        name: Of the operation.
        sizes: Ints, expressions, or dimensions.
        least: The smallest that is allowed.

    Raises:
        GraphError: One is something else, or too small.
    """
    found: list[Dim] = []
    for size in sizes:
        size = size.symbol if isinstance(size, Dimension) else size
        if not isinstance(size, int | np.integer | sympy.Expr) or isinstance(size, bool):
            raise GraphError(f"{name}: not a size", got=repr(size), expected="an int")
        size = simplify(size)
        if isinstance(size, int) and size < least:
            raise GraphError(f"{name}: a size is too small", got=str(size), expected=f">= {least}")
        found.append(size)
    return tuple(found)


def require_rank(name: str, what: str, given: Sequence[Any], rank: int) -> None:
    """Refuse a list that does not have one entry per dimension.

    Raises:
        GraphError: Names the list.
    """
    if len(given) != rank:
        raise GraphError(
            f"{name}: wrong number of {what}",
            got=str(len(given)),
            expected=f"{rank}, one per dimension",
        )


def known_result(
    function: Callable[..., Any], *values: Value, dtype: DType | None = None
) -> tuple[Dim, ...] | None:
    """Return the elements of a result that may be a shape, or None.

    Args:
        function: Makes the result's array of one object array per value.
        values: Operands.
        dtype: Element type of the result; None for that of the first operand.
    """
    element = dtype or values[0].dtype
    if not element.is_integer:
        return None
    arrays: list[Any] = []
    for value in values:
        if value.known is None or not value.type.is_static:
            return None
        array = np.empty(len(value.known), object)
        array[:] = value.known
        arrays.append(array.reshape(value.type.static_shape))
    found = np.asarray(function(*arrays), object)
    return tuple(found.reshape(-1)) if found.size <= _MOST_KNOWN else None


@dataclass(frozen=True)
class Axes:
    """Axes of a tensor in groups, each of which an op sees as one axis.

    Attributes:
        groups: Neighbours that the op treats alike; each axis by itself where they are few.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kinds: Sequence[Any]) -> Axes:
        """Return groups for a tensor, merging only if it has too many axes.

        Args:
            kinds: One per axis. Neighbours whose kinds are equal and not None may be merged.

        Raises:
            UnsupportedOperatorError: Too many axes are left.
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
        """Return a shape of all axes as a shape of the groups."""
        return tuple(product([shape[axis] for axis in group]) for group in self.groups)

    def pick(self, entries: Sequence[Any]) -> list[Any]:
        """Return one entry per group: that of its first axis."""
        return [entries[group[0]] for group in self.groups]

    def merge(self, c: Composer, x: Var, shape: Sequence[Dim]) -> Var:
        """Return a tensor of all axes with an axis per group."""
        return c.reshape(x, self.shape(shape)) if self.are_merged else x

    def split(self, c: Composer, x: Var, shape: Sequence[Dim]) -> Var:
        """Return a tensor with an axis per group in a shape of all axes."""
        return c.reshape(x, shape) if self.are_merged else x


def permute(c: Composer, x: Var, shape: Sequence[Dim], order: Sequence[int]) -> Var:
    """Return a tensor with permuted dimensions.

    Args:
        c: Composer.
        x: Tensor.
        shape: Its shape.
        order: For each dimension of the result, which of ``x`` it is.
    """
    want = [shape[axis] for axis in order]
    moving = [axis for axis in order if shape[axis] != 1]
    if list(order) == sorted(order):
        return x
    if moving == sorted(moving) and all(isinstance(size, int) for size in shape):
        return c.reshape(x, want)
    if len(order) <= MOST_AXES:
        return c.mb.transpose(x=x, perm=list(order))
    # Dimensions that stay neighbours are one.
    runs: list[list[int]] = []
    for axis in moving:
        last = runs[-1][-1] if runs else axis
        if last < axis and all(shape[between] == 1 for between in range(last + 1, axis)):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    have = sorted(runs)
    sizes = [product([shape[axis] for axis in run]) for run in have]
    return c.reshape(_permute_runs(c, x, sizes, [have.index(run) for run in runs]), want)


def _permute_runs(c: Composer, x: Var, sizes: Sequence[Dim], order: Sequence[int]) -> Var:
    if len(order) <= MOST_AXES:
        return c.mb.transpose(x=c.reshape(x, sizes), perm=list(order))
    now = list(range(len(order)))
    for place, axis in enumerate(order):
        at = now.index(axis)
        if at == place:
            continue
        parts = [now[:place], now[place:at], [axis], now[at + 1 :]]
        x = c.reshape(x, [product([sizes[n] for n in part]) for part in parts])
        x = c.mb.transpose(x=x, perm=[0, 2, 1, 3])
        now = [n for part in (parts[0], parts[2], parts[1], parts[3]) for n in part]
    return x


def arrange(c: Composer, x: Var, have: Sequence[Hashable], want: Sequence[Hashable]) -> Var:
    """Return a tensor with its axes in another order.

    Args:
        c: Composer.
        x: Tensor.
        have: A label for each of its axes.
        want: Labels for the result's axes. Axes whose label is missing here have size 1 and are
            dropped; labels that ``x`` lacks become axes of size 1.
    """
    dropped = [axis for axis, label in enumerate(have) if label not in want]
    if dropped:
        x = c.mb.squeeze(x=x, axes=dropped)
    kept = [label for label in have if label in want]
    order = [kept.index(label) for label in want if label in kept]
    if order != sorted(order):
        x = c.mb.transpose(x=x, perm=order)
    added = [axis for axis, label in enumerate(want) if label not in kept]
    return c.mb.expand_dims(x=x, axes=added) if added else x


def join(c: Composer, parts: Sequence[Var | int]) -> Var:
    """Return an int32 vector of sizes or indices of rank 0."""
    vectors = [
        c.const(np.array([part], np.int32))
        if isinstance(part, int)
        else c.mb.expand_dims(x=part, axes=[0])
        for part in parts
    ]
    return vectors[0] if len(vectors) == 1 else c.mb.concat(values=vectors, axis=0)


def counting(c: Composer, size: Dim) -> Var:
    """Return the int32 vector 0, 1, ... of a size, which may be symbolic."""
    if isinstance(size, int):
        return c.const(np.arange(size, dtype=np.int32))
    return c.mb.range_1d(start=np.int32(0), end=c.size(size), step=np.int32(1))


def as_index(c: Composer, x: Var, dtype: DType) -> Var:
    """Return indices as int32; those that int32 cannot hold as its largest."""
    if dtype is not DType.UINT32:
        return x
    return c.mb.select(cond=c.mb.less(x=x, y=np.int32(0)), a=np.int32(2**31 - 1), b=x)


def clamp_index(c: Composer, x: Var, limits: Sequence[Dim]) -> Var:
    """Return index vectors, along the last axis, clamped to 0 ... limits."""
    x = c.mb.maximum(x=x, y=np.int32(0))
    last = c.shape(limits)
    return c.mb.minimum(x=x, y=np.array(last, np.int32) if isinstance(last, list) else last)
