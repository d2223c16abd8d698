"""Slices, updates of slices, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, join
from coreml_delegate.graph.emitter import Emitter, operation, require_same_dtype, same_size
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.axes import (
    Axes,
    as_index,
    counting,
    require_rank,
    sizes_of,
    spread,
)
from coreml_delegate.graph.operations.shapes import known_sizes
from coreml_delegate.graph.sizes import known_elements
from coreml_delegate.graph.tensor_types import ALL, Dim, TensorType, simplify
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import pad
from coreml_delegate.targets import Opset


def _compose_slice(c: Composer, node: Node, x: Var) -> Var:
    shape = node.types[0].shape
    start, limit, strides = node["start"], node["limit"], node["strides"]
    is_full = [
        low == 0 and step == 1 and same_size(high, size)
        for low, high, step, size in zip(start, limit, strides, shape, strict=True)
    ]
    if all(is_full):
        return x
    axes = Axes.of([flag or None for flag in is_full])
    masks = axes.pick(is_full)
    steps = axes.pick(strides)
    x = mb.slice_by_index(
        x=axes.merge(c, x, shape),
        begin=c.shape(axes.pick(start)),
        end=c.shape([0 if m else high for m, high in zip(masks, axes.pick(limit), strict=True)]),
        stride=steps if any(step != 1 for step in steps) else None,
        begin_mask=masks,
        end_mask=masks,
    )
    return axes.split(c, x, node.type.shape)


def _compose_dynamic_slice(c: Composer, node: Node, x: Var, *starts: Var) -> Var:
    shape, sizes = node.types[0].shape, node.type.shape
    axes, begin = _region(c, node, shape, sizes, 1, starts)
    if begin is None:
        return x
    return axes.split(
        c, slice_at(c, axes.merge(c, x, shape), begin, axes.shape(shape), axes.shape(sizes)), sizes
    )


def _compose_dynamic_update_slice(
    c: Composer, node: Node, x: Var, update: Var | None, *starts: Var
) -> Var:
    if update is None:
        return x
    shape, sizes = node.type.shape, node.types[1].shape
    axes, begin = _region(c, node, shape, sizes, 2, starts)
    if begin is None:
        return update
    x, update = axes.merge(c, x, shape), axes.merge(c, update, sizes)
    x = write_slice(c, x, update, begin, axes.shape(shape), axes.shape(sizes))
    return axes.split(c, x, shape)


def _region(
    c: Composer,
    node: Node,
    shape: Sequence[Dim],
    sizes: Sequence[Dim],
    first_start: int,
    starts: Sequence[Var],
) -> tuple[Axes, Var | None]:
    """Return axes, and the clamped start indices of a region; None if it is the whole tensor."""
    is_full = [same_size(size, have) for size, have in zip(sizes, shape, strict=True)]
    axes = Axes.of([flag or None for flag in is_full])
    if all(is_full):
        return axes, None
    parts = [
        0 if full else as_index(start, type.dtype)
        for full, start, type in zip(is_full, starts, node.types[first_start:], strict=True)
    ]
    limits = [
        0 if full else simplify(have - size)
        for full, have, size in zip(is_full, shape, sizes, strict=True)
    ]
    start = mb.maximum(x=join(axes.pick(parts)), y=np.int32(0))
    return axes, mb.minimum(x=start, y=c.vector(axes.pick(limits)))


def slice_at(c: Composer, x: Var, begin: Var, shape: Sequence[Dim], sizes: Sequence[Dim]) -> Var:
    """Return the region of ``sizes`` at ``begin``, an index vector in range."""
    counts = [
        -1 if same_size(size, have) and not isinstance(size, int) else size
        for size, have in zip(sizes, shape, strict=True)
    ]
    return mb.slice_by_size(x=x, begin=begin, size=c.shape(counts))


def write_slice(
    c: Composer, x: Var, update: Var, begin: Var, shape: Sequence[Dim], sizes: Sequence[Dim]
) -> Var:
    """Return ``x`` with the region at ``begin``, an index vector in range, replaced."""
    is_full = [same_size(size, have) for size, have in zip(sizes, shape, strict=True)]
    if c.opset >= Opset.iOS18:
        span = c.vector([0 if w else size for w, size in zip(is_full, sizes, strict=True)])
        end = mb.add(x=begin, y=span)
        return mb.slice_update(
            x=x, update=update, begin=begin, end=end, begin_mask=is_full, end_mask=is_full
        )
    return _write_axes(c, x, update, begin, sizes, [n for n, w in enumerate(is_full) if not w])


def _write_axes(
    c: Composer, x: Var, update: Var, begin: Var, sizes: Sequence[Dim], axes: Sequence[int]
) -> Var:
    """Replace a region by a scatter for each axis, on the slices that earlier axes select."""
    axis, *inner_axes = axes
    start = mb.gather(x=begin, indices=np.int32(axis), axis=0)
    positions = mb.add(x=counting(c, sizes[axis]), y=start)
    if inner_axes:
        inner = mb.gather(x=x, indices=positions, axis=axis)
        update = _write_axes(c, inner, update, begin, sizes, inner_axes)
    return mb.scatter(data=x, indices=positions, updates=update, axis=axis, mode="update")


def _compose_pad(c: Composer, node: Node, x: Var | None, value: Var) -> Var:
    if x is None:
        return c.broadcast(value, node.type.shape)
    low, high, interior = node["low"], node["high"], node["interior"]
    kinds = [any(amounts) for amounts in zip(low, high, interior, strict=True)]
    if not any(kinds):
        return x
    axes = Axes.of([None if kind else 0 for kind in kinds])
    x = axes.merge(c, x, node.types[0].shape)
    factors = [count + 1 for count in axes.pick(interior)]
    x = spread(c, x, axes.shape(node.types[0].shape), factors, value)
    x = pad(x, list(zip(axes.pick(low), axes.pick(high), strict=True)), value)
    return axes.split(c, x, node.type.shape)


class Slicing(Emitter):
    """Slices, updates of slices, and padding."""

    @operation(ALL, _compose_slice, moves_data=True)
    def slice(
        self,
        x: Value,
        start: Sequence[Dim],
        limit: Sequence[Dim],
        strides: Sequence[int] | None = None,
    ) -> Value:
        """Return ``x[start:limit:strides]`` along each dimension."""
        steps = (1,) * x.rank if strides is None else strides
        for what, entries in (("starts", start), ("limits", limit), ("strides", steps)):
            require_rank("slice", what, entries, x.rank)
        first, last = sizes_of("slice", start), sizes_of("slice", limit)
        step = _numbers("slice", "strides", sizes_of("slice", steps, 1))
        for low, high, size in zip(first, last, x.shape, strict=True):
            if _exceeds(low, high) or _exceeds(high, size):
                raise GraphError(
                    "slice: a range is not within its dimension",
                    got=f"{low} to {high}",
                    expected=f"0 <= start <= limit <= {size}",
                )
        shape = [
            _step_count(high - low, step) for low, high, step in zip(first, last, step, strict=True)
        ]
        elements = None
        if x.type.is_static and x.elements is not None:
            index = tuple(map(slice, first, last, step))
            elements = known_elements(lambda array: array[index], x)
        return self.emit(
            "slice",
            (x,),
            x.type.with_shape(shape),
            start=first,
            limit=last,
            strides=step,
            elements=elements,
        )

    @operation(ALL, _compose_dynamic_slice, moves_data=True)
    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Sequence[Dim]) -> Value:
        """Return the region of ``sizes`` at ``starts``; starts are clamped so that it fits.

        Args:
            x: Any tensor.
            starts: A scalar integer for each dimension.
            sizes: Shape of the result.
        """
        counts = sizes_of("dynamic_slice", sizes)
        require_rank("dynamic_slice", "sizes", counts, x.rank)
        _check_region("dynamic_slice", x, counts, starts)
        fixed = _fixed_starts(x, starts, counts)
        if fixed is not None:
            limit = [low + size for low, size in zip(fixed, counts, strict=True)]
            return self.slice(x, fixed, limit)
        return self.emit("dynamic_slice", (x, *starts), x.type.with_shape(counts))

    @operation(ALL, _compose_dynamic_update_slice, moves_data=True)
    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """Return ``x`` with the region at ``starts`` replaced; starts are clamped so that it fits.

        Args:
            x: Any tensor.
            update: Tensor of the same rank, no larger.
            starts: A scalar integer for each dimension.
        """
        name = "dynamic_update_slice"
        require_same_dtype(name, x, update)
        require_rank(name, "dimensions of the update", update.shape, x.rank)
        _check_region(name, x, update.shape, starts)
        return self.emit(name, (x, update, *starts), x.type)

    @operation(ALL, _compose_pad, moves_data=True)
    def pad(
        self,
        x: Value,
        value: Value,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int] | None = None,
    ) -> Value:
        """Return ``x`` padded at the ends of dimensions and between elements.

        Args:
            x: Any tensor.
            value: Scalar to pad with.
            low: Number of elements added at the start of each dimension; negative numbers crop.
            high: Number of elements added at the end of each dimension; negative numbers crop.
            interior: Number of elements added between neighbours, before any crop.
        """
        name = "pad"
        require_same_dtype(name, x, value)
        if value.rank:
            raise GraphError(f"{name}: the value is not of rank 0", got=str(value.type))
        interior_amounts = (0,) * x.rank if interior is None else interior
        lists: list[tuple[int, ...]] = []
        for what, amounts in (("low", low), ("high", high), ("interior", interior_amounts)):
            require_rank(name, f"sizes in {what!r}", amounts, x.rank)
            least = 0 if what == "interior" else -(2**31)
            lists.append(_numbers(name, what, sizes_of(name, amounts, least)))
        shape: list[Dim] = []
        for size, before, after, gap in zip(x.shape, *lists, strict=True):
            gaps: Any = gap * max(size - 1, 0) if isinstance(size, int) else gap * (size - 1)
            shape.append(simplify(size + gaps + before + after))
        if any(isinstance(size, int) and size < 0 for size in shape):
            raise GraphError(
                f"{name}: more is removed than there is",
                got=f"{x.type}, low {list(lists[0])}, high {list(lists[1])}",
            )
        type = x.type.with_shape(shape)
        return self.emit(name, (x, value), type, low=lists[0], high=lists[1], interior=lists[2])

    @operation(ALL)
    def dynamic_pad(
        self, x: Value, value: Value, low: Value, high: Value, interior: Value
    ) -> Value:
        """Return ``pad`` with vectors of integers as amounts; see ``dynamic_reshape``."""
        sizes = [known_sizes("dynamic_pad", amounts) for amounts in (low, high, interior)]
        return self.pad(x, value, *(_numbers("dynamic_pad", "sizes", amounts) for amounts in sizes))

    @operation(ALL)
    def real_dynamic_slice(self, x: Value, start: Value, limit: Value, strides: Value) -> Value:
        """Return ``slice`` with vectors of integers as bounds; see ``dynamic_reshape``."""
        name = "real_dynamic_slice"
        first, last, step = (known_sizes(name, bounds) for bounds in (start, limit, strides))
        return self.slice(x, first, last, _numbers(name, "strides", step))


def _check_region(name: str, x: Value, sizes: Sequence[Dim], starts: Sequence[Value]) -> None:
    require_rank(name, "starts", starts, x.rank)
    for start in starts:
        if start.rank or not start.dtype.is_integer:
            raise GraphError(
                f"{name}: a start is not an integer of rank 0",
                got=str(start.type),
                expected="int32[]",
            )
    for size, have in zip(sizes, x.shape, strict=True):
        if _exceeds(size, have):
            raise GraphError(
                f"{name}: the region is larger than the tensor",
                got=str(TensorType(x.dtype, tuple(sizes))),
                expected=f"within {x.type}",
            )


def _fixed_starts(x: Value, starts: Sequence[Value], sizes: Sequence[Dim]) -> list[int] | None:
    """Return the clamped starts if all are constants, else None."""
    clamped: list[int] = []
    for start, size, have in zip(starts, sizes, x.shape, strict=True):
        if same_size(size, have):
            clamped.append(0)
            continue
        limit = simplify(have - size)
        (index,) = start.elements or (None,)
        if not isinstance(index, int) or not isinstance(limit, int):
            return None
        if start.dtype.is_unsigned and index < 0:
            index = limit  # stored as the bits of an int32
        clamped.append(min(max(index, 0), limit))
    return clamped


def _step_count(length: Any, stride: int) -> Dim:
    if isinstance(length, int):
        return -(-length // stride)
    return simplify(length) if stride == 1 else sympy.floor((length + stride - 1) / stride)


def _exceeds(size: Dim, limit: Dim) -> bool:
    """Whether a size is known to be larger than ``limit``."""
    difference = simplify(limit - size)
    return difference < 0 if isinstance(difference, int) else difference.is_negative is True


def _numbers(name: str, what: str, sizes: Sequence[Dim]) -> tuple[int, ...]:
    numbers = tuple(size for size in sizes if isinstance(size, int))
    if len(numbers) != len(sizes):
        raise GraphError(f"{name}: {what} have to be numbers", got=str(list(map(str, sizes))))
    return numbers
