"""Gathering and scattering by index, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import ANY, FLOAT, INTEGER, MAX_RANK, OpCall, ReasonCode
from coreml_delegate.ops.constants import is_known
from coreml_delegate.ops.constraints import (
    argument_is,
    holds,
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
    set_arguments,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import nothing, per_input
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
    """Gather truths as integers: MIL gathers none."""

    def rewritten(node: Node) -> None:
        data, dtype = arguments_of(node)["self"], value_of(node).dtype
        if dtype is torch.bool:
            set_arguments(node, self=cast(node, data, torch.int32))
            taken = insert(node, node.target, *node.args, **node.kwargs)
            become(node, ATEN._to_copy.default, taken, dtype=dtype)
            node = taken
        if rewrite is not None:
            rewrite(node)

    return rewritten


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
    source = arguments.get("src", arguments.get("value"))
    if isinstance(source, Node):
        source = _cut(node, source, sizes, None)
    else:
        source = cast(node, source, value_of(node).dtype)
    parts = [data]
    cuts: list[tuple[int, int]] = []
    for d, size in enumerate(sizes):
        if d != dim and shape_of(data)[d] != size:
            cuts.append((d, size))
            parts.append(insert(node, ATEN.slice_copy.Tensor, parts[-1], d, 0, size, 1))
    if not cuts:
        become(node, node.target, data, dim, index, source)
        return
    written = insert(node, node.target, parts[-1], dim, index, source)
    for (d, size), whole in zip(reversed(cuts[1:]), reversed(parts[1:-1]), strict=True):
        written = insert(node, ATEN.slice_scatter.default, whole, written, d, 0, size, 1)
    d, size = cuts[0]
    become(node, ATEN.slice_scatter.default, data, written, d, 0, size, 1)


def _scatter_add(node: Node) -> None:
    """Among constants, sums at positions: folded, coremltools' op overwrites.

    Source: apple/coremltools#2802.
    """
    arguments = arguments_of(node)
    data, index, source = (arguments[n] for n in ("self", "index", "src"))
    if not all(is_known(operand) for operand in (data, index, source)):
        _scatter(node)
        return
    dim, sizes = arguments["dim"] % value_of(data).dim(), shape_of(index)
    positions = [index if d == dim else _counted(node, sizes, d) for d in range(len(sizes))]
    source = _cut(node, source, sizes, None)
    become(node, ATEN.index_put.default, data, positions, source, True)


def _counted(node: Node, sizes: list[int], dim: int) -> Node:
    """Each element's position along a dimension."""
    count = insert(node, ATEN.arange.start_step, 0, sizes[dim], 1, dtype=torch.int64)
    aligned = [-1 if d == dim else 1 for d in range(len(sizes))]
    return insert(
        node, ATEN.expand_copy.default, insert(node, ATEN.view_copy.default, count, aligned), sizes
    )


def _searchsorted(node: Node) -> None:
    """The side as a flag, and nothing else, which coremltools would have to overlook."""
    arguments = arguments_of(node)
    right = arguments["side"] == "right" or (arguments["side"] is None and arguments["right"])
    become(node, node.target, arguments["sorted_sequence"], arguments["self"], right=right)
    cast_after(node)


_VALUES = FLOAT | INTEGER
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
        dtypes={"": FLOAT, "indices": INTEGER},
        constraints=(
            holds(_one_index, ReasonCode.ARGUMENT, "an inner dimension is indexed with others"),
            static_result,
        ),
        rewrite=_index_put,
    ),
    _op(
        "aten.gather.default",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _KNOWN),
        rewrite=_of_truths(_gather),
    ),
    *(
        _op(
            target,
            dtypes={"": FLOAT, "index": INTEGER},
            constraints=(_KNOWN,),
            rewrite=_scatter,
        )
        for target in ("aten.scatter.src", "aten.scatter.value")
    ),
    _op(
        "aten.scatter_add.default",
        dtypes={"": FLOAT, "index": INTEGER},
        constraints=(_KNOWN,),
        rewrite=_scatter_add,
        flops=per_input(1),
    ),
    _op(
        "aten.embedding.default",
        dtypes={"weight": FLOAT, "indices": INTEGER},
        constraints=(argument_is("sparse", False),),
        quantization=Quantization((Pattern("embedding", weight="weight", output=Output.FLOAT),)),
    ),
    _op(
        "aten.slice_scatter.default",
        dtypes={"": _VALUES},
        symbolic=frozenset({"start", "end"}),
    ),
    _op("aten.select_scatter.default", dtypes={"": _VALUES}),
    _op("aten.topk.default", constraints=(argument_is("sorted", True),)),
    _op("aten.sort.default"),
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
