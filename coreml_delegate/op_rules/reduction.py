"""Reductions."""

from coreml_delegate.op_rules.rule import ANY, NUMERIC, OpRule

RULES = (
    OpRule("aten.mean.dim", "reduction"),
    OpRule("aten.mean.default", "reduction"),
    *(
        OpRule(target, "reduction", dtypes={"": ANY})
        for target in ("aten.sum.dim_IntList", "aten.sum.default", "aten.cumsum.default")
    ),
    *(
        OpRule(f"aten.{op}", "reduction", dtypes={"": NUMERIC})
        for op in ("amax.default", "amin.default", "max.default", "min.default")
    ),
    OpRule("aten.max.dim", "reduction"),
    OpRule("aten.min.dim", "reduction"),
    OpRule("aten.logsumexp.default", "reduction"),
    OpRule("aten.linalg_vector_norm.default", "reduction"),
    OpRule("aten.var.correction", "reduction"),
    *(
        OpRule(f"aten.any.{overload}", "reduction", dtypes={"": ANY})
        for overload in ("default", "dim", "dims")
    ),
    *(
        OpRule(f"aten.{op}.default", "reduction", dtypes={"": NUMERIC})
        for op in ("argmax", "argmin")
    ),
)
