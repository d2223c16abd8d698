"""Gathering and scattering by index, sorting."""

from __future__ import annotations

from collections.abc import Sequence
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
    only_result_used,
    rank_between,
    static_argument,
    static_result,
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
from coreml_delegate.ops.mil_ops import floor_divide, scatter_reduce
from coreml_delegate.ops.quantization import MOVE, Output, Pattern, Quantization
from coreml_delegate.ops.record import OpRecord, Rewrite, ScoreRole


def _leading(indices: Sequence[Any]) -> list[Any]:
    """Indices without the whole dimensions at the end, which say nothing."""
    kept = list(indices)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _one_index(call: OpCall) -> bool:
    """One index of rank 1, or any of the first dimensions."""
    indices = _leading(call.arguments["indices"])
    if None not in indices:
        return True
    return all(i is None for i in indices[:-1]) and next(call.tensors("indices"))[1].dim() == 1


def _known_parts(call: OpCall) -> bool:
    """The index spans a part of the other dimensions that is known when the model is converted."""
    data, index = call.tensor("self"), call.tensor("index")
    if data is None or index is None or not data.dim():
        return False
    dim = call.arguments["dim"] % data.dim()
    pairs = enumerate(zip(data.shape, index.shape, strict=True))
    return all(str(a) == str(b) or {type(a), type(b)} == {int} for d, (a, b) in pairs if d != dim)


def _same_ranks(call: OpCall) -> bool:
    sequence, values = call.tensor("sorted_sequence"), call.tensor("self")
    return sequence is not None and values is not None and sequence.dim() == values.dim()


def _index_put(node: Node) -> None:
    """Write along one dimension other than the first, which coremltools does not index.

    Whole dimensions at the end are left out: with them it takes only single positions.
    """
    arguments = arguments_of(node)
    indices, values = _leading(arguments["indices"]), arguments["values"]
    dim = len(indices) - 1
    if dim == 0 or None not in indices:
        become(node, node.target, arguments["self"], indices, values, arguments["accumulate"])
        return
    index = indices[dim]
    shape = shape_of(node)
    shape[dim] = shape_of(index)[0]
    aligned = [-1 if d == dim else 1 for d in range(len(shape))]
    index = insert(node, ATEN.view_copy.default, index, aligned)
    index = insert(node, ATEN.expand_copy.default, index, shape)
    values = insert(node, ATEN.expand_copy.default, values, shape)
    target = ATEN.scatter_add.default if arguments["accumulate"] else ATEN.scatter.src
    become(node, target, arguments["self"], dim, index, values)


def _of_truths(rewrite: Rewrite | None = None) -> Rewrite:
    """Gather and scatter truths as integers: MIL does neither."""

    def rewritten(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        if dtype is torch.bool:
            moved = {n: _as_integers(node, arguments[n]) for n in _DATA if n in arguments}
            set_arguments(node, **moved)
            taken = insert(node, node.target, *node.args, **node.kwargs)
            become(node, ATEN._to_copy.default, taken, dtype=dtype)
            node = taken
        if rewrite is not None:
            rewrite(node)

    return rewritten


def _as_integers(node: Node, value: Any) -> Any:
    return cast(node, value, torch.int32) if isinstance(value, Node) else int(bool(value))


def _cut(node: Node, x: Node, sizes: list[int], dim: int | None) -> Node:
    """The first elements of ``x`` along every dimension but ``dim``."""
    for d, size in enumerate(sizes):
        if d != dim and shape_of(x)[d] != size:
            x = insert(node, ATEN.slice_copy.Tensor, x, d, 0, size, 1)
    return x


def _gather(node: Node) -> None:
    """Gather from the part of the data that the index spans; MIL wants whole dimensions."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    become(node, node.target, _cut(node, data, shape_of(index), dim), dim, index)


def _scatter(node: Node) -> None:
    """Scatter into the part of the data that the index spans, and put that part back."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    sizes = shape_of(index)
    if "src" in arguments:
        source = _cut(node, arguments["src"], sizes, None)
    else:
        source = _filled(node, index, arguments["value"])
    parts = [data]
    cuts: list[tuple[int, int]] = []
    for d, size in enumerate(sizes):
        if d != dim and shape_of(data)[d] != size:
            cuts.append((d, size))
            parts.append(insert(node, ATEN.slice_copy.Tensor, parts[-1], d, 0, size, 1))
    call = _scattered(node, _Scatter(parts[-1], dim, index, source))
    if not cuts:
        become(node, *call)
        return
    written = insert(node, *call)
    for (d, size), whole in zip(reversed(cuts[1:]), reversed(parts[1:-1]), strict=True):
        written = insert(node, ATEN.slice_scatter.default, whole, written, d, 0, size, 1)
    d, size = cuts[0]
    become(node, ATEN.slice_scatter.default, data, written, d, 0, size, 1)


class _Scatter(NamedTuple):
    """The operands of a scatter, in ATen's order."""

    data: Node
    dim: int
    indices: Node
    source: Node


def _filled(node: Node, index: Node, value: Any) -> Node:
    """Return a number for each index: coremltools makes none where sizes are dynamic."""
    dtype = value_of(node).dtype
    return insert(node, ATEN.full_like.default, index, number(value, dtype), dtype=dtype)


def _scattered(node: Node, scatter: _Scatter) -> tuple[Any, ...]:
    """The call, with its arguments, that scatters as ``node`` does."""
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
        scatter = _replaced(node, scatter, _IDENTITIES.get(mode))
    return scatter_reduce(), *scatter, mode


def _replaced(node: Node, scatter: _Scatter, identity: int | None) -> _Scatter:
    """Put a number where there are indices; without one, any source, which is among all of them."""
    source = scatter.source if identity is None else _filled(node, scatter.indices, identity)
    data = insert(node, ATEN.scatter.src, *scatter[:3], source)
    return scatter._replace(data=data)


def _mean_of_groups(node: Node, scatter: _Scatter, includes_self: bool) -> tuple[Any, ...]:
    """Sums divided by counts; the counts are int32, because fp16 has integers up to 2048 only."""
    data, dim, index, _ = scatter
    dtype, counted = value_of(node).dtype, value_of(index).dtype
    zeros = insert(node, ATEN.full_like.default, data, 0, dtype=counted)
    start = insert(node, ATEN.add.Scalar, zeros, 1) if includes_self else zeros
    ones = insert(node, ATEN.full_like.default, index, 1)
    count = insert(node, scatter_reduce(), start, dim, index, ones, "sum")
    if not includes_self:
        count = insert(node, ATEN.clamp.default, count, 1, INT32.max)
        scatter = _replaced(node, scatter, 0)
    total = insert(node, scatter_reduce(), *scatter, "sum")
    divide = ATEN.div.Tensor if dtype.is_floating_point else floor_divide()
    return divide, total, cast(node, count, dtype)


def _elements_of_bags(call: OpCall) -> int:
    """Return the number of indices in each bag, 0 where bags differ, or are not known to be equal.

    PyTorch makes a range of the offsets of two-dimensional indices.
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


def _known_largest(call: OpCall) -> bool:
    return call.arguments["mode"] != _LARGEST or call.arguments["padding_idx"] < 0


def _embedding_bag(node: Node) -> None:
    """Sum, mean or maximum of rows, as many for each result."""
    arguments, result = arguments_of(node), only_result(node)
    count, padding = _elements_of_bags(OpCall.of(node)), arguments["padding_idx"]
    weight, indices, weights = (arguments[n] for n in ("weight", "indices", "per_sample_weights"))
    indices = insert(result, ATEN.view_copy.default, indices, [-1, count])
    rows = insert(result, ATEN.embedding.default, weight, indices)
    if arguments["mode"] == _LARGEST:
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
    total, number_of = (insert(result, ATEN.sum.dim_IntList, x, [1]) for x in (rows, counts))
    divisor = insert(result, ATEN.clamp.default, number_of, 1.0, None)
    become(result, ATEN.div.Tensor, total, divisor)


def _masked_scatter(node: Node) -> None:
    """Take the elements of the source at the number of truths before each; or whole rows."""
    arguments = arguments_of(node)
    x, mask, source = (arguments[n] for n in ("self", "mask", "source"))
    shape = shape_of(node)
    rows = _mask_of_rows(node, mask, source)
    if rows is None and _texts(shape_of(mask)) != _texts(shape):
        mask = insert(node, ATEN.expand_copy.default, mask, shape)
    width = [] if rows is None else shape[-1:]
    source = insert(node, ATEN.view_copy.default, source, [-1, *width])
    truths = cast(node, mask if rows is None else rows, torch.int32)
    truths = insert(node, ATEN.view_copy.default, truths, [-1])
    count = insert(node, ATEN.cumsum.default, truths, 0, dtype=torch.int32)
    place = insert(node, ATEN.clamp_min.default, insert(node, ATEN.sub.Scalar, count, 1), 0)
    taken = insert(node, ATEN.index_select.default, source, 0, place)
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    taken = insert(node, ATEN.view_copy.default, taken, sizes)
    become(node, ATEN.where.self, mask, taken, x)


def _mask_of_rows(node: Node, mask: Node, source: Node) -> Node | None:
    """Return what a mask is expanded from along the last dimension, None if it is not.

    Models mask the embeddings of tokens so; an index for each is far fewer than one per element.
    """
    shape = shape_of(node)
    while target_name(mask.target) in _COPIES:
        mask = mask.args[0]  # pyright: ignore[reportAssignmentType]
    if target_name(mask.target) not in _EXPANSIONS:
        return None
    rows = mask.args[0]
    if not isinstance(rows, Node) or value_of(rows).dtype is not torch.bool:
        return None
    are_rows = _texts(shape_of(rows)) == [*_texts(shape[:-1]), "1"]
    return rows if are_rows and _texts(shape_of(source)[-1:]) == _texts(shape[-1:]) else None


def _texts(sizes: Sequence[Any]) -> list[str]:
    """Sizes to compare: as numbers, symbols would become equal."""
    return [str(size) for size in sizes]


def _places_known(call: OpCall) -> bool:
    """At most one size is dynamic, and then the mask has all of them."""
    (result,), mask = call.outputs(), call.tensor("mask")
    dynamic = [size for size in result.shape if not isinstance(size, int)]
    same = mask is not None and _texts(mask.shape) == _texts(result.shape)
    return not dynamic or (len(dynamic) == 1 and same)


def _bucketize(node: Node) -> None:
    """Search for all values at once, for the boundaries are one sequence."""
    arguments = arguments_of(node)
    values = insert(node, ATEN.view_copy.default, arguments["self"], [-1])
    places = insert(
        node,
        ATEN.searchsorted.Tensor,
        arguments["boundaries"],
        values,
        right=bool(arguments["right"]),
    )
    places = cast(node, places, value_of(node).dtype)
    become(node, ATEN.view_copy.default, places, shape_of(node))


def _searchsorted(node: Node) -> None:
    """The side as a flag, and nothing else, which coremltools would have to overlook."""
    arguments = arguments_of(node)
    right = arguments["side"] == "right" or (arguments["side"] is None and arguments["right"])
    become(node, node.target, arguments["sorted_sequence"], arguments["self"], right=right)
    cast_after(node)


_VALUES = FLOAT | INTEGER
_MEAN, _LARGEST = 1, 2  # modes of embedding bags
_EQUAL_BAGS = holds(
    lambda call: _elements_of_bags(call) > 0,
    ReasonCode.ARGUMENT,
    "the bags are not known to have equally many elements",
)
_UNPADDED_LARGEST = holds(_known_largest, ReasonCode.ARGUMENT, "the largest of bags with padding")
_DATA = ("self", "source", "src", "value", "values")
_COPIES = CASTS | {"aten.clone.default", "dim_order_ops._clone_dim_order.default"}
_EXPANSIONS = frozenset({"aten.expand.default", "aten.expand_copy.default", "aten.repeat.default"})
_REDUCTIONS = {"add": "sum", "multiply": "prod"}
_IDENTITIES = {"sum": 0, "prod": 1}
_KNOWN = holds(_known_parts, ReasonCode.SYMBOLIC, "the index spans a dynamic part of the data")

_op = partial(OpRecord, flops=nothing, score_role=ScoreRole.CARRIES)

RECORDS = (
    _op(
        "aten.index.Tensor",
        dtypes={"self": ANY, "indices": INTEGER},
        rewrite=_of_truths(),
    ),
    _op(
        "aten.index_select.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(rank_between("index", 1, 1),),
        rewrite=_of_truths(),
        quantization=MOVE,
    ),
    _op(
        "aten.index_put.default",
        dtypes={"": ANY, "indices": INTEGER},
        constraints=(
            holds(_one_index, ReasonCode.ARGUMENT, "an inner dimension is indexed with others"),
            static_result,
        ),
        rewrite=_of_truths(_index_put),
    ),
    _op(
        "aten.gather.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _KNOWN),
        rewrite=_of_truths(_gather),
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_KNOWN,),
            rewrite=_of_truths(_scatter),
        )
        for name in ("scatter.src", "scatter.value")
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_KNOWN,),
            rewrite=_of_truths(_scatter),
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
        quantization=Quantization((Pattern("embedding", weight="weight", output=Output.FLOAT),)),
    ),
    # Offsets are known where another call computes them.
    *(
        _op(
            f"aten.{name}.default",
            dtypes={"": FLOAT, "indices": INTEGER, "offsets": INTEGER},
            constraints=(only_result_used(0), _EQUAL_BAGS, _UNPADDED_LARGEST),
            alone=False,
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
    _op("aten.topk.default", dtypes={"": _VALUES}, constraints=(argument_is("sorted", True),)),
    _op("aten.sort.default", dtypes={"": _VALUES}),
    _op(
        "aten.masked_scatter.default",
        dtypes={"": ANY, "mask": BOOL},
        constraints=(
            holds(
                _places_known,
                ReasonCode.SYMBOLIC,
                "several sizes are dynamic, or the mask is broadcast along one",
            ),
        ),
        rewrite=_of_truths(_masked_scatter),
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
            holds(_same_ranks, ReasonCode.RANK, "the values have another rank than the sequence"),
            argument_is("sorter", None),
            static_argument("sorted_sequence", "self"),
        ),
        rewrite=_searchsorted,
    ),
)
