"""Gathering and scattering by index."""

from coreml_delegate.op_rules.constraints import argument_is, holds
from coreml_delegate.op_rules.rule import ANY, FLOAT, INTEGER, OpCall, OpRule, ReasonCode


def _one_index(call: OpCall) -> bool:
    indices = call.arguments["indices"]
    return sum(index is not None for index in indices) == 1


_ONE = holds(_one_index, ReasonCode.ARGUMENT, "more than one dimension is indexed at once")

RULES = (
    OpRule(
        "aten.index.Tensor",
        "indexing",
        dtypes={"self": FLOAT | INTEGER, "indices": INTEGER},
        constraints=(_ONE,),
    ),
    OpRule(
        "aten.index_select.default", "indexing", dtypes={"self": FLOAT | INTEGER, "index": INTEGER}
    ),
    OpRule(
        "aten.gather.default",
        "indexing",
        dtypes={"self": FLOAT, "index": INTEGER},
        constraints=(argument_is("sparse_grad", False),),
    ),
    OpRule(
        "aten.embedding.default",
        "indexing",
        dtypes={"weight": FLOAT, "indices": INTEGER},
        constraints=(argument_is("sparse", False),),
    ),
    OpRule("aten.slice_scatter.default", "indexing", dtypes={"": ANY}),
)
