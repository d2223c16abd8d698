"""Reductions."""

from coreml_delegate.op_rules.constraints import argument_given, argument_is, holds
from coreml_delegate.op_rules.rule import ANY, BOOL, FLOAT, NUMERIC, OpCall, OpRule, ReasonCode


def _cast_last(call: OpCall) -> bool:
    """Casting after the sum gives the same as before it."""
    tensor, dtype = call.tensor("self"), call.arguments["dtype"]
    return dtype in FLOAT or tensor is None or tensor.dtype not in FLOAT or dtype is None


_CAST_LAST = holds(_cast_last, ReasonCode.ARGUMENT, "a sum of floats is taken as integers")
_NO_FLATTENING = argument_given("dim", issue="pytorch/executorch#11715")

RULES = (
    OpRule("aten.mean.dim", "reduction"),
    OpRule("aten.mean.default", "reduction"),
    *(
        OpRule(target, "reduction", dtypes={"": dtypes}, constraints=(_CAST_LAST,))
        for target, dtypes in (
            ("aten.sum.dim_IntList", ANY),
            ("aten.sum.default", ANY),
            ("aten.cumsum.default", NUMERIC),
        )
    ),
    *(
        OpRule(f"aten.{op}", "reduction", dtypes={"": NUMERIC})
        for op in ("amax.default", "amin.default", "max.default", "min.default")
    ),
    OpRule("aten.max.dim", "reduction"),
    OpRule("aten.min.dim", "reduction"),
    OpRule("aten.logsumexp.default", "reduction"),
    OpRule("aten.linalg_vector_norm.default", "reduction"),
    OpRule(
        "aten.var.correction", "reduction", constraints=(argument_is("correction", None, 0, 1),)
    ),
    *(
        OpRule(f"aten.any.{overload}", "reduction", dtypes={"": BOOL})
        for overload in ("default", "dim", "dims")
    ),
    *(
        OpRule(
            f"aten.{op}.default",
            "reduction",
            dtypes={"": NUMERIC},
            constraints=(_NO_FLATTENING,),
        )
        for op in ("argmax", "argmin")
    ),
)
