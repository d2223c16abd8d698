"""Windows: ``im2col``, their sum ``col2im``, ``Tensor.unfold``, ``as_strided``.

ExecuTorch decomposes the first two to indexing with tensors of six dimensions. The rewrites
extract, or add up, windows along one dimension after the other, by slices at static positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import ANY, OpCall, Reason, ReasonCode
from coreml_delegate.ops.constraints import holds, static_argument
from coreml_delegate.ops.edits import ATEN, arguments_of, become, cast, insert, shape_of, value_of
from coreml_delegate.ops.flops import nothing, per_input
from coreml_delegate.ops.merging import along, view_sizes
from coreml_delegate.ops.mil_ops import sliding_windows
from coreml_delegate.ops.record import OpRecord


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows along one dimension.

    Attributes:
        size: Of the dimension, in elements, without padding.
        kernel: Elements of a window.
        dilation: From one element of a window to the next.
        padding: At each end of the dimension.
        stride: From one window to the next.
    """

    size: int
    kernel: int
    dilation: int
    padding: int
    stride: int

    @property
    def padded(self) -> int:
        return self.size + 2 * self.padding

    @property
    def count(self) -> int:
        return (self.padded - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def block(self) -> int:
        """Number of neighbouring elements of a window that do not overlap with other windows'."""
        return min(self.stride, self.kernel) if self.dilation == 1 else 1

    @property
    def tile(self) -> bool:
        """Whether the windows cover the dimension without gaps, overlap or padding."""
        covers = self.count * self.kernel == self.size
        return covers and self.kernel == self.stride and self.dilation == 1 and self.padding == 0


def _windows(arguments: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[_Windows]:
    """Yield the windows along the last two dimensions of an image."""
    for dim, size in enumerate(sizes):
        options = (arguments[n] for n in ("kernel_size", "dilation", "padding", "stride"))
        yield _Windows(size, *(values[dim % len(values)] for values in options))


def _unfold(node: Node) -> None:
    arguments = arguments_of(node)
    x = arguments["self"]
    rows, columns = _windows(arguments, shape_of(x)[-2:])
    if rows.tile and columns.tile:
        split = [-1, rows.count, rows.kernel, columns.count, columns.kernel]
        tiles = insert(node, ATEN.view_copy.default, x, split)
        tiles = insert(node, ATEN.permute_copy.default, tiles, [0, 2, 4, 1, 3])
        become(node, ATEN.view_copy.default, tiles, view_sizes(shape_of(node)))
        return
    if rows.padding or columns.padding:
        pads = [columns.padding] * 2 + [rows.padding] * 2
        x = insert(node, ATEN.constant_pad_nd.default, x, pads, 0.0)
    x = insert(node, ATEN.view_copy.default, x, [-1, rows.padded, columns.padded])
    x = _stack_windows(node, x, rows, dim=1, axis=1)
    x = _stack_windows(node, x, columns, dim=3, axis=2)
    become(node, ATEN.view_copy.default, x, view_sizes(shape_of(node)))


def _stack_windows(node: Node, x: Node, windows: _Windows, dim: int, axis: int) -> Node:
    """Extract windows along ``dim``; their elements become a dimension at ``axis``.

    One slice per element runs on every device; for more elements, ``sliding_windows`` is one op.
    """
    if windows.kernel > _MAX_SLICES:
        return _slide_windows(node, x, windows, dim, axis)
    length = (windows.count - 1) * windows.stride + 1
    starts = [k * windows.dilation for k in range(windows.kernel)]
    parts = [
        insert(node, ATEN.slice_copy.Tensor, x, dim, start, start + length, windows.stride)
        for start in starts
    ]
    return insert(node, ATEN.stack.default, parts, axis)


def _slide_windows(node: Node, x: Node, windows: _Windows, dim: int, axis: int) -> Node:
    dtype, rank = value_of(x).dtype, value_of(x).dim()
    if dtype is torch.bool:
        x = cast(node, x, torch.int32)
    size = (windows.kernel - 1) * windows.dilation + 1
    x = insert(node, sliding_windows(), x, dim, size, windows.stride)
    if windows.dilation > 1:
        x = insert(node, ATEN.slice_copy.Tensor, x, rank, 0, size, windows.dilation)
    if axis < rank:
        order = [*range(axis), rank, *range(axis, rank)]
        x = insert(node, ATEN.permute_copy.default, x, order)
    return cast(node, x, dtype)


def _fold(node: Node) -> None:
    arguments = arguments_of(node)
    rows, columns = _windows(arguments, arguments["output_size"])
    split = [-1, rows.kernel, columns.kernel, rows.count, columns.count]
    x = insert(node, ATEN.view_copy.default, arguments["self"], split)
    if rows.tile and columns.tile:
        x = insert(node, ATEN.permute_copy.default, x, [0, 3, 1, 4, 2])
    else:
        x = _add_windows(node, x, columns, axis=2, dim=3)
        x = _add_windows(node, x, rows, axis=1, dim=1)
        for dim, windows in ((1, rows), (2, columns)):
            if windows.padding:
                end = windows.padding + windows.size
                x = insert(node, ATEN.slice_copy.Tensor, x, dim, windows.padding, end, 1)
    become(node, ATEN.view_copy.default, x, view_sizes(shape_of(node)))


def _add_windows(node: Node, x: Node, windows: _Windows, axis: int, dim: int) -> Node:
    """Add up windows: their elements are at ``axis``, the windows along ``dim`` without ``axis``.

    Each summand has one block of elements of every window.
    """
    parts = [
        _put_block(node, x, windows, (axis, dim), first)
        for first in range(0, windows.kernel, windows.block)
    ]
    return functools.reduce(lambda a, b: insert(node, ATEN.add.Tensor, a, b), parts)


def _put_block(node: Node, x: Node, windows: _Windows, dims: tuple[int, int], first: int) -> Node:
    """Return an image with a block of each window, from element ``first`` on, zero elsewhere."""
    axis, dim = dims
    width = min(windows.block, windows.kernel - first)
    part = insert(node, ATEN.slice_copy.Tensor, x, axis, first, first + width, 1)
    sizes = shape_of(part)
    if width < windows.stride:
        inner_pads = [0] * 2 * (len(sizes) - axis - 1) + [0, windows.stride - width]
        part = insert(node, ATEN.constant_pad_nd.default, part, inner_pads, 0.0)
    order = [d for d in range(len(sizes)) if d != axis]
    order.insert(dim + 1, axis)
    part = insert(node, ATEN.permute_copy.default, part, order)
    del sizes[axis]
    length = windows.count * windows.stride
    merged = [-1, *sizes[1:dim], length, *sizes[dim + 1 :]]
    part = insert(node, ATEN.view_copy.default, part, merged)
    start = first * windows.dilation
    end = windows.padded - start - length
    if start or end > 0:
        outer_pads = [0] * 2 * (len(merged) - dim - 1) + [start, max(end, 0)]
        part = insert(node, ATEN.constant_pad_nd.default, part, outer_pads, 0.0)
    if end < 0:  # cut the zeros behind the last window
        part = insert(node, ATEN.slice_copy.Tensor, part, dim, 0, windows.padded, 1)
    return part


def _unfold_dimension(node: Node) -> None:
    """Extract windows along one dimension; their elements become the last dimension."""
    arguments = arguments_of(node)
    x, size, step = (arguments[n] for n in ("self", "size", "step"))
    shape = shape_of(x)
    dim = arguments["dimension"] % len(shape)
    windows = _Windows(shape[dim], size, 1, 0, step)
    if windows.tile:
        split = [*shape[:dim], windows.count, size, *shape[dim + 1 :]]
        order = [*range(dim + 1), *range(dim + 2, len(split)), dim + 1]
        tiles = insert(node, ATEN.view_copy.default, x, view_sizes(split))
        become(node, ATEN.permute_copy.default, tiles, order)
    else:
        become(node, ATEN.clone.default, _stack_windows(node, x, windows, dim, len(shape)))


def _has_static_windows(call: OpCall) -> bool:
    """The windowed dimension is static, and at most one other size is dynamic."""
    sizes = list(call.outputs()[0].shape)
    windowed = next(call.tensors("self"))[1].shape[call.arguments["dimension"]]
    return isinstance(windowed, int) and sum(not isinstance(size, int) for size in sizes) <= 1


def _has_static_positions(call: OpCall) -> bool:
    tensor = call.tensor("self")
    return tensor is not None and all(isinstance(size, int) for size in tensor.shape[-2:])


def _few_blocks(call: OpCall) -> bool:
    """The windows have at most 64 blocks; each becomes an op."""
    windows = _windows(call.arguments, call.arguments["output_size"])
    return sum(math.ceil(w.kernel / w.block) for w in windows) <= _MAX_SLICES


def _as_strided(node: Node) -> None:
    """Select elements of the flattened tensor, row-major as every tensor of a partition.

    Their offsets are a slice, windows, or a table of indices.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    start, sizes, strides = _merged_strides(arguments)
    x = insert(node, ATEN.view_copy.default, arguments["self"], [-1])
    if dtype is torch.bool:
        x = cast(node, x, torch.int32)
    end = _last_offset(start, sizes, strides) + 1
    match sizes, strides:
        case [], []:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, 1)
        case [_], [step] if step > 0:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, step)
        case [_, size], [step, 1] if step > 0:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, 1)
            x = _stack_windows(node, x, _Windows(end - start, size, 1, 0, step), 0, 1)
        case _:
            x = insert(node, ATEN.index_select.default, x, 0, _offsets(node, start, sizes, strides))
    result = insert(node, ATEN.view_copy.default, x, shape_of(node))
    become(node, ATEN._to_copy.default, result, dtype=dtype)


def _merged_strides(arguments: Mapping[str, Any]) -> tuple[int, list[int], list[int]]:
    """Return the start offset, sizes and strides, with mergeable neighbouring dimensions merged."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(arguments["size"], arguments["stride"], strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return arguments["storage_offset"] or 0, sizes, strides


def _last_offset(start: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the largest offset of an element."""
    steps = zip(sizes, strides, strict=True)
    return start + sum((size - 1) * stride for size, stride in steps)


def _offsets(node: Node, start: int, sizes: Sequence[int], strides: Sequence[int]) -> Node:
    """Return the offsets of all elements, [elements]; coremltools folds them to a constant."""
    table = insert(node, ATEN.full.default, [1], start, dtype=torch.int32)
    for size, stride in zip(sizes, strides, strict=True):
        steps = [0, size * stride, stride] if stride else [0, size, 1]
        row = insert(node, ATEN.arange.start_step, *steps, dtype=torch.int32)
        if not stride:
            row = insert(node, ATEN.mul.Scalar, row, 0)
        table = insert(node, ATEN.view_copy.default, table, [-1, 1])
        table = insert(node, ATEN.add.Tensor, table, row)
    return insert(node, ATEN.view_copy.default, table, [-1])


def _has_valid_offsets(call: OpCall) -> Reason | None:
    """Every index lies inside the argument, and the table of indices is small enough to store."""
    if _last_offset(*_merged_strides(call.arguments)) >= next(call.tensors("self"))[1].numel():
        return Reason(ReasonCode.ARGUMENT, "elements lie beyond those of the argument")
    if math.prod(call.arguments["size"]) > _MAX_TABLE:
        return Reason(ReasonCode.ARGUMENT, f"more than {_MAX_TABLE} elements")
    return None


_MAX_SLICES = 64
_MAX_TABLE = 1 << 20
_STATIC_POSITIONS = holds(
    _has_static_positions, ReasonCode.SYMBOLIC, "the places of windows depend on a dynamic size"
)
_FEW_BLOCKS = holds(_few_blocks, ReasonCode.ARGUMENT, f"windows of more than {_MAX_SLICES} strides")

RECORDS = (
    OpRecord(
        "aten.im2col.default",
        constraints=(_STATIC_POSITIONS,),
        rewrite=_unfold,
        flops=nothing,
    ),
    OpRecord(
        "aten.unfold.default",
        dtypes={"": ANY},
        constraints=(
            holds(
                _has_static_windows, ReasonCode.SYMBOLIC, "several sizes, or that of windows, vary"
            ),
        ),
        merge=along("dimension"),
        rewrite=_unfold_dimension,
        flops=nothing,
    ),
    OpRecord(
        "aten.as_strided.default",
        dtypes={"": ANY},
        constraints=(static_argument("self"), _has_valid_offsets),
        rewrite=_as_strided,
        flops=nothing,
    ),
    OpRecord("aten.col2im.default", constraints=(_FEW_BLOCKS,), rewrite=_fold, flops=per_input(1)),
)
