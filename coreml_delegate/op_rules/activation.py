"""Activations."""

from coreml_delegate.op_rules.constraints import IsConstant
from coreml_delegate.op_rules.rule import ANY, OpRule

_PLAIN = (
    "aten._log_softmax.default",
    "aten._softmax.default",
    "aten.elu.default",
    "aten.gelu.default",
    "aten.glu.default",
    "aten.hardsigmoid.default",
    "aten.hardswish.default",
    "aten.hardtanh.default",
    "aten.leaky_relu.default",
    "aten.log_softmax.int",
    "aten.mish.default",
    "aten.relu.default",
    "aten.relu6.default",
    "aten.silu.default",
    "aten.softmax.int",
    "aten.softplus.default",
)
_FLOATING = ("aten.sigmoid.default", "aten.tanh.default")

RULES = (
    *(OpRule(target, "activation") for target in _PLAIN),
    *(OpRule(target, "activation", dtypes={"": ANY}) for target in _FLOATING),
    OpRule("aten.prelu.default", "activation", constraints=(IsConstant("weight"),)),
)
