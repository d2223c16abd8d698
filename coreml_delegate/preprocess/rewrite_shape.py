"""Rewrites of ops that move or make data: views, copies, fills, diagonals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch.fx import Node

from coreml_delegate.op_rules.sizes import CHECK
from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    arguments_of,
    become,
    cast,
    cast_after,
    insert,
    number,
    shape_of,
    value_of,
)


def _clone(node: Node) -> None:
    # The rules have refused every memory format but row-major, so the dim order says nothing.
    become(node, ATEN.clone.default, node.args[0])


def _to_copy(node: Node) -> None:
    kept = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    become(node, ATEN._to_copy.default, node.args[0], **kept)


def _broadcast(source: str) -> Rewrite:
    """The named argument, expanded to the shape of the first, which lends nothing but its shape."""

    def rewrite(node: Node) -> None:
        value = cast(node, arguments_of(node)[source], value_of(node).dtype)
        become(node, ATEN.expand_copy.default, value, shape_of(node))

    return rewrite


def _view(node: Node) -> None:
    # Coremltools drops one dimension on the way to a scalar.
    source = node.args[0]
    if value_of(node).dim() == 0 and isinstance(source, Node) and value_of(source).dim() > 1:
        node.args = (insert(node, ATEN.view_copy.default, source, [1]), [])


def _full(node: Node) -> None:
    # Without a dtype coremltools makes fp32, which has not every int32.
    node.kwargs = {"dtype": value_of(node).dtype}
    cast_after(node)


def _empty(node: Node) -> None:
    """Zeros, as good as any values."""
    dtype = value_of(node).dtype
    become(node, ATEN.full.default, shape_of(node), number(0, dtype), dtype=dtype)
    cast_after(node)


def _join(node: Node) -> None:
    """Tensors of several dtypes have that of the result when they are joined."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    tensors = [cast(node, tensor, dtype) for tensor in arguments["tensors"]]
    become(node, node.target, tensors, arguments["dim"])


def _diagonal(node: Node) -> None:
    """Every (columns + 1)th element of a flattened matrix.

    Coremltools mistranslates the op: apple/coremltools#2565.
    """
    arguments = arguments_of(node)
    x, offset = arguments["self"], arguments["offset"]
    rank = value_of(x).dim()
    rows, columns = (arguments[n] % rank for n in ("dim1", "dim2"))
    others = [d for d in range(rank) if d not in (rows, columns)]
    sizes = shape_of(x)
    matrix = insert(node, ATEN.permute_copy.default, x, [*others, rows, columns])
    flat_shape = [*(sizes[d] for d in others), sizes[rows] * sizes[columns]]
    flat = insert(node, ATEN.view_copy.default, matrix, flat_shape)
    step = sizes[columns] + 1
    start = offset if offset >= 0 else -offset * sizes[columns]
    end = start + (shape_of(node)[-1] - 1) * step + 1
    become(node, ATEN.slice_copy.Tensor, flat, len(others), start, end, step)


def _crop(node: Node) -> None:
    """Negative padding as a slice: MIL's does not crop."""
    arguments = arguments_of(node)
    x, pads = arguments["self"], list(arguments["pad"])
    rank = value_of(x).dim()
    for n in range(len(pads) // 2):
        dim, start, end = rank - 1 - n, pads[2 * n], pads[2 * n + 1]
        if start < 0 or end < 0:
            stop = shape_of(x)[dim] + end if end < 0 else _END
            x = insert(node, ATEN.slice_copy.Tensor, x, dim, max(0, -start), stop, 1)
    value = arguments.get("value")
    fill = number(0 if value is None else value, value_of(node).dtype)
    widening = [max(0, pad) for pad in pads]
    if any(widening):
        become(node, ATEN.constant_pad_nd.default, x, widening, fill)
    else:
        become(node, ATEN.clone.default, x)


def _pad(node: Node) -> None:
    if arguments_of(node)["mode"] == "constant":
        _crop(node)


def _grid_sampler(node: Node) -> None:
    """The op that it is decomposed from, which coremltools translates."""
    arguments = arguments_of(node)
    modes = (arguments[n] for n in ("interpolation_mode", "padding_mode", "align_corners"))
    become(node, ATEN.grid_sampler.default, arguments["input"], arguments["grid"], *modes)


def _slice(node: Node) -> None:
    """Between bounds that are computed, a slice whose size is known says so.

    It also fails at run time where the bounds lead out of the tensor, and Core ML's would be short.
    """
    sizes = shape_of(node)
    if not any(isinstance(a, Node) for a in (*node.args[1:], *node.kwargs.values())):
        return
    if all(isinstance(size, int) for size in sizes):
        with node.graph.inserting_before(node):
            part = node.graph.create_node("call_function", node.target, node.args, node.kwargs)
        part.meta = dict(node.meta)
        become(node, ATEN.view_copy.default, part, sizes)


def _item(node: Node) -> None:
    """The number in a tensor, which coremltools takes for one where it has no dimensions."""
    source = node.args[0]
    if isinstance(source, Node) and value_of(source).dim():
        vector = insert(node, ATEN.view_copy.default, source, [1])
        node.args = (insert(node, ATEN.select_copy.int, vector, 0, 0),)


def _drop(node: Node) -> None:
    """A check, which ExecuTorch does not make either."""
    node.graph.erase_node(node)


def _roll_flat(node: Node) -> None:
    """Without dimensions, the flattened tensor is rolled."""
    arguments = arguments_of(node)
    if arguments["dims"]:
        return
    x = arguments["self"]
    count = math.prod(shape_of(x))
    flat = insert(node, ATEN.view_copy.default, x, [count])
    rolled = insert(node, ATEN.roll.default, flat, arguments["shifts"], [0])
    become(node, ATEN.view_copy.default, rolled, shape_of(x))


_END = (1 << 63) - 1

REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        CHECK: _drop,
        "aten._local_scalar_dense.default": _item,
        "aten._to_copy.default": _to_copy,
        "aten.alias.default": _clone,
        "aten.arange.start_step": cast_after,
        "aten.cat.default": _join,
        "aten.constant_pad_nd.default": _crop,
        "aten.copy.default": _broadcast("src"),
        "aten.diagonal.default": _diagonal,
        "aten.empty.memory_format": _empty,
        "aten.fill.Scalar": cast_after,
        "aten.fill.Tensor": _broadcast("value"),
        "aten.full.default": _full,
        "aten.full_like.default": cast_after,
        "aten.grid_sampler_2d.default": _grid_sampler,
        "aten.lift_fresh_copy.default": _clone,
        "aten.new_zeros.default": cast_after,
        "aten.ones_like.default": cast_after,
        "aten.pad.default": _pad,
        "aten.roll.default": _roll_flat,
        "aten.scalar_tensor.default": cast_after,
        "aten.slice.Tensor": _slice,
        "aten.stack.default": _join,
        "aten.view.default": _view,
        "aten.zeros_like.default": cast_after,
        "dim_order_ops._clone_dim_order.default": _clone,
        "dim_order_ops._empty_dim_order.default": _empty,
        "dim_order_ops._to_dim_order_copy.default": _to_copy,
    }
)
