"""Windows: of an image as columns (im2col), their sum (col2im), ``Tensor.unfold``, ``as_strided``.

ExecuTorch decomposes the first two to indexing with tensors of six dimensions. Here windows are
taken, or added up, along one dimension after the other, by slices at fixed places.
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
from coreml_delegate.ops.merging import along, whole_sizes
from coreml_delegate.ops.mil_ops import sliding_windows
from coreml_delegate.ops.record import OpRecord, ScoreRole


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
        """Neighbouring elements that no other window has at the same distance from its start."""
        return min(self.stride, self.kernel) if self.dilation == 1 else 1

    @property
    def tile(self) -> bool:
        """Whether the windows cover the dimension without gaps, overlap or padding."""
        whole = self.count * self.kernel == self.size
        return whole and self.kernel == self.stride and self.dilation == 1 and self.padding == 0


def _windows(arguments: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[_Windows]:
    """Windows along the last two dimensions of an image."""
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
        become(node, ATEN.view_copy.default, tiles, whole_sizes(shape_of(node)))
        return
    if rows.padding or columns.padding:
        pads = [columns.padding] * 2 + [rows.padding] * 2
        x = insert(node, ATEN.constant_pad_nd.default, x, pads, 0.0)
    x = insert(node, ATEN.view_copy.default, x, [-1, rows.padded, columns.padded])
    x = _taken(node, x, rows, dim=1, place=1)
    x = _taken(node, x, columns, dim=3, place=2)
    become(node, ATEN.view_copy.default, x, whole_sizes(shape_of(node)))


def _taken(node: Node, x: Node, windows: _Windows, dim: int, place: int) -> Node:
    """Take windows along ``dim``; their elements become a dimension at ``place``.

    Slices, an op for each element, run anywhere; many elements are one op.
    """
    if windows.kernel > _MANY:
        return _slid(node, x, windows, dim, place)
    length = (windows.count - 1) * windows.stride + 1
    starts = [k * windows.dilation for k in range(windows.kernel)]
    parts = [
        insert(node, ATEN.slice_copy.Tensor, x, dim, start, start + length, windows.stride)
        for start in starts
    ]
    return insert(node, ATEN.stack.default, parts, place)


def _slid(node: Node, x: Node, windows: _Windows, dim: int, place: int) -> Node:
    dtype, rank = value_of(x).dtype, value_of(x).dim()
    if dtype is torch.bool:
        x = cast(node, x, torch.int32)
    size = (windows.kernel - 1) * windows.dilation + 1
    x = insert(node, sliding_windows(), x, dim, size, windows.stride)
    if windows.dilation > 1:
        x = insert(node, ATEN.slice_copy.Tensor, x, rank, 0, size, windows.dilation)
    if place < rank:
        order = [*range(place), rank, *range(place, rank)]
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
        x = _added(node, x, columns, place=2, dim=3)
        x = _added(node, x, rows, place=1, dim=1)
        for dim, windows in ((1, rows), (2, columns)):
            if windows.padding:
                end = windows.padding + windows.size
                x = insert(node, ATEN.slice_copy.Tensor, x, dim, windows.padding, end, 1)
    become(node, ATEN.view_copy.default, x, whole_sizes(shape_of(node)))


def _added(node: Node, x: Node, windows: _Windows, place: int, dim: int) -> Node:
    """Add up windows: elements at ``place``, windows along ``dim`` once these are taken apart.

    Of each window, as many elements are placed together as lie between its start and the next.
    """
    parts = [
        _placed(node, x, windows, (place, dim), first)
        for first in range(0, windows.kernel, windows.block)
    ]
    return functools.reduce(lambda a, b: insert(node, ATEN.add.Tensor, a, b), parts)


def _placed(node: Node, x: Node, windows: _Windows, dims: tuple[int, int], first: int) -> Node:
    """Put a block of each window, from element ``first`` on, where it is in the image."""
    place, dim = dims
    width = min(windows.block, windows.kernel - first)
    part = insert(node, ATEN.slice_copy.Tensor, x, place, first, first + width, 1)
    sizes = shape_of(part)
    if width < windows.stride:
        gap = [0] * 2 * (len(sizes) - place - 1) + [0, windows.stride - width]
        part = insert(node, ATEN.constant_pad_nd.default, part, gap, 0.0)
    order = [d for d in range(len(sizes)) if d != place]
    order.insert(dim + 1, place)
    part = insert(node, ATEN.permute_copy.default, part, order)
    del sizes[place]
    length = windows.count * windows.stride
    whole = [-1, *sizes[1:dim], length, *sizes[dim + 1 :]]
    part = insert(node, ATEN.view_copy.default, part, whole)
    start = first * windows.dilation
    end = windows.padded - start - length
    if start or end > 0:
        around = [0] * 2 * (len(whole) - dim - 1) + [start, max(end, 0)]
        part = insert(node, ATEN.constant_pad_nd.default, part, around, 0.0)
    if end < 0:  # zeros between windows, of which none follows
        part = insert(node, ATEN.slice_copy.Tensor, part, dim, 0, windows.padded, 1)
    return part


def _unfold_one(node: Node) -> None:
    """Take windows along one dimension; their elements become the last dimension."""
    arguments = arguments_of(node)
    x, size, step = (arguments[n] for n in ("self", "size", "step"))
    shape = shape_of(x)
    dim = arguments["dimension"] % len(shape)
    windows = _Windows(shape[dim], size, 1, 0, step)
    if windows.tile:
        split = [*shape[:dim], windows.count, size, *shape[dim + 1 :]]
        order = [*range(dim + 1), *range(dim + 2, len(split)), dim + 1]
        tiles = insert(node, ATEN.view_copy.default, x, whole_sizes(split))
        become(node, ATEN.permute_copy.default, tiles, order)
    else:
        become(node, ATEN.clone.default, _taken(node, x, windows, dim, len(shape)))


def _known_windows(call: OpCall) -> bool:
    """The sizes are known, or one other than that of the windows is not."""
    sizes = list(call.outputs()[0].shape)
    given = next(call.tensors("self"))[1].shape[call.arguments["dimension"]]
    return isinstance(given, int) and sum(not isinstance(size, int) for size in sizes) <= 1


def _known_places(call: OpCall) -> bool:
    tensor = call.tensor("self")
    return tensor is not None and all(isinstance(size, int) for size in tensor.shape[-2:])


def _few_blocks(call: OpCall) -> bool:
    """Each block of neighbours in a window is an op of its own."""
    windows = _windows(call.arguments, call.arguments["output_size"])
    return sum(math.ceil(w.kernel / w.block) for w in windows) <= _MANY


def _as_strided(node: Node) -> None:
    """Elements of the flattened tensor, row-major as every tensor of a partition.

    The places are a slice, windows, or numbers in a table.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    start, sizes, strides = _strided(arguments)
    x = insert(node, ATEN.view_copy.default, arguments["self"], [-1])
    if dtype is torch.bool:
        x = cast(node, x, torch.int32)
    end = _last(start, sizes, strides) + 1
    match sizes, strides:
        case [], []:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, 1)
        case [_], [step] if step > 0:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, step)
        case [_, size], [step, 1] if step > 0:
            x = insert(node, ATEN.slice_copy.Tensor, x, 0, start, end, 1)
            x = _taken(node, x, _Windows(end - start, size, 1, 0, step), 0, 1)
        case _:
            x = insert(node, ATEN.index_select.default, x, 0, _table(node, start, sizes, strides))
    whole = insert(node, ATEN.view_copy.default, x, shape_of(node))
    become(node, ATEN._to_copy.default, whole, dtype=dtype)


def _strided(arguments: Mapping[str, Any]) -> tuple[int, list[int], list[int]]:
    """Return where elements start, and sizes and strides, neighbours merged where they can be."""
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


def _last(start: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the last place of an element."""
    steps = zip(sizes, strides, strict=True)
    return start + sum((size - 1) * stride for size, stride in steps)


def _table(node: Node, start: int, sizes: Sequence[int], strides: Sequence[int]) -> Node:
    """Return the places of all elements, [elements]; coremltools computes and stores them."""
    table = insert(node, ATEN.full.default, [1], start, dtype=torch.int32)
    for size, stride in zip(sizes, strides, strict=True):
        steps = [0, size * stride, stride] if stride else [0, size, 1]
        row = insert(node, ATEN.arange.start_step, *steps, dtype=torch.int32)
        if not stride:
            row = insert(node, ATEN.mul.Scalar, row, 0)
        table = insert(node, ATEN.view_copy.default, table, [-1, 1])
        table = insert(node, ATEN.add.Tensor, table, row)
    return insert(node, ATEN.view_copy.default, table, [-1])


def _places(call: OpCall) -> Reason | None:
    """Every index lies inside the argument, and the table of indices is small enough to store."""
    if _last(*_strided(call.arguments)) >= next(call.tensors("self"))[1].numel():
        return Reason(ReasonCode.ARGUMENT, "elements lie beyond those of the argument")
    if math.prod(call.arguments["size"]) > _LARGEST_TABLE:
        return Reason(ReasonCode.ARGUMENT, f"more than {_LARGEST_TABLE} elements")
    return None


_MANY = 64
_LARGEST_TABLE = 1 << 20
_KNOWN = holds(_known_places, ReasonCode.SYMBOLIC, "the places of windows depend on a dynamic size")
_FEW = holds(_few_blocks, ReasonCode.ARGUMENT, f"windows of more than {_MANY} strides")

RECORDS = (
    OpRecord(
        "aten.im2col.default",
        constraints=(_KNOWN,),
        rewrite=_unfold,
        score_role=ScoreRole.CARRIES,
        flops=nothing,
    ),
    OpRecord(
        "aten.unfold.default",
        dtypes={"": ANY},
        constraints=(
            holds(_known_windows, ReasonCode.SYMBOLIC, "several sizes, or that of windows, vary"),
        ),
        merge=along("dimension"),
        rewrite=_unfold_one,
        score_role=ScoreRole.CARRIES,
        flops=nothing,
    ),
    OpRecord(
        "aten.as_strided.default",
        dtypes={"": ANY},
        constraints=(static_argument("self"), _places),
        rewrite=_as_strided,
        score_role=ScoreRole.CARRIES,
        flops=nothing,
    ),
    OpRecord("aten.col2im.default", constraints=(_FEW,), rewrite=_fold, flops=per_input(1)),
)
