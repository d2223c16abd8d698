"""Gathering and scattering by index, sorting."""

from coreml_delegate.op_rules.constraints import argument_is, holds, rank_between, static_result
from coreml_delegate.op_rules.rule import FLOAT, INTEGER, OpCall, OpRule, ReasonCode

_VALUES = FLOAT | INTEGER


def _one_index(call: OpCall) -> bool:
    """One index of rank 1, or any of the first dimensions."""
    indices = call.arguments["indices"]
    if None not in indices:
        return True
    return all(i is None for i in indices[:-1]) and next(call.tensors("indices"))[1].dim() == 1


def _whole_but_for_dim(call: OpCall) -> bool:
    """Apart from the gathered dimension, index and data have the same shape."""
    data, index = call.tensor("self"), call.tensor("index")
    if data is None or index is None or not data.dim():
        return False
    dim = call.arguments["dim"] % data.dim()
    return all(
        a == b for d, (a, b) in enumerate(zip(data.shape, index.shape, strict=True)) if d != dim
    )


_SORTED = argument_is("sorted", True)
_WHOLE = holds(
    _whole_but_for_dim, ReasonCode.SHAPE, "the index spans a part of the other dimensions"
)

RULES = (
    OpRule("aten.index.Tensor", "indexing", dtypes={"self": _VALUES, "indices": INTEGER}),
    OpRule(
        "aten.index_select.default",
        "indexing",
        dtypes={"self": _VALUES, "index": INTEGER},
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
        dtypes={"self": _VALUES, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False), _WHOLE),
    ),
    *(
        OpRule(target, "indexing", dtypes={"": FLOAT, "index": INTEGER}, constraints=(_WHOLE,))
        for target in ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
    ),
    OpRule(
        "aten.embedding.default",
        "indexing",
        dtypes={"weight": FLOAT, "indices": INTEGER},
        constraints=(argument_is("sparse", False),),
    ),
    OpRule("aten.slice_scatter.default", "indexing", dtypes={"": _VALUES}),
    OpRule("aten.select_scatter.default", "indexing", dtypes={"": _VALUES}),
    OpRule("aten.topk.default", "indexing", constraints=(_SORTED,)),
    OpRule("aten.sort.default", "indexing"),
)
