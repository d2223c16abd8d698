"""Writing to the elements that indices or a mask select."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import ANY, BOOL, CASTS, INTEGER, OpCall, ReasonCode, target_name
from coreml_delegate.ops.constraints import holds, static_argument
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    insert,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.indexing import full_of_shape, via_int32
from coreml_delegate.ops.record import OpRecord


def _drop_trailing_none(indices: Sequence[Any]) -> list[Any]:
    """Return indices without trailing None, which stand for unindexed dimensions."""
    leading = list(indices)
    while leading and leading[-1] is None:
        leading.pop()
    return leading


def _is_single_mask(call: OpCall) -> bool:
    """If a mask indexes, nothing else does."""
    ranks = [tensor.dim() for _, tensor in call.tensors("indices")]
    return not _has_mask(call) or (len(ranks) == 1 and ranks[0] > 0)


def _knows_inner_indices(call: OpCall) -> bool:
    """Inner dimensions are indexed by one tensor of rank 1, or by tensors of static shapes."""
    tensors = [tensor for _, tensor in call.tensors("indices")]
    if None not in _drop_trailing_none(call.arguments["indices"]):
        return True
    sizes = itertools.chain.from_iterable(tensor.shape for tensor in tensors)
    return [t.dim() for t in tensors] == [1] or all(isinstance(size, int) for size in sizes)


def _has_mask(call: OpCall) -> bool:
    return any(tensor.dtype is torch.bool for _, tensor in call.tensors("indices"))


def _has_static_number_of_values(call: OpCall) -> bool:
    """A mask writes one value to all selected elements, or the number of values is static.

    The result of the mask has the dimensions before the mask, one for the selected elements, and
    the dimensions after the mask; values are broadcast to it.
    """
    data, values, mask = (call.tensor(n) for n in ("self", "values", "indices"))
    if data is None or values is None or mask is None or not _has_mask(call):
        return True
    before = len(_drop_trailing_none(call.arguments["indices"])) - 1
    after = data.dim() - before - mask.dim()
    if values.dim() <= after or _as_texts(values.shape)[-after - 1] == "1":
        return True
    return before == 0 and all(isinstance(d, int) for d in (*data.shape, *values.shape))


def _index_put(node: Node) -> None:
    """Write along an inner dimension by ``scatter``: coremltools indexes only leading dimensions.

    Trailing None are dropped: with them coremltools takes only single positions.
    """
    arguments = arguments_of(node)
    indices, values = _drop_trailing_none(arguments["indices"]), arguments["values"]
    dim = len(indices) - 1
    if value_of(indices[dim]).dtype is torch.bool:
        _put_by_mask(node, indices[dim], dim)
        return
    if not any(value_of(index).dim() for index in indices if index is not None):
        indices, values = _with_one_position(node, indices, values)
    if dim == 0 or None not in indices:
        indices = _of_one_shape(node, indices)
        become(node, node.target, arguments["self"], indices, values, arguments["accumulate"])
        return
    index = indices[dim]
    if indices.count(None) < dim or value_of(index).dim() != 1:
        _put_leading(node, indices, values)
        return
    shape = shape_of(node)
    shape[dim] = shape_of(index)[0]
    aligned = [-1 if d == dim else 1 for d in range(len(shape))]
    index = insert(node, ATEN.view_copy.default, index, aligned)
    index = insert(node, ATEN.expand_copy.default, index, shape)
    values = insert(node, ATEN.expand_copy.default, values, shape)
    target = ATEN.scatter_add.default if arguments["accumulate"] else ATEN.scatter.src
    become(node, target, arguments["self"], dim, index, values)


def _with_one_position(node: Node, indices: Sequence[Any], values: Node) -> tuple[list[Any], Node]:
    """Give indices of rank 0, which coremltools does not take, the shape [1]."""
    sizes = [size for d, size in enumerate(shape_of(node)) if d not in _indexed(indices)]
    values = insert(node, ATEN.expand_copy.default, values, sizes) if sizes else values
    values = insert(node, ATEN.unsqueeze_copy.default, values, _dim_of_positions(indices))
    return [i and insert(node, ATEN.view_copy.default, i, [1]) for i in indices], values


def _indexed(indices: Sequence[Any]) -> list[int]:
    return [d for d, index in enumerate(indices) if index is not None]


def _dim_of_positions(indices: Sequence[Any]) -> int:
    """Return the first dimension of the values that stands for the shape of the indices.

    The shape replaces the indexed dimensions if they are neighbours, otherwise it comes first.
    """
    indexed = _indexed(indices)
    are_neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    return indexed[0] if are_neighbours else 0


def _of_one_shape(node: Node, indices: Sequence[Node]) -> list[Node]:
    """Broadcast indices to one shape, which coremltools does not."""
    shapes = [shape_of(index) for index in indices]
    if all(_as_texts(shape) == _as_texts(shapes[0]) for shape in shapes):
        return list(indices)
    shape = list(torch.broadcast_shapes(*shapes))
    return [insert(node, ATEN.expand_copy.default, index, shape) for index in indices]


def _put_leading(node: Node, indices: Sequence[Any], values: Node) -> None:
    """Move the indexed dimensions to the front, and back."""
    arguments, shape = arguments_of(node), shape_of(node)
    indexed, before = _indexed(indices), _dim_of_positions(indices)
    order = [*indexed, *(d for d in range(len(shape)) if d not in indexed)]
    other_sizes = [shape[d] for d in order[len(indexed) :]]
    positions = torch.broadcast_shapes(*(shape_of(indices[d]) for d in indexed))
    sizes = [*other_sizes[:before], *positions, *other_sizes[before:]]
    values = insert(node, ATEN.expand_copy.default, values, sizes)
    after = before + len(positions)
    if before:
        moved = [*range(before, after), *range(before), *range(after, len(sizes))]
        values = insert(node, ATEN.permute_copy.default, values, moved)
    x = insert(node, ATEN.permute_copy.default, arguments["self"], order)
    leading = _of_one_shape(node, [indices[d] for d in indexed])
    x = insert(node, ATEN.index_put.default, x, leading, values, arguments["accumulate"])
    become(node, ATEN.permute_copy.default, x, [order.index(d) for d in range(len(shape))])


def _put_by_mask(node: Node, mask: Node, before: int) -> None:
    """``where(mask, values, x)``; if each selected element has its own value, a masked scatter.

    Args:
        node: The call.
        mask: The only index.
        before: Number of dimensions before those of the mask.
    """
    arguments = arguments_of(node)
    data, values, shape = arguments["self"], arguments["values"], shape_of(node)
    rank = value_of(mask).dim()
    after = len(shape) - before - rank
    for _ in range(after):
        mask = insert(node, ATEN.unsqueeze_copy.default, mask, -1)
    sizes = shape_of(values)
    if len(sizes) > after and _as_texts(sizes)[-after - 1] != "1":
        values = insert(node, ATEN.expand_copy.default, values, [sizes[-after - 1], *shape[rank:]])
        mask = insert(node, ATEN.expand_copy.default, mask, shape)
        scattered = node
        if arguments["accumulate"]:
            zeros = full_of_shape(node, data, 0)
            scattered = insert(node, ATEN.masked_scatter.default, zeros, mask, values)
            become(node, ATEN.add.Tensor, data, scattered)
        else:
            become(node, ATEN.masked_scatter.default, data, mask, values)
        _masked_scatter(scattered)
        return
    if len(sizes) > after:
        for _ in range(rank - 1):
            values = insert(node, ATEN.unsqueeze_copy.default, values, -after - 1)
    if arguments["accumulate"]:
        values = insert(node, ATEN.add.Tensor, data, values)
    become(node, ATEN.where.self, mask, values, data)


def _masked_scatter(node: Node) -> None:
    """``where(mask, source[cumsum(mask) - 1], x)``, of single elements or of rows."""
    arguments = arguments_of(node)
    x, mask, source = (arguments[n] for n in ("self", "mask", "source"))
    shape = shape_of(node)
    rows = _row_mask(node, mask, source)
    if rows is None and _as_texts(shape_of(mask)) != _as_texts(shape):
        mask = insert(node, ATEN.expand_copy.default, mask, shape)
    width = [] if rows is None else shape[-1:]
    source = insert(node, ATEN.view_copy.default, source, [-1, *width])
    flags = cast(node, mask if rows is None else rows, torch.int32)
    flags = insert(node, ATEN.view_copy.default, flags, [-1])
    count = insert(node, ATEN.cumsum.default, flags, 0, dtype=torch.int32)
    index = insert(node, ATEN.clamp_min.default, insert(node, ATEN.sub.Scalar, count, 1), 0)
    elements = insert(node, ATEN.index_select.default, source, 0, index)
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    elements = insert(node, ATEN.view_copy.default, elements, sizes)
    become(node, ATEN.where.self, mask, elements, x)


def _row_mask(node: Node, mask: Node, source: Node) -> Node | None:
    """Return the mask [*, 1] that ``mask`` is expanded from along the last dimension, or None.

    Models mask token embeddings so; one index per token is far fewer than one per element.
    """
    shape = shape_of(node)
    while target_name(mask.target) in _COPIES:
        mask = mask.args[0]  # pyright: ignore[reportAssignmentType]
    if target_name(mask.target) not in _EXPANSIONS:
        return None
    rows = mask.args[0]
    if not isinstance(rows, Node) or value_of(rows).dtype is not torch.bool:
        return None
    are_rows = _as_texts(shape_of(rows)) == [*_as_texts(shape[:-1]), "1"]
    return rows if are_rows and _as_texts(shape_of(source)[-1:]) == _as_texts(shape[-1:]) else None


def _as_texts(sizes: Sequence[Any]) -> list[str]:
    """Return sizes as text: compared as numbers, symbols would become equal."""
    return [str(size) for size in sizes]


def _has_static_positions(call: OpCall) -> bool:
    """No size is dynamic; or one size is, and the mask is not broadcast."""
    (result,), mask = call.outputs(), call.tensor("mask")
    dynamic = [size for size in result.shape if not isinstance(size, int)]
    same = mask is not None and _as_texts(mask.shape) == _as_texts(result.shape)
    return not dynamic or (len(dynamic) == 1 and same)


_COPIES = CASTS | {"aten.clone.default", "dim_order_ops._clone_dim_order.default"}
_EXPANSIONS = frozenset({"aten.expand.default", "aten.expand_copy.default", "aten.repeat.default"})

_op = partial(OpRecord, flops=nothing)

RECORDS = (
    _op(
        "aten.index_put.default",
        dtypes={"": ANY, "indices": INTEGER | BOOL},
        constraints=(
            holds(_is_single_mask, ReasonCode.ARGUMENT, "a mask is one of several indices"),
            holds(
                _knows_inner_indices,
                ReasonCode.SYMBOLIC,
                "indices of inner dimensions have dynamic shapes",
            ),
            holds(
                _has_static_number_of_values,
                ReasonCode.SYMBOLIC,
                "the number of elements that the mask selects is dynamic",
            ),
            static_argument("self", when=lambda call: not _has_mask(call)),
        ),
        rewrite=via_int32(_index_put),
    ),
    _op(
        "aten.masked_scatter.default",
        dtypes={"": ANY, "mask": BOOL},
        constraints=(
            holds(
                _has_static_positions,
                ReasonCode.SYMBOLIC,
                "several sizes are dynamic, or the mask is broadcast along one",
            ),
        ),
        rewrite=via_int32(_masked_scatter),
    ),
)
