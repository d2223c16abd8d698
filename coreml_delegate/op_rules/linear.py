"""Matrix products and attention."""

from coreml_delegate.op_rules.constraints import argument_is, holds, rank_between
from coreml_delegate.op_rules.rule import BOOL, FLOAT, MAX_RANK, OpCall, OpRule, ReasonCode

_PRODUCTS = ("aten.mm.default", "aten.bmm.default")


def _two_operands(call: OpCall) -> bool:
    return sum(1 for _ in call.tensors("tensors")) == 2


def _explicit(call: OpCall) -> bool:
    equation = call.arguments["equation"]
    return "->" in equation and "..." not in equation


RULES = (
    *(OpRule(target, "linear") for target in _PRODUCTS),
    OpRule("aten.linear.default", "linear", constraints=(rank_between("weight", 2, 2),)),
    OpRule("aten.matmul.default", "linear", constraints=(rank_between("other", 2, MAX_RANK),)),
    OpRule(
        "aten.addmm.default",
        "linear",
        constraints=(argument_is("alpha", 1), argument_is("beta", 1)),
    ),
    OpRule(
        "aten.einsum.default",
        "linear",
        constraints=(
            holds(_two_operands, ReasonCode.ARGUMENT, "einsum takes two operands in Core ML"),
            holds(_explicit, ReasonCode.ARGUMENT, "the equation has an ellipsis or no result"),
            argument_is("path", None),
        ),
    ),
    OpRule(
        "aten.scaled_dot_product_attention.default",
        "linear",
        dtypes={"": FLOAT, "attn_mask": FLOAT | BOOL},
        constraints=(
            argument_is("dropout_p", 0.0),
            argument_is("enable_gqa", False),
        ),
    ),
)
