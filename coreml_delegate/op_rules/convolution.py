"""Convolutions."""

from coreml_delegate.op_rules.constraints import IsConstant, holds
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode


def _batched(call: OpCall) -> bool:
    tensor, weight = call.tensor("input"), call.tensor("weight")
    return tensor is None or weight is None or tensor.dim() == weight.dim()


_CONSTANTS = (IsConstant("weight"), IsConstant("bias"))
_BATCHED = holds(_batched, ReasonCode.RANK, "the input has no batch dimension")
_PLAIN = (
    "aten.conv1d.default",
    "aten.conv1d.padding",
    "aten.conv2d.default",
    "aten.conv2d.padding",
    "aten.conv3d.default",
)
_TRANSPOSED = (
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)

RULES = (
    *(
        OpRule(target, "convolution", constraints=(*_CONSTANTS, _BATCHED))
        for target in (*_PLAIN, *_TRANSPOSED)
    ),
    OpRule("aten.convolution.default", "convolution", constraints=_CONSTANTS),
)
