"""Pooling.

MIL pools batched tensors of one to three spatial dimensions, without dilation, and rounds sizes up
by a rule of its own. The rewrites make the padding explicit where PyTorch differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import OpCall, ReasonCode, target_name
from coreml_delegate.ops.constraints import holds, only_result_used
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    insert,
    only_result,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import extent, per_input, per_result
from coreml_delegate.ops.quantization import AVERAGE_POOL, MOVE
from coreml_delegate.ops.record import OpRecord, Rewrite


def _known_windows(call: OpCall) -> bool:
    """The input size is known, or there is one window."""
    tensor, size = call.tensor("self"), call.arguments["output_size"]
    if tensor is None:
        return False
    spatial = tensor.shape[-len(size) :]
    return all(isinstance(n, int) or out == 1 for n, out in zip(spatial, size, strict=True))


def _few_windows(call: OpCall) -> bool:
    """Each window of an uneven division is an op of its own."""
    return sum(call.arguments["output_size"]) <= _MANY


def _fixed_windows(call: OpCall) -> bool:
    """Where windows lie does not depend on sizes that are known at run time only.

    Rounding up, PyTorch leaves a last window out that would begin beyond the input; with one as
    long as its stride and the padding, that never happens.
    """
    spatial = _spatial(call)
    if spatial is None or all(isinstance(n, int) for n in spatial):
        return True
    if any(d != 1 for d in _each(call, "dilation", spatial)):
        return False
    rows = zip(spatial, *(_each(call, name, spatial) for name in _WINDOW), strict=True)
    return not call.arguments["ceil_mode"] or all(
        isinstance(n, int) or s == 1 or k >= s + p for n, k, s, p in rows
    )


def _rounds_down(call: OpCall) -> bool:
    """Sizes are known, or no window reaches beyond the input and its padding."""
    spatial = _spatial(call)
    known = spatial is None or all(isinstance(n, int) for n in spatial)
    return known or not call.arguments["ceil_mode"]


def _spatial(call: OpCall) -> list[Any] | None:
    """Sizes of the dimensions that are pooled."""
    tensor, dims = call.tensor("self"), int(target_name(call.node.target).partition("pool")[2][0])
    return None if tensor is None else list(tensor.shape[-dims:])


def _each(call: OpCall, name: str, spatial: list[Any]) -> list[int]:
    """An argument of windows, a number per dimension."""
    value = call.arguments.get(name, 1)
    if name == "stride" and not value:
        value = call.arguments["kernel_size"]
    listed = [value] if isinstance(value, int) else list(value)
    return listed * len(spatial) if len(listed) == 1 else listed


def _few_holes(call: OpCall) -> bool:
    """A dilated window is taken apart into one op per element of each side."""
    dilation, kernel = ([v] if isinstance(v, int) else v for v in _holes(call))
    return all(d == 1 for d in dilation) or sum(kernel) <= _MANY


def _holes(call: OpCall) -> tuple[int | list[int], int | list[int]]:
    return call.arguments["dilation"], call.arguments["kernel_size"]


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a pooling call, a number per spatial dimension.

    Attributes:
        kernel: Sizes.
        stride: Steps.
        padding: At either end.
        dilation: Steps inside a window.
        ceil: Whether sizes are rounded up.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any], dims: int) -> _Windows:
        """Read them from a call; one number stands for all, no stride for the kernel."""
        kernel = arguments["kernel_size"]
        given = (kernel, arguments["stride"] or kernel, arguments["padding"])
        spread = [_spread(values, dims) for values in (*given, arguments.get("dilation", 1))]
        return cls(*spread, ceil=bool(arguments["ceil_mode"]))

    @property
    def spans(self) -> list[int]:
        """Extents of a window, its holes included."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """How many windows PyTorch places along each dimension of an input of these sizes."""
        found: list[int] = []
        for n, k, s, p in zip(sizes, self.spans, self.stride, self.padding, strict=True):
            steps = n + 2 * p - k
            count = (-(-steps // s) if self.ceil else steps // s) + 1
            # A window that would begin beyond the input and its padding at the start is left out.
            found.append(count - 1 if self.ceil and (count - 1) * s >= n + p else count)
        return found

    def end_padding(self, sizes: Sequence[int]) -> list[int]:
        """Padding at the end that makes the last window fit, 0 or more; sizes are known."""
        rows = zip(sizes, self.counts(sizes), self.spans, self.stride, self.padding, strict=True)
        return [max(0, (c - 1) * s + k - n - p) for n, c, k, s, p in rows]

    def ceil_padding(self, sizes: Sequence[Any]) -> list[int]:
        """Padding at the end that gives as many windows as rounding up, whatever the size.

        The constraints leave no call in which a window then begins beyond the input.
        """
        rows = zip(sizes, self.spans, self.stride, self.padding, strict=True)
        return [
            _Windows([k], [s], [p], [1], ceil=True).end_padding([n])[0]
            if isinstance(n, int)
            else p + s - 1
            for n, k, s, p in rows
        ]


def _spread(values: int | list[int], dims: int) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * dims if len(listed) == 1 else listed


def _batch(node: Node, dims: int) -> Node:
    """The input of a call with its batch dimension."""
    source: Node = arguments_of(node)["self"]
    if value_of(source).dim() == dims + 2:
        return source
    return insert(node, ATEN.unsqueeze_copy.default, source, 0)


def _finish(node: Node, source: Node, dims: int, target: Any, *args: Any) -> None:
    """Turn ``node`` into the last call, without the batch dimension if it had none."""
    if value_of(source).dim() == dims + 2:
        become(node, target, *args)
    else:
        become(node, ATEN.squeeze_copy.dims, insert(node, target, *args), [0])


def _sides(start: Sequence[int], end: Sequence[int]) -> list[int]:
    """Padding as ``constant_pad_nd`` takes it, the last dimension first."""
    pairs = zip(reversed(start), reversed(end), strict=True)
    return [side for pair in pairs for side in pair]


def _needs_end(windows: _Windows, sizes: Sequence[Any]) -> bool:
    """Whether padding that is alike at both ends gives other windows than PyTorch places."""
    return windows.ceil and any(
        e > p for e, p in zip(windows.ceil_padding(sizes), windows.padding, strict=True)
    )


def _max_pool(dims: int) -> Rewrite:
    pool = _MAX_POOLS[dims - 1]

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        source = arguments["self"]
        windows = _Windows.of(arguments, dims)
        batched = _batch(node, dims)
        if max(windows.dilation) > 1:
            _become_dilated(node, source, batched, windows, dims)
            return
        padding = list(windows.padding)
        if windows.ceil and _needs_end(windows, shape_of(batched)[2:]):
            end = windows.ceil_padding(shape_of(batched)[2:])
            sides = _sides(padding, end)
            batched = insert(node, ATEN.constant_pad_nd.default, batched, sides, -math.inf)
            padding = [0] * dims
        _finish(node, source, dims, pool, batched, windows.kernel, windows.stride, padding)

    return rewrite


def _become_dilated(node: Node, source: Node, batched: Node, windows: _Windows, dims: int) -> None:
    """The largest of shifted, strided slices, one dimension after another."""
    sizes = shape_of(batched)[2:]
    sides = _sides(windows.padding, windows.end_padding(sizes))
    largest = batched
    if any(sides):
        largest = insert(node, ATEN.constant_pad_nd.default, batched, sides, -math.inf)
    for d, count in enumerate(windows.counts(sizes)):
        step, hole = windows.stride[d], windows.dilation[d]
        reach = (count - 1) * step + 1
        whole = largest
        for k in range(windows.kernel[d]):
            bounds = (d + 2, k * hole, k * hole + reach, step)
            part = insert(node, ATEN.slice_copy.Tensor, whole, *bounds)
            largest = part if k == 0 else insert(node, ATEN.maximum.default, largest, part)
    _finish(node, source, dims, ATEN.clone.default, largest)


def _first_result(pool: Rewrite, target: Any) -> Rewrite:
    """The pooled tensor alone; a constraint leaves no call whose indices are used."""

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        result = only_result(node)
        become(result, target, *(arguments[n] for n in _MAX_NAMES))
        pool(result)

    return rewrite


def _avg_pool(dims: int) -> Rewrite:
    pool = _AVG_POOLS[dims - 1]

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        source, windows = arguments["self"], _Windows.of(arguments, dims)
        divisor = arguments.get("divisor_override")
        include = arguments["count_include_pad"] or not any(windows.padding)
        batched = _batch(node, dims)
        shape = (windows.kernel, windows.stride)
        if windows.ceil and _needs_end(windows, shape_of(batched)[2:]):
            _become_mean(node, pool, batched, windows, include=include, divisor=divisor)
        elif divisor is not None:
            # The divisor counts padding in whatever the argument says.
            mean = insert(node, pool, batched, *shape, windows.padding, False, True)
            factor = math.prod(windows.kernel) / divisor
            _finish(node, source, dims, ATEN.mul.Scalar, mean, factor)
        else:
            options = (windows.padding, False, include)
            _finish(node, source, dims, pool, batched, *shape, *options)

    return rewrite


def _become_mean(
    node: Node, pool: Any, batched: Node, windows: _Windows, *, include: bool, divisor: int | None
) -> None:
    """Means over windows that reach beyond the input: sums divided by how many elements count.

    Both are averages over whole windows of padded tensors, so the size of the window cancels out.
    """
    source: Node = arguments_of(node)["self"]
    dims = len(windows.kernel)
    sizes = shape_of(batched)[2:]
    # As much as is asked for places no further window, where rounding up needs less.
    end = [max(e, p) for e, p in zip(windows.end_padding(sizes), windows.padding, strict=True)]
    padded = insert(node, ATEN.constant_pad_nd.default, batched, _sides(windows.padding, end), 0.0)
    shape = (windows.kernel, windows.stride, [0] * dims, False, True)
    total = insert(node, pool, padded, *shape)
    if divisor is not None:
        factor = math.prod(windows.kernel) / divisor
        _finish(node, source, dims, ATEN.mul.Scalar, total, factor)
        return
    # Padding counts as far as it was asked for; what rounding up adds never does.
    counting = [p if include else 0 for p in windows.padding]
    ones_sizes = [n + 2 * c for n, c in zip(sizes, counting, strict=True)]
    ends = zip(end, counting, strict=True)
    rest = _sides(
        [p - c for p, c in zip(windows.padding, counting, strict=True)], [e - c for e, c in ends]
    )
    dtype = value_of(batched).dtype
    ones = insert(node, ATEN.full.default, [1, 1, *ones_sizes], 1.0, dtype=dtype)
    counted = insert(node, ATEN.constant_pad_nd.default, ones, rest, 0.0) if any(rest) else ones
    count = insert(node, pool, counted, *shape)
    _finish(node, source, dims, ATEN.div.Tensor, total, count)


def _adaptive(reduction: Any) -> Rewrite:
    """Reduce each window; windows of one dimension after another, as both reductions allow."""

    def rewrite(call: Node) -> None:
        arguments = arguments_of(call)
        node = only_result(call)
        x, counts = arguments["self"], arguments["output_size"]
        listed = [counts] if isinstance(counts, int) else list(counts)
        first = value_of(x).dim() - len(listed)
        for d, count in enumerate(listed, start=first):
            x = _adapt(node, reduction, x, d, count)
        become(node, ATEN.clone.default, x)

    return rewrite


def _adapt(node: Node, reduction: Any, x: Node, dim: int, count: int) -> Node:
    size = shape_of(x)[dim]
    if count == 1:
        return insert(node, reduction, x, [dim], True)
    if not isinstance(size, int):
        return _means(node, x, dim, count)
    if size == count:
        return x
    # PyTorch's windows: from floor(i * size / count) to ceil((i + 1) * size / count).
    bounds = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    parts = [
        insert(node, reduction, insert(node, ATEN.slice_copy.Tensor, x, dim, *window), [dim], True)
        for window in bounds
    ]
    return insert(node, ATEN.cat.default, parts, dim)


def _means(node: Node, x: Node, dim: int, count: int) -> Node:
    """Means over windows of a dimension whose size is known at run time only.

    A product with a matrix, made of the size, that has a row of weights for each window.
    """
    dims = value_of(x).dim()
    line = x
    for other in (d for d in range(dims) if d != dim):
        line = insert(node, ATEN.slice_copy.Tensor, line, other, 0, 1)
    line = insert(node, ATEN.view_copy.default, line, [-1])
    ones = insert(node, ATEN.full_like.default, line, 1.0)
    ones = insert(node, ATEN._to_copy.default, ones, dtype=torch.int32)
    # In integers, which do not round: element p, counted from 1, is in window i if p * count is
    # more than i * size, and (p - 1) * count less than (i + 1) * size.
    size = insert(node, ATEN.sum.dim_IntList, ones, [0], True, dtype=torch.int32)
    places = insert(node, ATEN.cumsum.default, ones, 0, dtype=torch.int32)
    ends_of_places = insert(node, ATEN.mul.Scalar, places, count)
    starts_of_places = insert(node, ATEN.sub.Scalar, ends_of_places, count)
    windows = insert(node, ATEN.arange.start_step, 0, count, 1, dtype=torch.int32)
    windows = insert(node, ATEN.view_copy.default, windows, [count, 1])
    starts = insert(node, ATEN.mul.Tensor, windows, size)
    ends = insert(node, ATEN.add.Tensor, starts, size)
    inside = insert(
        node,
        ATEN.logical_and.default,
        insert(node, ATEN.gt.Tensor, ends_of_places, starts),
        insert(node, ATEN.lt.Tensor, starts_of_places, ends),
    )
    weights = insert(node, ATEN._to_copy.default, inside, dtype=value_of(x).dtype)
    total = insert(node, ATEN.sum.dim_IntList, weights, [1], True)
    weights = insert(node, ATEN.div.Tensor, weights, total)
    columns = insert(node, ATEN.permute_copy.default, weights, [1, 0])
    order = [*(d for d in range(dims) if d != dim), dim]
    last = insert(node, ATEN.permute_copy.default, x, order)
    result = insert(node, ATEN.matmul.default, last, columns)
    return insert(node, ATEN.permute_copy.default, result, [order.index(d) for d in range(dims)])


def _dynamic_means(call: Node) -> None:
    """Means over windows where coremltools wants to know the sizes; it does the others itself."""
    arguments = arguments_of(call)
    counts: list[int] = list(_spread(arguments["output_size"], 1))
    spatial = shape_of(arguments["self"])[-len(counts) :]
    if any(not isinstance(n, int) and c != 1 for n, c in zip(spatial, counts, strict=True)):
        _adaptive(ATEN.mean.dim)(call)


def _window_flops(call: OpCall) -> int:
    kernel = call.arguments.get("kernel_size")
    sizes = kernel if isinstance(kernel, list | tuple) else [kernel]
    if not sizes or not all(isinstance(size, int | torch.SymInt) for size in sizes):
        return per_input(1)(call)
    window = math.prod(extent(size) for size in sizes)
    # One size stands for all dimensions; their number is in the op's name.
    dimensions = int(_POOLED.sub(r"\1", target_name(call.node.target))) if len(sizes) == 1 else 1
    return per_result(1)(call) * window**dimensions


_POOLED = re.compile(r".*_pool(\d)d.*")
_WINDOW = ("kernel_size", "stride", "padding")
_MAX_NAMES = ("self", *_WINDOW, "dilation", "ceil_mode")
_MAX_POOLS: Any = (ATEN.max_pool1d.default, ATEN.max_pool2d.default, ATEN.max_pool3d.default)
_AVG_POOLS: Any = (ATEN.avg_pool1d.default, ATEN.avg_pool2d.default, ATEN.avg_pool3d.default)
_MANY = 64
_WINDOWS = holds(_known_windows, ReasonCode.SYMBOLIC, "the input size is dynamic")
_FEW_WINDOWS = holds(
    _few_windows, ReasonCode.ARGUMENT, f"more than {_MANY} windows along the dimensions, an op each"
)
_FEW_HOLES = holds(
    _few_holes, ReasonCode.ARGUMENT, f"a dilated window has more than {_MANY} elements, an op each"
)
_PLACED = holds(
    _fixed_windows, ReasonCode.SYMBOLIC, "where windows lie depends on a size that is dynamic"
)
_ROUNDED = holds(
    _rounds_down, ReasonCode.SYMBOLIC, "how many elements a window has depends on a dynamic size"
)

_op = partial(OpRecord, flops=_window_flops)
_adaptive_op = partial(OpRecord, flops=per_input(1))

RECORDS = (
    # Exporting it fixes every size.
    _op(
        "aten.max_pool1d.default",
        constraints=(_FEW_HOLES,),
        rewrite=_max_pool(1),
        quantization=MOVE,
    ),
    *(
        _op(
            f"aten.max_pool{dims}d.default",
            constraints=(_PLACED, _FEW_HOLES),
            rewrite=_max_pool(dims),
            quantization=MOVE,
        )
        for dims in (2, 3)
    ),
    *(
        _op(
            f"aten.max_pool{dims}d_with_indices.default",
            constraints=(only_result_used(0), _PLACED, _FEW_HOLES),
            rewrite=_first_result(_max_pool(dims), _MAX_POOLS[dims - 1]),
        )
        for dims in (2, 3)
    ),
    *(
        _op(
            f"aten.avg_pool{dims}d.default",
            constraints=(_ROUNDED,),
            rewrite=_avg_pool(dims),
            quantization=AVERAGE_POOL,
        )
        for dims in (1, 2, 3)
    ),
    *(
        _adaptive_op(f"aten.{name}.default", rewrite=_dynamic_means, quantization=AVERAGE_POOL)
        for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d")
    ),
    _adaptive_op("aten._adaptive_avg_pool2d.default", rewrite=_dynamic_means),
    _adaptive_op(
        "aten.adaptive_avg_pool3d.default",
        constraints=(_FEW_WINDOWS,),
        rewrite=_adaptive(ATEN.mean.dim),
        quantization=AVERAGE_POOL,
    ),
    _adaptive_op(
        "aten._adaptive_avg_pool3d.default",
        constraints=(_FEW_WINDOWS,),
        rewrite=_adaptive(ATEN.mean.dim),
    ),
    *(
        _adaptive_op(
            f"aten.adaptive_max_pool{dims}d.default",
            constraints=(only_result_used(0), _WINDOWS, _FEW_WINDOWS),
            rewrite=_adaptive(ATEN.amax.default),
        )
        for dims in (2, 3)
    ),
)
