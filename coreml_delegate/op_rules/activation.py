"""Activations."""

from coreml_delegate.op_rules.constraints import argument_is, holds, is_constant
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode

_PLAIN = (
    "aten._log_softmax.default",
    "aten._softmax.default",
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
    "aten.sigmoid.default",
    "aten.silu.default",
    "aten.softmax.int",
    "aten.softplus.default",
    "aten.tanh.default",
)
_CHANNELED_RANK = 4


def _slopes(call: OpCall) -> bool:
    tensor, weight = call.tensor("self"), call.tensor("weight")
    if tensor is None or weight is None:
        return False
    return weight.numel() == 1 or tensor.dim() == _CHANNELED_RANK


RULES = (
    *(OpRule(target, "activation") for target in _PLAIN),
    OpRule(
        "aten.elu.default",
        "activation",
        constraints=(argument_is("scale", 1), argument_is("input_scale", 1)),
    ),
    OpRule(
        "aten.prelu.default",
        "activation",
        constraints=(
            is_constant("weight"),
            holds(_slopes, ReasonCode.RANK, "a slope per channel is taken at rank 4 alone"),
        ),
    ),
)
