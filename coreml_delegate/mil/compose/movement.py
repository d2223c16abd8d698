"""Selections with broadcasting, slices, padding, and scans along an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from coreml_delegate.mil.compose import Var, cast, constant_of, is_float, mb, number

Amounts = Sequence[tuple[int, int]]
"""Elements before and after a tensor, for each axis."""


def select(condition: Var, x: Var, y: Var) -> Var:
    """Elements of ``x`` where the condition holds, else of ``y``; all three broadcast.

    MIL's op has the shape of its two branches: if they lack an axis of the condition, one is
    broadcast first. Bools are then combined by logic.
    """
    if _has_axes_of(condition, x, y):
        return mb.select(cond=condition, a=x, b=y)
    if x.dtype.__name__ == "bool":
        unselected = mb.logical_and(x=mb.logical_not(x=condition), y=y)
        return mb.logical_or(x=mb.logical_and(x=condition, y=x), y=unselected)
    if _is_static(condition.shape) and _is_static(x.shape):
        shape = np.broadcast_shapes(tuple(condition.shape), tuple(x.shape))
        return mb.select(cond=condition, a=_broadcast(x, shape), b=y)
    # Zeros of the condition's shape: subtracted, they keep signs of zeros.
    zeros = mb.mul(x=cast(condition, x), y=number(0, x))
    return mb.select(cond=condition, a=mb.sub(x=x, y=zeros), b=y)


def masked_fill(x: Var, condition: Var, value: float) -> Var:
    """A number where the condition holds, else elements of ``x``."""
    return select(condition, mb.const(val=number(value, x)), x)


def _has_axes_of(condition: Var, *branches: Var) -> bool:
    """Whether every axis of the condition longer than 1 is in a branch; sizes are aligned last."""
    return all(
        size == 1 or any(axis < x.rank and x.shape[-1 - axis] != 1 for x in branches)
        for axis, size in enumerate(reversed(condition.shape))
    ) and any(x.rank >= condition.rank for x in branches)


def _broadcast(x: Var, shape: Sequence[int]) -> Var:
    """Repeat ``x`` to a shape; sizes of both are aligned last."""
    if x.rank == 0:
        x = mb.expand_dims(x=x, axes=[0])
    sizes = [1] * (len(shape) - x.rank) + list(x.shape)
    if len(sizes) > x.rank:
        x = mb.reshape(x=x, shape=sizes)
    if sizes == list(shape):
        return x
    pairs = zip(sizes, shape, strict=True)
    return mb.tile(x=x, reps=[size if old == 1 else 1 for old, size in pairs])


def take(x: Var, axis: int, start: int = 0, stop: int | None = None, step: int = 1) -> Var:
    """``x[start:stop:step]`` along one axis; ``stop`` below zero counts from the end."""
    if (start, stop, step) == (0, None, 1):
        return x
    begin, end, stride = [0] * x.rank, [0] * x.rank, [1] * x.rank
    begin[axis], end[axis], stride[axis] = start, stop or 0, step
    is_unsliced = [n != axis for n in range(x.rank)]
    return mb.slice_by_index(
        x=x,
        begin=begin,
        end=end,
        stride=stride,
        begin_mask=is_unsliced,
        end_mask=[unsliced or stop is None for unsliced in is_unsliced],
    )


def pad(x: Var, amounts: Amounts, value: Var) -> Var:
    """``x`` with a value, of rank 0, around it; negative amounts crop.

    MIL's op pads only floats, with a constant; others are concatenated with tensors of the value,
    which is a constant for bools.
    """
    constant = constant_of(value)
    widths = [(max(before, 0), max(after, 0)) for before, after in amounts]
    first = next((axis for axis, pair in enumerate(widths) if any(pair)), None)
    if first is not None and is_float(x) and constant is not None:
        flat = [width for pair in widths[first:] for width in pair]
        x = mb.pad(x=x, pad=flat, mode="constant", constant_val=number(constant.item(), x))
    elif first is not None:
        x = _pad_by_concatenation(x, widths, value if constant is None else constant.item())
    # After the padding, because more may be removed than the tensor has.
    return _crop(x, [(max(-before, 0), max(-after, 0)) for before, after in amounts])


def _pad_by_concatenation(x: Var, widths: Amounts, value: Var) -> Var:
    for axis, (before, after) in enumerate(widths):
        if before or after:
            start, end = _borders(x, axis, (before, after), value)
            x = mb.concat(values=[*start, x, *end], axis=axis)
    return x


def _crop(x: Var, amounts: Amounts) -> Var:
    """Remove elements at the ends of axes."""
    if not any(map(any, amounts)):
        return x
    before, after = zip(*amounts, strict=True)
    return mb.slice_by_index(
        x=x,
        begin=list(before),
        end=[-width for width in after],
        begin_mask=[width == 0 for width in before],
        end_mask=[width == 0 for width in after],
    )


def _borders(x: Var, axis: int, widths: tuple[int, int], value: Any) -> Iterator[list[Var]]:
    """Yield a tensor of the value for each width, with the other sizes of ``x``, or no tensor."""
    is_variable = constant_of(value) is None
    row: Any = None
    if not _is_static(x.shape):
        shape = mb.shape(x=take(x, axis, 0, 1))
        row = mb.fill(shape=shape, value=number(0 if is_variable else value, x))
        row = mb.add(x=row, y=value) if is_variable else row
    for width in widths:
        sizes = [width if n == axis else size for n, size in enumerate(x.shape)]
        if width == 0:
            yield []
        elif row is not None:
            reps = [width if n == axis else 1 for n in range(x.rank)]
            yield [mb.tile(x=row, reps=reps) if width > 1 else row]
        elif is_variable:
            yield [_broadcast(value, sizes)]
        else:
            yield [mb.const(val=np.full(sizes, number(value, x)))]


def scan(
    x: Var,
    axis: int,
    combine: Callable[[Var, Var], Var],
    identity: Any,
    *,
    reverse: bool = False,
) -> Var:
    """Running reduction: ``x[i] <- combine(x[i - step], x[i])`` for step = 1, 2, 4, ...

    Source: Hillis and Steele, Data Parallel Algorithms (1986).

    Args:
        x: The tensor; the size of the axis is static.
        axis: The axis.
        combine: An associative and commutative function of two tensors.
        identity: ``combine(identity, x)`` is ``x``.
        reverse: Whether to start at the end of the axis.
    """
    size, step = x.shape[axis], 1
    while step < size:
        neighbours = take(x, axis, step) if reverse else take(x, axis, 0, -step)
        if is_float(x) or _is_static(x.shape):
            amounts = [(0, 0)] * x.rank
            amounts[axis] = (0, step) if reverse else (step, 0)
            x = combine(pad(neighbours, amounts, number(identity, x)), x)
        else:
            later = take(x, axis, 0, -step) if reverse else take(x, axis, step)
            combined = combine(neighbours, later)
            complete = take(x, axis, -step) if reverse else take(x, axis, 0, step)
            parts = [combined, complete] if reverse else [complete, combined]
            x = mb.concat(values=parts, axis=axis)
        step *= 2
    return x


def cumulative_product(x: Var, axis: int) -> Var:
    """``x[0] * ... * x[i]`` along an axis of static size."""
    if x.rank == 0 or x.shape[axis] == 1:
        return mb.identity(x=x)
    return scan(x, int(axis) % x.rank, lambda a, b: mb.mul(x=a, y=b), 1)


def _is_static(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int | np.integer) for size in shape)
