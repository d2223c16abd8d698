"""Pooling.

MIL pools batched tensors of one to three spatial dimensions, without dilation, and its
``ceil_mode`` differs from PyTorch's. The rewrites make the padding explicit where it does.
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

from coreml_delegate.ops.call import OpCall, ReasonCode, per_dim, target_name
from coreml_delegate.ops.constraints import holds, only_first_result_used
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


def _has_static_size(call: OpCall) -> bool:
    """The input size is static, or there is only one window."""
    tensor, size = call.tensor("self"), call.arguments["output_size"]
    if tensor is None:
        return False
    spatial = tensor.shape[-len(size) :]
    return all(isinstance(n, int) or out == 1 for n, out in zip(spatial, size, strict=True))


def _few_windows(call: OpCall) -> bool:
    """There are few windows: each becomes an op if the division is uneven."""
    return sum(call.arguments["output_size"]) <= _MAX_OPS


def _has_static_windows(call: OpCall) -> bool:
    """The positions of windows do not depend on dynamic sizes.

    With ``ceil_mode``, PyTorch drops a last window that would start beyond the input; it never does
    if ``kernel >= stride + padding``.
    """
    spatial = _pooled_sizes(call)
    if spatial is None or all(isinstance(n, int) for n in spatial):
        return True
    if any(d != 1 for d in _window_argument(call, "dilation", spatial)):
        return False
    rows = zip(spatial, *(_window_argument(call, name, spatial) for name in _WINDOW), strict=True)
    return not call.arguments["ceil_mode"] or all(
        isinstance(n, int) or s == 1 or k >= s + p for n, k, s, p in rows
    )


def _rounds_down(call: OpCall) -> bool:
    """Sizes are static, or no window reaches beyond the padded input."""
    spatial = _pooled_sizes(call)
    is_static = spatial is None or all(isinstance(n, int) for n in spatial)
    return is_static or not call.arguments["ceil_mode"]


def _pooled_sizes(call: OpCall) -> list[Any] | None:
    """Return the sizes of the pooled dimensions."""
    tensor, dims = call.tensor("self"), int(target_name(call.node.target).partition("pool")[2][0])
    return None if tensor is None else list(tensor.shape[-dims:])


def _window_argument(call: OpCall, name: str, spatial: list[Any]) -> list[int]:
    """Return an argument of the windows as a number per dimension."""
    value = call.arguments.get(name, 1)
    if name == "stride" and not value:
        value = call.arguments["kernel_size"]
    return per_dim(value, len(spatial))


def _few_elements(call: OpCall) -> bool:
    """A dilated window has few elements: each element of a side becomes an op."""
    options = (call.arguments[name] for name in ("dilation", "kernel_size"))
    dilation, kernel = ([v] if isinstance(v, int) else v for v in options)
    return all(d == 1 for d in dilation) or sum(kernel) <= _MAX_OPS


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a pooling call, a number per spatial dimension.

    Attributes:
        kernel: Sizes.
        stride: Steps.
        padding: At each end.
        dilation: Steps inside a window.
        ceil: Whether output sizes are rounded up.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any], dims: int) -> _Windows:
        """Read the windows of a call; a missing stride is the kernel."""
        kernel = arguments["kernel_size"]
        options = (kernel, arguments["stride"] or kernel, arguments["padding"])
        rows = [per_dim(values, dims) for values in (*options, arguments.get("dilation", 1))]
        return cls(*rows, ceil=bool(arguments["ceil_mode"]))

    @property
    def spans(self) -> list[int]:
        """Extents of a window, dilation included."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return PyTorch's number of windows per dimension, for an input of these sizes."""
        counts: list[int] = []
        for n, k, s, p in zip(sizes, self.spans, self.stride, self.padding, strict=True):
            steps = n + 2 * p - k
            count = (-(-steps // s) if self.ceil else steps // s) + 1
            # PyTorch drops a window that would start beyond the input.
            counts.append(count - 1 if self.ceil and (count - 1) * s >= n + p else count)
        return counts

    def end_padding(self, sizes: Sequence[int]) -> list[int]:
        """Return the padding at the end that the last window needs; sizes are static."""
        rows = zip(sizes, self.counts(sizes), self.spans, self.stride, self.padding, strict=True)
        return [max(0, (c - 1) * s + k - n - p) for n, c, k, s, p in rows]

    def ceil_padding(self, sizes: Sequence[Any]) -> list[int]:
        """Return the padding at the end that rounds the number of windows up, for any size.

        The constraints refuse calls in which a window would start beyond the input.
        """
        rows = zip(sizes, self.spans, self.stride, self.padding, strict=True)
        return [
            _Windows([k], [s], [p], [1], ceil=True).end_padding([n])[0]
            if isinstance(n, int)
            else p + s - 1
            for n, k, s, p in rows
        ]


def _batch(node: Node, dims: int) -> Node:
    """Return the input of a call with a batch dimension."""
    source: Node = arguments_of(node)["self"]
    if value_of(source).dim() == dims + 2:
        return source
    return insert(node, ATEN.unsqueeze_copy.default, source, 0)


def _finish(node: Node, source: Node, dims: int, target: Any, *args: Any) -> None:
    """Turn ``node`` into the last call; squeeze the batch dimension if ``source`` has no batch."""
    if value_of(source).dim() == dims + 2:
        become(node, target, *args)
    else:
        become(node, ATEN.squeeze_copy.dims, insert(node, target, *args), [0])


def _sides(start: Sequence[int], end: Sequence[int]) -> list[int]:
    """Return the padding for ``constant_pad_nd``, last dimension first."""
    pairs = zip(reversed(start), reversed(end), strict=True)
    return [side for pair in pairs for side in pair]


def _needs_end_padding(windows: _Windows, sizes: Sequence[Any]) -> bool:
    """Whether the windows need more padding at the end than at the start."""
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
            _become_dilated_max(node, source, batched, windows, dims)
            return
        padding = list(windows.padding)
        if windows.ceil and _needs_end_padding(windows, shape_of(batched)[2:]):
            end = windows.ceil_padding(shape_of(batched)[2:])
            sides = _sides(padding, end)
            batched = insert(node, ATEN.constant_pad_nd.default, batched, sides, -math.inf)
            padding = [0] * dims
        _finish(node, source, dims, pool, batched, windows.kernel, windows.stride, padding)

    return rewrite


def _become_dilated_max(
    node: Node, source: Node, batched: Node, windows: _Windows, dims: int
) -> None:
    """Maximum of shifted, strided slices, one dimension after another."""
    sizes = shape_of(batched)[2:]
    sides = _sides(windows.padding, windows.end_padding(sizes))
    largest = batched
    if any(sides):
        largest = insert(node, ATEN.constant_pad_nd.default, batched, sides, -math.inf)
    for d, count in enumerate(windows.counts(sizes)):
        step, dilation = windows.stride[d], windows.dilation[d]
        reach = (count - 1) * step + 1
        sliced = largest
        for k in range(windows.kernel[d]):
            bounds = (d + 2, k * dilation, k * dilation + reach, step)
            part = insert(node, ATEN.slice_copy.Tensor, sliced, *bounds)
            largest = part if k == 0 else insert(node, ATEN.maximum.default, largest, part)
    _finish(node, source, dims, ATEN.clone.default, largest)


def _pool_first_result(pool: Rewrite, target: Any) -> Rewrite:
    """Return a rewrite that pools without indices; a constraint refuses calls that use them."""

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
        if windows.ceil and _needs_end_padding(windows, shape_of(batched)[2:]):
            _become_ceil_mean(node, pool, batched, windows, include=include, divisor=divisor)
        elif divisor is not None:
            # With a divisor, count_include_pad has no effect.
            mean = insert(node, pool, batched, *shape, windows.padding, False, True)
            factor = math.prod(windows.kernel) / divisor
            _finish(node, source, dims, ATEN.mul.Scalar, mean, factor)
        else:
            options = (windows.padding, False, include)
            _finish(node, source, dims, pool, batched, *shape, *options)

    return rewrite


def _become_ceil_mean(
    node: Node, pool: Any, batched: Node, windows: _Windows, *, include: bool, divisor: int | None
) -> None:
    """Means over windows beyond the input: sums divided by the numbers of counted elements.

    Both are averages over whole windows of padded tensors, so that the window size cancels out.
    """
    source: Node = arguments_of(node)["self"]
    dims = len(windows.kernel)
    sizes = shape_of(batched)[2:]
    # At least the padding of the call, which adds no window if rounding up needs less.
    end = [max(e, p) for e, p in zip(windows.end_padding(sizes), windows.padding, strict=True)]
    padded = insert(node, ATEN.constant_pad_nd.default, batched, _sides(windows.padding, end), 0.0)
    shape = (windows.kernel, windows.stride, [0] * dims, False, True)
    total = insert(node, pool, padded, *shape)
    if divisor is not None:
        factor = math.prod(windows.kernel) / divisor
        _finish(node, source, dims, ATEN.mul.Scalar, total, factor)
        return
    # The padding of the call may count; the padding that rounding up adds never does.
    counted_padding = [p if include else 0 for p in windows.padding]
    ones_sizes = [n + 2 * c for n, c in zip(sizes, counted_padding, strict=True)]
    ends = zip(end, counted_padding, strict=True)
    sides = _sides(
        [p - c for p, c in zip(windows.padding, counted_padding, strict=True)],
        [e - c for e, c in ends],
    )
    dtype = value_of(batched).dtype
    full = insert(node, ATEN.full.default, [1, 1, *ones_sizes], 1.0, dtype=dtype)
    counted = insert(node, ATEN.constant_pad_nd.default, full, sides, 0.0) if any(sides) else full
    count = insert(node, pool, counted, *shape)
    _finish(node, source, dims, ATEN.div.Tensor, total, count)


def _adaptive(reduction: Any) -> Rewrite:
    """Return a rewrite that reduces windows of one dimension after another."""

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
        return _dynamic_window_means(node, x, dim, count)
    if size == count:
        return x
    # PyTorch's windows: from floor(i * size / count) to ceil((i + 1) * size / count).
    bounds = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    parts = [
        insert(node, reduction, insert(node, ATEN.slice_copy.Tensor, x, dim, *window), [dim], True)
        for window in bounds
    ]
    return insert(node, ATEN.cat.default, parts, dim)


def _dynamic_window_means(node: Node, x: Node, dim: int, count: int) -> Node:
    """Return means over windows of a dynamic dimension: a product with a matrix of weights.

    The matrix is computed from the size, with a row per window.
    """
    dims = value_of(x).dim()
    row = x
    for other_dim in (d for d in range(dims) if d != dim):
        row = insert(node, ATEN.slice_copy.Tensor, row, other_dim, 0, 1)
    row = insert(node, ATEN.view_copy.default, row, [-1])
    unit_row = insert(node, ATEN.full_like.default, row, 1.0)
    unit_row = insert(node, ATEN._to_copy.default, unit_row, dtype=torch.int32)
    # In integers, without rounding: element p, counted from 1, is in window i if
    # p * count > i * size and (p - 1) * count < (i + 1) * size.
    size = insert(node, ATEN.sum.dim_IntList, unit_row, [0], True, dtype=torch.int32)
    positions = insert(node, ATEN.cumsum.default, unit_row, 0, dtype=torch.int32)
    scaled_ends = insert(node, ATEN.mul.Scalar, positions, count)
    scaled_starts = insert(node, ATEN.sub.Scalar, scaled_ends, count)
    windows = insert(node, ATEN.arange.start_step, 0, count, 1, dtype=torch.int32)
    windows = insert(node, ATEN.view_copy.default, windows, [count, 1])
    starts = insert(node, ATEN.mul.Tensor, windows, size)
    ends = insert(node, ATEN.add.Tensor, starts, size)
    inside = insert(
        node,
        ATEN.logical_and.default,
        insert(node, ATEN.gt.Tensor, scaled_ends, starts),
        insert(node, ATEN.lt.Tensor, scaled_starts, ends),
    )
    weights = insert(node, ATEN._to_copy.default, inside, dtype=value_of(x).dtype)
    total = insert(node, ATEN.sum.dim_IntList, weights, [1], True)
    weights = insert(node, ATEN.div.Tensor, weights, total)
    columns = insert(node, ATEN.permute_copy.default, weights, [1, 0])
    order = [*(d for d in range(dims) if d != dim), dim]
    moved = insert(node, ATEN.permute_copy.default, x, order)
    result = insert(node, ATEN.matmul.default, moved, columns)
    return insert(node, ATEN.permute_copy.default, result, [order.index(d) for d in range(dims)])


def _adaptive_average(call: Node) -> None:
    """Rewrite means over windows of dynamic dimensions; coremltools translates static ones."""
    arguments = arguments_of(call)
    counts: list[int] = list(per_dim(arguments["output_size"], 1))
    spatial = shape_of(arguments["self"])[-len(counts) :]
    if any(not isinstance(n, int) and c != 1 for n, c in zip(spatial, counts, strict=True)):
        _adaptive(ATEN.mean.dim)(call)


def _window_flops(call: OpCall) -> int:
    kernel = call.arguments.get("kernel_size")
    sizes = kernel if isinstance(kernel, list | tuple) else [kernel]
    if not sizes or not all(isinstance(size, int | torch.SymInt) for size in sizes):
        return per_input(1)(call)
    window = math.prod(extent(size) for size in sizes)
    # A single size holds for all dimensions; their number is in the op's name.
    dimensions = int(_POOLED.sub(r"\1", target_name(call.node.target))) if len(sizes) == 1 else 1
    return per_result(1)(call) * window**dimensions


_POOLED = re.compile(r".*_pool(\d)d.*")
_WINDOW = ("kernel_size", "stride", "padding")
_MAX_NAMES = ("self", *_WINDOW, "dilation", "ceil_mode")
_MAX_POOLS: Any = (ATEN.max_pool1d.default, ATEN.max_pool2d.default, ATEN.max_pool3d.default)
_AVG_POOLS: Any = (ATEN.avg_pool1d.default, ATEN.avg_pool2d.default, ATEN.avg_pool3d.default)
_MAX_OPS = 64
_STATIC_SIZE = holds(_has_static_size, ReasonCode.SYMBOLIC, "the input size is dynamic")
_FEW_WINDOWS = holds(
    _few_windows,
    ReasonCode.ARGUMENT,
    f"more than {_MAX_OPS} windows along the dimensions, an op each",
)
_FEW_ELEMENTS = holds(
    _few_elements,
    ReasonCode.ARGUMENT,
    f"a dilated window has more than {_MAX_OPS} elements, an op each",
)
_STATIC_WINDOWS = holds(
    _has_static_windows, ReasonCode.SYMBOLIC, "where windows lie depends on a size that is dynamic"
)
_STATIC_COUNTS = holds(
    _rounds_down, ReasonCode.SYMBOLIC, "how many elements a window has depends on a dynamic size"
)

_op = partial(OpRecord, flops=_window_flops)
_adaptive_op = partial(OpRecord, flops=per_input(1))

RECORDS = (
    # Its export makes every size static.
    _op(
        "aten.max_pool1d.default",
        constraints=(_FEW_ELEMENTS,),
        rewrite=_max_pool(1),
        quantization=MOVE,
    ),
    *(
        _op(
            f"aten.max_pool{dims}d.default",
            constraints=(_STATIC_WINDOWS, _FEW_ELEMENTS),
            rewrite=_max_pool(dims),
            quantization=MOVE,
        )
        for dims in (2, 3)
    ),
    *(
        _op(
            f"aten.max_pool{dims}d_with_indices.default",
            constraints=(only_first_result_used, _STATIC_WINDOWS, _FEW_ELEMENTS),
            rewrite=_pool_first_result(_max_pool(dims), _MAX_POOLS[dims - 1]),
        )
        for dims in (2, 3)
    ),
    *(
        _op(
            f"aten.avg_pool{dims}d.default",
            constraints=(_STATIC_COUNTS,),
            rewrite=_avg_pool(dims),
            quantization=AVERAGE_POOL,
        )
        for dims in (1, 2, 3)
    ),
    *(
        _adaptive_op(f"aten.{name}.default", rewrite=_adaptive_average, quantization=AVERAGE_POOL)
        for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d")
    ),
    _adaptive_op("aten._adaptive_avg_pool2d.default", rewrite=_adaptive_average),
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
            constraints=(only_first_result_used, _STATIC_SIZE, _FEW_WINDOWS),
            rewrite=_adaptive(ATEN.amax.default),
        )
        for dims in (2, 3)
    ),
)
