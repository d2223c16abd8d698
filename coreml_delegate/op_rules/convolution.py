"""Convolutions."""

from coreml_delegate.op_rules.constraints import is_constant
from coreml_delegate.op_rules.rule import OpRule

_TARGETS = (
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv2d.padding",
    "aten.convolution.default",
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
)

RULES = tuple(
    OpRule(target, "convolution", constraints=(is_constant("weight"), is_constant("bias")))
    for target in _TARGETS
)
