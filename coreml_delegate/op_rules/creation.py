"""Ops that make tensors from scalars."""

from coreml_delegate.op_rules.constraints import contiguous_result, static_result
from coreml_delegate.op_rules.rule import ANY, OpRule

_TARGETS = (
    "aten.full.default",
    "aten.full_like.default",
    "aten.new_zeros.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.arange.start_step",
    "aten.scalar_tensor.default",
)

# What may be computed from shapes.
_SYMBOLIC = {
    "aten.full.default": frozenset({"size"}),
    "aten.arange.start_step": frozenset({"start", "end"}),
    "aten.scalar_tensor.default": frozenset({"s"}),
}

RULES = (
    *(
        OpRule(
            target,
            "creation",
            dtypes={"": ANY},
            symbolic=_SYMBOLIC.get(target, frozenset()),
            preserve=False,
        )
        for target in _TARGETS
    ),
    # Decomposed, a fill becomes a copy of a broadcast scalar.
    OpRule(
        "aten.fill.Tensor",
        "creation",
        dtypes={"": ANY},
        constraints=(static_result,),
    ),
    OpRule("aten.fill.Scalar", "creation", dtypes={"": ANY}),
    OpRule(
        "aten.copy.default",
        "creation",
        dtypes={"": ANY},
        constraints=(static_result,),
    ),
    *(
        OpRule(
            target,
            "creation",
            dtypes={"": ANY},
            constraints=(contiguous_result,),
            preserve=False,
        )
        for target in ("aten.empty.memory_format", "dim_order_ops._empty_dim_order.default")
    ),
)
