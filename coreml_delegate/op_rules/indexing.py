"""Gathering and scattering by index, sorting."""

from collections.abc import Sequence
from typing import Any

from coreml_delegate.op_rules.constraints import (
    argument_is,
    holds,
    rank_between,
    static_argument,
    static_result,
)
from coreml_delegate.op_rules.rule import ANY, FLOAT, INTEGER, MAX_RANK, OpCall, OpRule, ReasonCode

_VALUES = FLOAT | INTEGER


def leading(indices: Sequence[Any]) -> list[Any]:
    """Indices without the whole dimensions at the end, which say nothing."""
    kept = list(indices)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _one_index(call: OpCall) -> bool:
    """One index of rank 1, or any of the first dimensions."""
    indices = leading(call.arguments["indices"])
    if None not in indices:
        return True
    return all(i is None for i in indices[:-1]) and next(call.tensors("indices"))[1].dim() == 1


def _known_parts(call: OpCall) -> bool:
    """Which part of the other dimensions the index spans is known when the model is converted."""
    data, index = call.tensor("self"), call.tensor("index")
    if data is None or index is None or not data.dim():
        return False
    dim = call.arguments["dim"] % data.dim()
    pairs = enumerate(zip(data.shape, index.shape, strict=True))
    return all(str(a) == str(b) or {type(a), type(b)} == {int} for d, (a, b) in pairs if d != dim)


def _same_ranks(call: OpCall) -> bool:
    sequence, values = call.tensor("sorted_sequence"), call.tensor("self")
    return sequence is not None and values is not None and sequence.dim() == values.dim()


_SORTED = argument_is("sorted", True)
_KNOWN = holds(_known_parts, ReasonCode.SYMBOLIC, "the index spans a dynamic part of the data")

RULES = (
    OpRule("aten.index.Tensor", "indexing", dtypes={"self": ANY, "indices": INTEGER}),
    OpRule(
        "aten.index_select.default",
        "indexing",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(rank_between("index", 1, 1),),
    ),
    OpRule(
        "aten.index_put.default",
        "indexing",
        dtypes={"": FLOAT, "indices": INTEGER},
        constraints=(
            holds(_one_index, ReasonCode.ARGUMENT, "an inner dimension is indexed with others"),
            static_result,
        ),
    ),
    OpRule(
        "aten.gather.default",
        "indexing",
        dtypes={"self": ANY, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _KNOWN),
    ),
    *(
        OpRule(target, "indexing", dtypes={"": FLOAT, "index": INTEGER}, constraints=(_KNOWN,))
        for target in ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
    ),
    OpRule(
        "aten.embedding.default",
        "indexing",
        dtypes={"weight": FLOAT, "indices": INTEGER},
        constraints=(argument_is("sparse", False),),
    ),
    OpRule(
        "aten.slice_scatter.default",
        "indexing",
        dtypes={"": _VALUES},
        symbolic=frozenset({"start", "end"}),
    ),
    OpRule("aten.select_scatter.default", "indexing", dtypes={"": _VALUES}),
    OpRule("aten.topk.default", "indexing", constraints=(_SORTED,)),
    OpRule("aten.sort.default", "indexing"),
    OpRule(
        "aten.searchsorted.Tensor",
        "indexing",
        dtypes={"": FLOAT, "sorter": INTEGER},
        max_rank=MAX_RANK - 1,
        constraints=(
            holds(_same_ranks, ReasonCode.RANK, "the values have another rank than the sequence"),
            argument_is("sorter", None),
            static_argument("sorted_sequence", "self"),
        ),
    ),
)
