"""Ops that make tensors from scalars."""

from coreml_delegate.op_rules.constraints import dtype_argument_in
from coreml_delegate.op_rules.rule import ANY, OpRule

_MADE = (dtype_argument_in(ANY),)
_TARGETS = (
    "aten.full.default",
    "aten.full_like.default",
    "aten.fill.Tensor",
    "aten.fill.Scalar",
    "aten.new_zeros.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.arange.start_step",
    "aten.scalar_tensor.default",
)

RULES = tuple(
    OpRule(target, "creation", dtypes={"": ANY}, constraints=_MADE, preserve=False)
    for target in _TARGETS
)
