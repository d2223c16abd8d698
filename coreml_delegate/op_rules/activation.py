"""Activations."""

from coreml_delegate.op_rules.constraints import argument_is, dtype_argument_in, is_constant
from coreml_delegate.op_rules.rule import FLOAT, OpRule

_PLAIN = (
    "aten.elu.default",
    "aten.gelu.default",
    "aten.hardsigmoid.default",
    "aten.hardswish.default",
    "aten.hardtanh.default",
    "aten.leaky_relu.default",
    "aten.mish.default",
    "aten.relu.default",
    "aten.relu6.default",
    "aten.sigmoid.default",
    "aten.silu.default",
    "aten.softplus.default",
    "aten.tanh.default",
)
_SOFTMAX = ("aten.softmax.int", "aten.log_softmax.int")
_CORE_SOFTMAX = ("aten._softmax.default", "aten._log_softmax.default")

RULES = (
    *(OpRule(target, "activation") for target in _PLAIN),
    *(OpRule(target, "activation", constraints=(dtype_argument_in(FLOAT),)) for target in _SOFTMAX),
    *(
        OpRule(target, "activation", constraints=(argument_is("half_to_float", False),))
        for target in _CORE_SOFTMAX
    ),
    OpRule("aten.prelu.default", "activation", constraints=(is_constant("weight"),)),
)
