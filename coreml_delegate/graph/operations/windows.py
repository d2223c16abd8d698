"""Reductions of sliding windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.bodies import (
    by_kind,
    call_wide,
    combine,
    identity_element,
    is_composable,
    is_identity,
    known_kinds,
    scalar_types,
    trace_body,
)
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, cast_bool, const
from coreml_delegate.graph.emitter import Emitter, operation, same_shape
from coreml_delegate.graph.node import Closure, Node, Value, as_tuple
from coreml_delegate.graph.operations.axes import require_few_axes, reshape, spread, transpose
from coreml_delegate.graph.operations.reduction import Body, check_initial, compose_cumulative
from coreml_delegate.graph.tensor_types import ALL, Dim, DType, TensorType, product
from coreml_delegate.graph.window_sizes import SlidingWindows, each_axis, window_count
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import pad, take

# MIL pools up to three axes, beside the batch and the channels.
_POOLED_AXES = 3


def _active(windows: SlidingWindows) -> list[int]:
    """Return the axes along which the windows do not just copy the tensor."""
    axes = zip(windows.window, windows.strides, windows.padding, windows.base_dilation, strict=True)
    return [axis for axis, values in enumerate(axes) if values != (1, 1, (0, 0), 1)]


def _is_plain(windows: SlidingWindows) -> bool:
    """Whether neither the tensor nor the window is dilated, and nothing is cropped."""
    dilations = (*windows.base_dilation, *windows.window_dilation)
    return max(dilations, default=1) == 1 and min(map(min, windows.padding), default=0) >= 0


def _running_axis(windows: SlidingWindows, shape: Sequence[Dim]) -> tuple[int, bool] | None:
    """Return the axis of a cumulative reduction, and whether it is reversed; else None."""
    active = _active(windows)
    if len(active) != 1 or not _is_plain(windows):
        return None
    (axis,) = active
    reach = windows.window[axis] - 1
    if reach + 1 != shape[axis] or windows.strides[axis] != 1:
        return None
    reversals = {(reach, 0): False, (0, reach): True}
    return (axis, reversals[windows.padding[axis]]) if windows.padding[axis] in reversals else None


def _steps(windows: SlidingWindows) -> Iterator[tuple[int, int, int]]:
    """Yield the steps in which windows grow to their size n: (axis, elements so far, added).

    By the bits of n, as in exponentiation by squaring: double, and add 1 where a bit is set. This
    takes at most 2 log2(n) steps for each axis.
    """
    # With the last axis first, the elements of a window are combined in their order.
    for axis in reversed(range(len(windows.window))):
        covered = 1
        for bit in bin(windows.window[axis])[3:]:
            yield axis, covered, covered
            covered *= 2
            if bit == "1":
                yield axis, covered, 1
                covered += 1


def _grow(
    windows: SlidingWindows, tensors: list[Var], join: Callable[[list[Var], list[Var]], list[Var]]
) -> list[Var]:
    """Return padded tensors reduced over windows; ``join`` combines two parts of all windows."""
    for axis, steps in itertools.groupby(_steps(windows), key=lambda step: step[0]):
        single = tensors
        distance = windows.window_dilation[axis]
        for _, covered, added in steps:
            other = tensors if added == covered and covered > 1 else single
            tensors = join(
                [take(x, axis, 0, -added * distance) for x in tensors],
                [take(x, axis, covered * distance) for x in other],
            )
    for axis, stride in enumerate(windows.strides):
        tensors = [take(x, axis, 0, None, stride) for x in tensors]
    return tensors


def _compose_reduce_window(c: Composer, node: Node, *operands: Var) -> Any:
    count = len(node.results)
    windows: SlidingWindows = node["windows"]
    tensors, initial = list(operands[:count]), operands[count:]
    if node["kind"] is not None:
        return (_reduce_by_kind(c, node, tensors[0], initial[0]),)
    require_few_axes("reduce_window", node.types[0])
    tensors = [_pad(c, node, x, first) for x, first in zip(tensors, initial, strict=True)]
    closures = iter([node.closures[name] for name in node.closures if name != "initial"])

    def join(first: list[Var], second: list[Var]) -> list[Var]:
        return call_wide(c, next(closures), [*first, *second])

    results = _grow(windows, tensors, join)
    before = [c.broadcast(var, node.results[0].shape) for var in initial]
    return tuple(call_wide(c, node.closures["initial"], [*before, *results]))


def _pad(c: Composer, node: Node, x: Var, fill: Var) -> Var:
    windows: SlidingWindows = node["windows"]
    shape = node.types[0].shape
    if x is None:
        return c.broadcast(fill, windows.padded_shape(shape))
    x = spread(c, x, shape, windows.base_dilation, fill)
    return pad(x, windows.padding, fill)


def _reduce_by_kind(c: Composer, node: Node, x: Var, initial: Var) -> Var:
    windows: SlidingWindows = node["windows"]
    kind, dtype, shape = node["kind"], node.operands[0].dtype, node.types[0].shape
    scan = _running_axis(windows, shape)
    if node["is_identity"]:
        number = identity_element(kind, dtype)
        initial = const(np.int32(number) if dtype is DType.BOOL else number)
        if x is not None and scan is not None:
            return compose_cumulative(c, kind, node.types[0], x, *scan)
        if x is not None and len(shape) <= MOST_AXES and _can_pool(windows, kind, dtype):
            return _pool(c, windows, kind, x, shape, initial)
    require_few_axes("reduce_window", node.types[0])
    x = _pad(c, node, x, initial)

    def join(first: list[Var], second: list[Var]) -> list[Var]:
        return [combine(kind, dtype, first[0], second[0])]

    def reduce(x: Var, initial: Var) -> Var:
        (x,) = _grow(windows, [x], join)
        return x if node["is_identity"] else combine(kind, dtype, x, initial)

    return by_kind(kind, dtype, reduce, x, initial)


def _can_pool(windows: SlidingWindows, kind: str, dtype: DType) -> bool:
    return (
        dtype.is_float
        and kind in ("add", "maximum", "minimum")
        and _is_plain(windows)
        and 1 <= len(_active(windows)) <= _POOLED_AXES
    )


def _pool(
    c: Composer, windows: SlidingWindows, kind: str, x: Var, shape: Sequence[Dim], fill: Var
) -> Var:
    """Return sums or extrema of floats by a pooling op of MIL; a sum is ``mean * window size``."""
    active = _active(windows)
    other_axes = [axis for axis in range(len(shape)) if axis not in active]
    window = [windows.window[axis] for axis in active]
    pads = [windows.padding[axis] for axis in active]
    # For a device, padding has to be narrower than the window.
    if any(max(pair) >= size for pair, size in zip(pads, window, strict=True)):
        x, shape = pad(x, windows.padding, fill), windows.padded_shape(shape)
        pads = [(0, 0)] * len(pads)
    x, arranged = transpose(c, x, shape, [*other_axes, *active])
    outer, sizes = list(arranged[: len(other_axes)]), arranged[len(other_axes) :]
    channels = [1, 1, *outer][-2:] if len(outer) < 3 else [product(outer[:-1]), outer[-1]]
    x = reshape(c, x, arranged, [*channels, *sizes])
    keywords: dict[str, Any] = {
        "kernel_sizes": window,
        "strides": [windows.strides[axis] for axis in active],
        "pad_type": "custom" if any(map(any, pads)) else "valid",
        "pad": [amount for pair in pads for amount in pair],
    }
    if kind == "add":
        mean = mb.avg_pool(x=x, exclude_padding_from_average=False, **keywords)
        x = mb.mul(x=mean, y=np.array(math.prod(window), fill.val.dtype)[()])
    elif kind == "maximum":
        x = mb.max_pool(x=x, **keywords)
    else:
        negated_min = mb.max_pool(x=mb.mul(x=x, y=np.array(-1, fill.val.dtype)[()]), **keywords)
        x = mb.mul(x=negated_min, y=np.array(-1, fill.val.dtype)[()])
    counts = [
        window_count(size, reach, windows.strides[axis], pair)
        for axis, size, reach, pair in zip(active, sizes, window, pads, strict=True)
    ]
    x = reshape(c, x, [*channels, *counts], [*outer, *counts])
    order = [*other_axes, *active]
    return transpose(c, x, [*outer, *counts], [order.index(n) for n in range(len(order))])[0]


def _compose_select_and_scatter(c: Composer, node: Node, x: Var, source: Var, initial: Var) -> Var:
    result = node.type
    total = result.count
    kind, dtype = node["kind"], result.dtype
    if source is None:
        return c.broadcast(initial, result.shape)
    positions, is_everywhere = _selected_positions(c, node, x)
    slots = total if is_everywhere else total + 1
    data = c.broadcast(initial, (slots,))
    updates = c.reshape(source, (math.prod(node.types[1].static_shape),))
    modes = {"add": "add", "multiply": "mul", "maximum": "max", "minimum": "min"}
    if dtype is DType.BOOL:
        kind = "maximum" if kind in ("add", "maximum", "or") else "minimum"
    mode = modes[kind]

    def scatter(data: Var, updates: Var) -> Var:
        data = mb.scatter(data=data, indices=positions, updates=updates, axis=0, mode=mode)
        return c.reshape(take(data, 0, 0, total - slots or None), result.shape)

    return by_kind(kind, dtype, scatter, data, updates)


def _selected_positions(c: Composer, node: Node, x: Var) -> tuple[Var, bool]:
    """Return the position of each window's selected element in the flat tensor.

    Also whether every window has a selected element; without it, the position is the tensor's size.
    """
    windows: SlidingWindows = node["windows"]
    shape = node.types[0].static_shape
    grid = node.types[1].static_shape
    pitch = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    zero = const(np.zeros((), node.types[0].dtype.storage_numpy))
    if node.types[0].dtype is DType.BOOL:
        zero = const(np.int32(0))
    padded = pad(x, windows.padding, zero)
    best = offset = None
    covered = np.zeros((1,) * len(shape), bool)
    for corner in itertools.product(*map(range, windows.window)):
        inside = _inside(windows, shape, grid, corner)
        corner_offset = np.int32(np.dot(corner, pitch))
        current = padded
        for axis, (first, count, stride) in enumerate(
            zip(corner, grid, windows.strides, strict=True)
        ):
            current = take(current, axis, first, first + (count - 1) * stride + 1, stride)
        if best is None:
            best, offset = current, const(np.full(grid, corner_offset, np.int32))
        else:
            pair = [cast_bool(node.operands[0], var, "bool") for var in (best, current)]
            keep = c.call(node.closures["select"], pair)[0]
            keep = _only_where(keep, covered, inside)
            best = mb.select(cond=keep, a=best, b=current)
            offset = mb.select(cond=keep, a=offset, b=const(np.full(grid, corner_offset, np.int32)))
        covered = covered | inside
    positions = offset
    for axis, (count, stride, (low, _)) in enumerate(
        zip(grid, windows.strides, windows.padding, strict=True)
    ):
        starts = (np.arange(count, dtype=np.int32) * stride - low) * pitch[axis]
        starts_shape = [count if n == axis else 1 for n in range(len(grid))]
        if starts.any():
            positions = mb.add(x=positions, y=const(starts.astype(np.int32).reshape(starts_shape)))
    if not covered.all():
        end = const(np.full(grid, math.prod(shape), np.int32))
        positions = mb.select(cond=const(np.broadcast_to(covered, grid)), a=positions, b=end)
    return c.reshape(positions, (math.prod(grid),)), bool(covered.all())


def _inside(
    windows: SlidingWindows, shape: Sequence[int], grid: Sequence[int], corner: Sequence[int]
) -> np.ndarray[Any, Any]:
    """Return for each window whether its element at ``corner`` is not padding."""
    inside = np.ones((1,) * len(grid), bool)
    for axis, (size, count, first) in enumerate(zip(shape, grid, corner, strict=True)):
        positions = np.arange(count) * windows.strides[axis] + first - windows.padding[axis][0]
        axis_shape = [count if n == axis else 1 for n in range(len(grid))]
        inside = inside & ((positions >= 0) & (positions < size)).reshape(axis_shape)
    return inside


def _only_where(keep: Var, covered: np.ndarray[Any, Any], inside: np.ndarray[Any, Any]) -> Var:
    """Return ``(keep and covered) or not inside``."""
    grid = tuple(keep.shape)
    if not covered.all():
        keep = mb.logical_and(x=keep, y=const(np.broadcast_to(covered, grid)))
    if not inside.all():
        keep = mb.logical_or(x=keep, y=const(np.broadcast_to(~inside, grid)))
    return keep


class Windows(Emitter):
    """Reductions of sliding windows."""

    @operation(ALL, _compose_reduce_window, moves_data=True)
    def reduce_window(
        self,
        values: Value | Sequence[Value],
        initial_values: Value | Sequence[Value],
        body: Body,
        *,
        window: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: str | Sequence[tuple[int, int]] | None = None,
        base_dilation: Sequence[int] | None = None,
        window_dilation: Sequence[int] | None = None,
    ) -> Any:
        """Return the elements of each window reduced by a function.

        Args:
            values: Tensors of one shape.
            initial_values: A scalar for each tensor, combined before the first element of a window;
                padding and base dilation are filled with it.
            body: See ``reduce``.
            window: Sizes of the window, for each axis.
            strides: Steps of the window.
            padding: Elements before and after; negative amounts crop; ``"SAME"`` or ``"VALID"``.
            base_dilation: Distance of neighbours of the tensors.
            window_dilation: Distance of neighbours of the window.

        Returns:
            The result, or a tuple of results if ``values`` is a sequence.

        Raises:
            GraphError: Arguments that do not fit together, or a body that cannot be called on
                tensors.
        """
        tensors, initial = as_tuple(values), as_tuple(initial_values)
        check_initial("reduce_window", tensors, initial)
        windows = SlidingWindows.of(
            "reduce_window",
            tensors[0].shape,
            each_axis("reduce_window: window", window, tensors[0].rank),
            strides,
            padding,
            {"base_dilation": base_dilation, "window_dilation": window_dilation},
        )
        shape = windows.counts(tensors[0].shape)
        kinds = known_kinds(trace_body(self, "body of reduce_window", body, scalar_types(tensors)))
        results: tuple[Value, ...]
        if kinds and all(
            is_composable(kind, x.dtype) for kind, x in zip(kinds, tensors, strict=True)
        ):
            results = tuple(
                self.emit(
                    "reduce_window",
                    (x, first),
                    [TensorType(x.dtype, shape)],
                    windows=windows,
                    kind=kind,
                    is_identity=is_identity(kind, first),
                )[0]
                for kind, x, first in zip(kinds, tensors, initial, strict=True)
            )
        else:
            results = self.emit(
                "reduce_window",
                (*tensors, *initial),
                [TensorType(x.dtype, shape) for x in tensors],
                closures=self._wide_bodies(body, tensors, windows, shape),
                windows=windows,
                kind=None,
            )
        return results[0] if isinstance(values, Value) else results

    @operation(ALL, _compose_select_and_scatter, moves_data=True)
    def select_and_scatter(
        self,
        x: Value,
        source: Value,
        initial_value: Value,
        select: Body,
        scatter: Body,
        *,
        window: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: str | Sequence[tuple[int, int]] | None = None,
    ) -> Value:
        """Scatter each source element to the element of ``x`` that its window selects.

        Args:
            x: The tensor under the windows; its sizes are fixed.
            source: An element for each window.
            initial_value: Scalar: the start of each element of the result.
            select: Takes the element selected so far, and the next; returns whether to keep the
                first. It is elementwise.
            scatter: Sum, product, maximum or minimum of an element and a source element.
            window: Sizes of the window, for each axis.
            strides: Steps of the window.
            padding: Elements before and after, which no window selects.

        Raises:
            GraphError: Arguments that do not fit together, or another function.
        """
        name = "select_and_scatter"
        shape = x.type.static_shape
        sizes = each_axis(f"{name}: window", window, x.rank)
        undilated = {"base_dilation": None, "window_dilation": None}
        windows = SlidingWindows.of(name, shape, sizes, strides, padding, undilated)
        if any(amount < 0 for pair in windows.padding for amount in pair):
            raise GraphError(f"{name}: padding is negative", got=str(windows.padding))
        counts = windows.counts(shape)
        if not same_shape(source.shape, counts):
            raise GraphError(
                f"{name}: the source needs one element for each window",
                got=str(source.type),
                expected=str(list(counts)),
            )
        check_initial(name, (source,), (initial_value,))
        kinds = known_kinds(trace_body(self, "scatter", scatter, scalar_types([source])))
        if kinds is None or not is_composable(kinds[0], source.dtype) or kinds[0] == "xor":
            raise GraphError(
                f"{name}: Core ML cannot scatter with this function",
                expected="add, multiply, maximum or minimum; or, and of bools",
            )
        trace_body(self, "select", select, scalar_types([x]), [DType.BOOL])
        window_type = TensorType(x.dtype, source.shape)
        return self.emit(
            name,
            (x, source, initial_value),
            TensorType(source.dtype, shape),
            closures={"select": trace_body(self, "select", select, [window_type], [DType.BOOL])},
            windows=windows,
            kind=kinds[0],
        )

    def _wide_bodies(
        self, body: Body, tensors: Sequence[Value], windows: SlidingWindows, shape: Sequence[Dim]
    ) -> dict[str, Closure]:
        """Return the traced body for each step of ``_grow``, and for the initial values."""
        name = "body of reduce_window"
        if not all(isinstance(size, int) for size in shape):
            raise GraphError(
                "reduce_window: with this body, sizes have to be fixed", got=str(tensors[0].type)
            )
        closures: dict[str, Closure] = {}
        if 0 in shape:
            return closures
        sizes = list(windows.padded_shape(tensors[0].shape))
        for axis, _, added in _steps(windows):
            sizes[axis] = sizes[axis] - added * windows.window_dilation[axis]
            types = [TensorType(x.dtype, tuple(sizes)) for x in tensors]
            closures[f"step_{len(closures)}"] = trace_body(self, name, body, types)
        results = [TensorType(x.dtype, tuple(shape)) for x in tensors]
        closures["initial"] = trace_body(self, name, body, results)
        return closures
