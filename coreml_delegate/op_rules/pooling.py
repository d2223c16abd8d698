"""Pooling."""

from coreml_delegate.op_rules.constraints import argument_is, holds, only_result_used
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode


def _regular(call: OpCall) -> bool:
    """Output size divides input size: every window has the same length."""
    tensor, size = call.tensor("self"), call.arguments["output_size"]
    if tensor is None:
        return False
    spatial = tensor.shape[-len(size) :]
    return all(isinstance(n, int) and n % out == 0 for n, out in zip(spatial, size, strict=True))


_EVEN_WINDOWS = holds(_regular, ReasonCode.ARGUMENT, "output size does not divide the input size")
_NO_CEIL = argument_is("ceil_mode", False)
_DIVISOR = argument_is("divisor_override", None)

RULES = (
    OpRule("aten.max_pool1d.default", "pooling"),
    OpRule("aten.max_pool2d.default", "pooling"),
    OpRule("aten.max_pool3d.default", "pooling", constraints=(_NO_CEIL,)),
    OpRule("aten.max_pool2d_with_indices.default", "pooling", constraints=(only_result_used(0),)),
    OpRule("aten.avg_pool1d.default", "pooling"),
    OpRule("aten.avg_pool2d.default", "pooling", constraints=(_DIVISOR,)),
    OpRule("aten.avg_pool3d.default", "pooling", constraints=(_DIVISOR, _NO_CEIL)),
    OpRule("aten.adaptive_avg_pool1d.default", "pooling", constraints=(_EVEN_WINDOWS,)),
    OpRule("aten.adaptive_avg_pool2d.default", "pooling", constraints=(_EVEN_WINDOWS,)),
    OpRule("aten._adaptive_avg_pool2d.default", "pooling", constraints=(_EVEN_WINDOWS,)),
)
