"""Gathering and scattering by index, sorting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    ANY,
    CAST,
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


def _spans_static_part(call: OpCall) -> bool:
    """The index spans a static part of the other dimensions of the data, or all of them."""
    data, index = call.tensor("self"), call.tensor("index")
    if data is None or index is None or not data.dim():
        return False
    dim = call.arguments["dim"] % data.dim()
    pairs = enumerate(zip(data.shape, index.shape, strict=True))
    return all(str(a) == str(b) or {type(a), type(b)} == {int} for d, (a, b) in pairs if d != dim)


def via_int32(rewrite: Rewrite | None = None) -> Rewrite:
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
        source = full_of_shape(node, index, arguments["value"])
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


def full_of_shape(node: Node, x: Node, value: Any) -> Node:
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
    source = scatter.source if identity is None else full_of_shape(node, scatter.indices, identity)
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
        rewrite=via_int32(),
        leaves_neural_engine=_index_arithmetic,
    ),
    _op(
        "aten.index_select.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(rank_between("index", 1, 1),),
        rewrite=via_int32(),
        fails_on_neural_engine=_wide_lookup("self", "index", axis="dim"),
        quantization=MOVE,
    ),
    _op(
        "aten.gather.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _STATIC_PART),
        rewrite=via_int32(_gather),
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_STATIC_PART,),
            rewrite=via_int32(_scatter),
        )
        for name in ("scatter.src", "scatter.value")
    ),
    *(
        _op(
            f"aten.{name}",
            dtypes={"": ANY, "index": INTEGER},
            constraints=(_STATIC_PART,),
            rewrite=via_int32(_scatter),
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
