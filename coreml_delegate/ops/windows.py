"""Sliding windows of an image as columns (im2col), their sum (col2im), and ``Tensor.unfold``.

ExecuTorch decomposes the first two to indexing with tensors of six dimensions. Here windows are
taken, or added up, along one dimension after the other, by slices at fixed places.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from coreml_delegate.ops.call import ANY, OpCall, ReasonCode
from coreml_delegate.ops.constraints import holds
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, shape_of
from coreml_delegate.ops.flops import nothing, per_input
from coreml_delegate.ops.merging import along, whole_sizes
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
    def tile(self) -> bool:
        """Whether the windows cover the dimension without gaps, overlap or padding."""
        whole = self.count * self.kernel == self.size
        return whole and self.kernel == self.stride and self.dilation == 1 and self.padding == 0


def _windows(arguments: dict[str, Any], sizes: Sequence[int]) -> Iterator[_Windows]:
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
    """Take windows along ``dim``; their elements become a dimension at ``place``."""
    length = (windows.count - 1) * windows.stride + 1
    starts = [k * windows.dilation for k in range(windows.kernel)]
    parts = [
        insert(node, ATEN.slice_copy.Tensor, x, dim, start, start + length, windows.stride)
        for start in starts
    ]
    return insert(node, ATEN.stack.default, parts, place)


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
    """Add up windows: elements at ``place``, windows along ``dim`` once these are taken apart."""
    parts = [
        _placed(node, insert(node, ATEN.select_copy.int, x, place, k), windows, dim, k)
        for k in range(windows.kernel)
    ]
    return functools.reduce(lambda a, b: insert(node, ATEN.add.Tensor, a, b), parts)


def _placed(node: Node, part: Node, windows: _Windows, dim: int, element: int) -> Node:
    """Put one element of each window, which lie along ``dim``, where it is in the image."""
    sizes = shape_of(part)
    after = [0] * 2 * (len(sizes) - dim - 1)
    length = windows.count * windows.stride
    if windows.stride > 1:
        apart = [-1, *sizes[1 : dim + 1], 1, *sizes[dim + 1 :]]
        part = insert(node, ATEN.view_copy.default, part, apart)
        gaps = [*after, 0, windows.stride - 1]
        part = insert(node, ATEN.constant_pad_nd.default, part, gaps, 0.0)
        whole = [-1, *sizes[1:dim], length, *sizes[dim + 1 :]]
        part = insert(node, ATEN.view_copy.default, part, whole)
    start = element * windows.dilation
    end = windows.padded - start - length
    if start or end > 0:
        around = [*after, start, max(end, 0)]
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


def _few_elements(call: OpCall) -> bool:
    return call.arguments["size"] <= _MANY


def _known_places(call: OpCall) -> bool:
    tensor = call.tensor("self")
    return tensor is not None and all(isinstance(size, int) for size in tensor.shape[-2:])


def _few_offsets(call: OpCall) -> bool:
    """Each place in a window is an op of its own."""
    return sum(call.arguments["kernel_size"]) <= _MANY


_MANY = 64
_KNOWN = holds(_known_places, ReasonCode.SYMBOLIC, "the places of windows depend on a dynamic size")
_FEW = holds(_few_offsets, ReasonCode.ARGUMENT, f"windows of more than {_MANY} rows and columns")

RECORDS = (
    OpRecord(
        "aten.im2col.default",
        constraints=(_KNOWN, _FEW),
        rewrite=_unfold,
        score_role=ScoreRole.CARRIES,
        flops=nothing,
    ),
    OpRecord(
        "aten.unfold.default",
        dtypes={"": ANY},
        constraints=(
            holds(_known_windows, ReasonCode.SYMBOLIC, "several sizes, or that of windows, vary"),
            holds(_few_elements, ReasonCode.ARGUMENT, f"windows of more than {_MANY} elements"),
        ),
        merge=along("dimension"),
        rewrite=_unfold_one,
        score_role=ScoreRole.CARRIES,
        flops=nothing,
    ),
    OpRecord("aten.col2im.default", constraints=(_FEW,), rewrite=_fold, flops=per_input(1)),
)
