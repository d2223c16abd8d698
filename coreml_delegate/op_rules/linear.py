"""Matrix products and attention."""

from coreml_delegate.op_rules.constraints import argument_is, holds, rank_between
from coreml_delegate.op_rules.rule import BOOL, FLOAT, OpCall, OpRule, ReasonCode

_PRODUCTS = ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default")
_MAX_ATTENTION_RANK = 5


def _two_operands(call: OpCall) -> bool:
    return sum(1 for _ in call.tensors("tensors")) == 2


RULES = (
    *(OpRule(target, "linear") for target in _PRODUCTS),
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
            rank_between("query", 3, _MAX_ATTENTION_RANK),
        ),
    ),
)
