"""Gathering and scattering by index, sorting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    ANY,
    BOOL,
    CAST,
    CASTS,
    FLOAT,
    INT32,
    INTEGER,
    MAX_RANK,
    OpCall,
    ReasonCode,
    target_name,
)
from coreml_delegate.ops.constraints import (
    argument_is,
    holds,
    only_first_result_used,
    rank_between,
    static_argument,
)
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    cast_after,
    insert,
    number,
    only_result,
    set_arguments,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import nothing, per_input
from coreml_delegate.ops.merging import leading
from coreml_delegate.ops.mil_ops import scatter_reduce
from coreml_delegate.ops.quantization import MOVE, Output, Pattern, Quantization
from coreml_delegate.ops.record import OpRecord, Rewrite
from coreml_delegate.targets import MOST_ROWS


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


def _knows_selected(call: OpCall) -> bool:
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


def _spans_static_part(call: OpCall) -> bool:
    """The index spans a static part of the other dimensions of the data, or all of them."""
    data, index = call.tensor("self"), call.tensor("index")
    if data is None or index is None or not data.dim():
        return False
    dim = call.arguments["dim"] % data.dim()
    pairs = enumerate(zip(data.shape, index.shape, strict=True))
    return all(str(a) == str(b) or {type(a), type(b)} == {int} for d, (a, b) in pairs if d != dim)


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


def _of_one_shape(node: Node, indices: Sequence[Node]) -> list[Node]:
    """Broadcast indices to one shape, which coremltools does not."""
    shapes = [shape_of(index) for index in indices]
    if all(_as_texts(shape) == _as_texts(shapes[0]) for shape in shapes):
        return list(indices)
    shape = list(torch.broadcast_shapes(*shapes))
    return [insert(node, ATEN.expand_copy.default, index, shape) for index in indices]


def _put_leading(node: Node, indices: Sequence[Any], values: Node) -> None:
    """Move the indexed dimensions to the front, and back.

    The indices are broadcast to one shape. In the shape of the values it is in the place of the
    indexed dimensions if they are neighbours, otherwise at the front.
    """
    arguments, shape = arguments_of(node), shape_of(node)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    order = [*indexed, *(d for d in range(len(shape)) if d not in indexed)]
    other_sizes = [shape[d] for d in order[len(indexed) :]]
    are_neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = indexed[0] if are_neighbours else 0
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
            zeros = _fill_like(node, data, 0)
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


def _via_int32(rewrite: Rewrite | None = None) -> Rewrite:
    """Return a rewrite that moves booleans as int32: MIL neither gathers nor scatters bool."""

    def rewrite_bools(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        if dtype is torch.bool:
            integers = {n: _as_integers(node, arguments[n]) for n in _DATA if n in arguments}
            set_arguments(node, **integers)
            call = insert(node, node.target, *node.args, **node.kwargs)
            become(node, ATEN._to_copy.default, call, dtype=dtype)
            node = call
        if rewrite is not None:
            rewrite(node)

    return rewrite_bools


def _as_integers(node: Node, value: Any) -> Any:
    return cast(node, value, torch.int32) if isinstance(value, Node) else int(bool(value))


def _crop(node: Node, x: Node, sizes: list[int], dim: int | None) -> Node:
    """Return the first ``sizes`` elements of ``x`` along all dimensions but ``dim``."""
    for d, size in enumerate(sizes):
        if d != dim and shape_of(x)[d] != size:
            x = insert(node, ATEN.slice_copy.Tensor, x, d, 0, size, 1)
    return x


def _gather(node: Node) -> None:
    """Gather from the part of the data that the index spans; MIL takes only whole dimensions."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    become(node, node.target, _crop(node, data, shape_of(index), dim), dim, index)


def _scatter(node: Node) -> None:
    """Scatter into the part of the data that the index spans, and put that part back."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    sizes = shape_of(index)
    if "src" in arguments:
        source = _crop(node, arguments["src"], sizes, None)
    else:
        source = _fill_like(node, index, arguments["value"])
    parts = [data]
    cuts: list[tuple[int, int]] = []
    for d, size in enumerate(sizes):
        if d != dim and shape_of(data)[d] != size:
            cuts.append((d, size))
            parts.append(insert(node, ATEN.slice_copy.Tensor, parts[-1], d, 0, size, 1))
    call = _scatter_call(node, _Scatter(parts[-1], dim, index, source))
    if not cuts:
        become(node, *call)
        return
    result = insert(node, *call)
    for (d, size), part in zip(reversed(cuts[1:]), reversed(parts[1:-1]), strict=True):
        result = insert(node, ATEN.slice_scatter.default, part, result, d, 0, size, 1)
    d, size = cuts[0]
    become(node, ATEN.slice_scatter.default, data, result, d, 0, size, 1)


class _Scatter(NamedTuple):
    """The operands of a scatter, in ATen's order."""

    data: Node
    dim: int
    indices: Node
    source: Node


def _fill_like(node: Node, x: Node, value: Any) -> Node:
    """Return ``value`` in the shape of ``x``; coremltools fails to for dynamic sizes."""
    dtype = value_of(node).dtype
    return insert(node, ATEN.full_like.default, x, number(value, dtype), dtype=dtype)


def _scatter_call(node: Node, scatter: _Scatter) -> tuple[Any, ...]:
    """Return target and arguments of the call that scatters as ``node`` does."""
    arguments = arguments_of(node)
    if "reduce" not in arguments:
        is_sum = target_name(node.target) == "aten.scatter_add.default"
        return ATEN.scatter_add.default if is_sum else ATEN.scatter.src, *scatter
    reduce: str = arguments["reduce"]
    mode = _REDUCTIONS.get(reduce, reduce)
    includes_self = arguments.get("include_self", True)
    if mode == "mean":
        return _mean_of_groups(node, scatter, includes_self)
    if not includes_self:
        scatter = _overwrite_indexed(node, scatter, _IDENTITIES.get(mode))
    return scatter_reduce(), *scatter, mode


def _overwrite_indexed(node: Node, scatter: _Scatter, identity: int | None) -> _Scatter:
    """Overwrite indexed elements with the identity; if it is None, each with any of its sources."""
    source = scatter.source if identity is None else _fill_like(node, scatter.indices, identity)
    data = insert(node, ATEN.scatter.src, *scatter[:3], source)
    return scatter._replace(data=data)


def _mean_of_groups(node: Node, scatter: _Scatter, includes_self: bool) -> tuple[Any, ...]:
    """Sums divided by counts; the counts are int32, because fp16 has integers up to 2048 only."""
    data, dim, index, _ = scatter
    dtype, index_dtype = value_of(node).dtype, value_of(index).dtype
    zeros = insert(node, ATEN.full_like.default, data, 0, dtype=index_dtype)
    start = insert(node, ATEN.add.Scalar, zeros, 1) if includes_self else zeros
    summands = insert(node, ATEN.full_like.default, index, 1)
    count = insert(node, scatter_reduce(), start, dim, index, summands, "sum")
    if not includes_self:
        count = insert(node, ATEN.clamp.default, count, 1, INT32.max)
        scatter = _overwrite_indexed(node, scatter, 0)
    total = insert(node, scatter_reduce(), *scatter, "sum")
    divide = ATEN.div.Tensor if dtype.is_floating_point else ATEN.floor_divide.default
    return divide, total, cast(node, count, dtype)


def _bag_size(call: OpCall) -> int:
    """Return the number of indices per bag, 0 if bags may differ.

    PyTorch turns two-dimensional indices into flat indices, with a range as offsets.
    """
    offsets, indices = call.arguments["offsets"], call.tensor("indices")
    while target_name(offsets.target) == CAST:
        offsets = offsets.args[0]
    if indices is None or target_name(offsets.target) != "aten.arange.start_step":
        return 0
    start, end, count = (OpCall.of(offsets).arguments[n] for n in ("start", "end", "step"))
    size = end.meta["val"] if isinstance(end, Node) else end
    # Symbols are compared as text: as numbers, they would become equal.
    is_whole = start == 0 and str(size) == str(indices.shape[0])
    divides = isinstance(count, int) and (not isinstance(size, int) or size % count == 0)
    return count if is_whole and divides and not call.arguments["include_last_offset"] else 0


def _has_maximum(call: OpCall) -> bool:
    return call.arguments["mode"] != _MAXIMUM or call.arguments["padding_idx"] < 0


def _embedding_bag(node: Node) -> None:
    """Sum, mean or maximum of equally many embedding rows per bag."""
    arguments, result = arguments_of(node), only_result(node)
    count, padding = _bag_size(OpCall.of(node)), arguments["padding_idx"]
    weight, indices, weights = (arguments[n] for n in ("weight", "indices", "per_sample_weights"))
    indices = insert(result, ATEN.view_copy.default, indices, [-1, count])
    rows = insert(result, ATEN.embedding.default, weight, indices)
    if arguments["mode"] == _MAXIMUM:
        become(result, ATEN.amax.default, rows, [1])
        return
    if weights is not None:
        weights = insert(result, ATEN.view_copy.default, weights, [-1, count, 1])
        rows = insert(result, ATEN.mul.Tensor, rows, weights)
    if padding < 0:
        reduce = ATEN.mean.dim if arguments["mode"] == _MEAN else ATEN.sum.dim_IntList
        become(result, reduce, rows, [1])
        return
    counts = cast(result, insert(result, ATEN.ne.Scalar, indices, padding), value_of(rows).dtype)
    counts = insert(result, ATEN.unsqueeze_copy.default, counts, -1)
    rows = insert(result, ATEN.mul.Tensor, rows, counts)
    if arguments["mode"] != _MEAN:
        become(result, ATEN.sum.dim_IntList, rows, [1])
        return
    total, count_unpadded = (insert(result, ATEN.sum.dim_IntList, x, [1]) for x in (rows, counts))
    divisor = insert(result, ATEN.clamp.default, count_unpadded, 1.0, None)
    become(result, ATEN.div.Tensor, total, divisor)


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


def _top(node: Node) -> None:
    """Sort the largest values: the order without ``sorted`` is undefined, so any will do."""
    set_arguments(node, sorted=True)


def _bucketize(node: Node) -> None:
    arguments = arguments_of(node)
    boundaries, values = arguments["boundaries"], arguments["self"]
    become(node, ATEN.searchsorted.Tensor, boundaries, values, right=bool(arguments["right"]))
    _searchsorted(node)


def _searchsorted(node: Node) -> None:
    """Pass the side as ``right``: coremltools ignores the other arguments.

    Values of another rank than a single sequence are flattened.
    """
    arguments = arguments_of(node)
    sequence, values = arguments["sorted_sequence"], arguments["self"]
    right = arguments["side"] == "right" or (arguments["side"] is None and arguments["right"])
    if value_of(sequence).dim() == value_of(values).dim():
        become(node, node.target, sequence, values, right=right)
        cast_after(node)
        return
    values = insert(node, ATEN.view_copy.default, values, [-1])
    positions = insert(node, node.target, sequence, values, right=right)
    positions = cast(node, positions, value_of(node).dtype)
    become(node, ATEN.view_copy.default, positions, shape_of(node))


def _wide_lookup(
    table: str, indices: str, *, axis: str | None = None
) -> Callable[[OpCall], str | None]:
    """Return the obstacle to a lookup in too many rows by computed indices.

    Args:
        table: Name of the argument that has the rows.
        indices: Name of the argument with their indices.
        axis: Name of the argument with the axis of the rows; None for the first.
    """

    def obstacle(call: OpCall) -> str | None:
        sizes = value_of(call.arguments[table]).shape
        rows = sizes[0 if axis is None else call.arguments[axis]]
        is_wide = isinstance(rows, int) and rows > MOST_ROWS
        is_computed = call.arguments[indices] not in call.constants
        return f"a lookup in {rows:,} rows" if is_wide and is_computed else None

    return obstacle


def _index_arithmetic(call: OpCall) -> str | None:
    """Return the obstacle to a lookup by computed indices; None for one in weights.

    Core ML stacks the indices and makes negative ones positive, in int32. Weights do not move.
    """
    are_computed = any(
        isinstance(n, Node) and n not in call.constants for n in call.arguments["indices"]
    )
    if not are_computed or call.arguments["self"] in call.constants:
        return None
    return "arithmetic with the indices of a lookup"


_VALUES = FLOAT | INTEGER
_MEAN, _MAXIMUM = 1, 2  # modes of embedding bags
_EQUAL_BAGS = holds(
    lambda call: _bag_size(call) > 0,
    ReasonCode.ARGUMENT,
    "the bags are not known to have equally many elements",
)
_UNPADDED_MAXIMUM = holds(_has_maximum, ReasonCode.ARGUMENT, "the largest of bags with padding")
_DATA = ("self", "source", "src", "value", "values")
_COPIES = CASTS | {"aten.clone.default", "dim_order_ops._clone_dim_order.default"}
_EXPANSIONS = frozenset({"aten.expand.default", "aten.expand_copy.default", "aten.repeat.default"})
_REDUCTIONS = {"add": "sum", "multiply": "prod"}
_IDENTITIES = {"sum": 0, "prod": 1}
_STATIC_PART = holds(
    _spans_static_part, ReasonCode.SYMBOLIC, "the index spans a dynamic part of the data"
)

_op = partial(OpRecord, flops=nothing)

RECORDS = (
    _op(
        "aten.index.Tensor",
        dtypes={"self": ANY, "indices": INTEGER},
        rewrite=_via_int32(),
        leaves_neural_engine=_index_arithmetic,
    ),
    _op(
        "aten.index_select.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(rank_between("index", 1, 1),),
        rewrite=_via_int32(),
        fails_on_neural_engine=_wide_lookup("self", "index", axis="dim"),
        quantization=MOVE,
    ),
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
                _knows_selected,
                ReasonCode.SYMBOLIC,
                "the number of elements that the mask selects is dynamic",
            ),
            static_argument("self", when=lambda call: not _has_mask(call)),
        ),
        rewrite=_via_int32(_index_put),
    ),
    _op(
        "aten.gather.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _STATIC_PART),
        rewrite=_via_int32(_gather),
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_STATIC_PART,),
            rewrite=_via_int32(_scatter),
        )
        for name in ("scatter.src", "scatter.value")
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_STATIC_PART,),
            rewrite=_via_int32(_scatter),
            flops=per_input(1),
        )
        for name in (
            *("scatter_add.default", "scatter.reduce", "scatter.value_reduce"),
            "scatter_reduce.two",
        )
    ),
    _op(
        "aten.embedding.default",
        dtypes={"weight": FLOAT, "indices": INTEGER},
        constraints=(argument_is("sparse", False),),
        fails_on_neural_engine=_wide_lookup("weight", "indices"),
        natural_indices=True,
        quantization=Quantization((Pattern("embedding", weight="weight", output=Output.FLOAT),)),
    ),
    # Not standalone: the offsets are known only if another call computes them.
    *(
        _op(
            f"aten.{name}.default",
            dtypes={"": FLOAT, "indices": INTEGER, "offsets": INTEGER},
            constraints=(only_first_result_used, _EQUAL_BAGS, _UNPADDED_MAXIMUM),
            standalone=False,
            rewrite=_embedding_bag,
        )
        for name in ("_embedding_bag", "_embedding_bag_forward_only")
    ),
    _op(
        "aten.slice_scatter.default",
        dtypes={"": _VALUES},
        symbolic=frozenset({"start", "end"}),
    ),
    _op("aten.select_scatter.default", dtypes={"": _VALUES}),
    _op(
        "aten.topk.default",
        dtypes={"": _VALUES},
        rewrite=_top,
        leaves_neural_engine=lambda _: "the choice of the largest values",
    ),
    _op("aten.sort.default", dtypes={"": _VALUES}),
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
        rewrite=_via_int32(_masked_scatter),
    ),
    _op(
        "aten.bucketize.Tensor",
        constraints=(static_argument("boundaries", "self"),),
        merge=leading("self", lambda _: 0),
        rewrite=_bucketize,
    ),
    _op(
        "aten.searchsorted.Tensor",
        dtypes={"": FLOAT, "sorter": INTEGER},
        max_rank=MAX_RANK - 1,
        constraints=(
            argument_is("sorter", None),
            static_argument("sorted_sequence", "self"),
        ),
        rewrite=_searchsorted,
    ),
)
