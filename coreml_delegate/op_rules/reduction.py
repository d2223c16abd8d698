"""Reductions."""

from coreml_delegate.op_rules.constraints import argument_given, dtype_argument_in
from coreml_delegate.op_rules.rule import FLOAT, NUMERIC, OpRule

RULES = (
    OpRule("aten.mean.dim", "reduction", constraints=(dtype_argument_in(FLOAT),)),
    OpRule("aten.mean.default", "reduction", constraints=(dtype_argument_in(FLOAT),)),
    OpRule("aten.sum.dim_IntList", "reduction", constraints=(dtype_argument_in(FLOAT),)),
    OpRule("aten.sum.default", "reduction", constraints=(dtype_argument_in(FLOAT),)),
    OpRule("aten.amax.default", "reduction"),
    OpRule("aten.amin.default", "reduction"),
    OpRule("aten.linalg_vector_norm.default", "reduction", constraints=(dtype_argument_in(FLOAT),)),
    OpRule(
        "aten.argmax.default",
        "reduction",
        dtypes={"": NUMERIC},
        constraints=(argument_given("dim", issue="pytorch/executorch#11715"),),
    ),
    OpRule(
        "aten.argmin.default",
        "reduction",
        dtypes={"": NUMERIC},
        constraints=(argument_given("dim", issue="pytorch/executorch#11715"),),
    ),
)
