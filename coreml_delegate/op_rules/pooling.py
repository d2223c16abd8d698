"""Pooling."""

from coreml_delegate.op_rules.constraints import argument_is, holds, only_result_used, rank_between
from coreml_delegate.op_rules.rule import Constraint, OpCall, OpRule, ReasonCode


def _known_windows(call: OpCall) -> bool:
    """The input size is known, or there is one window."""
    tensor, size = call.tensor("self"), call.arguments["output_size"]
    if tensor is None:
        return False
    spatial = tensor.shape[-len(size) :]
    return all(isinstance(n, int) or out == 1 for n, out in zip(spatial, size, strict=True))


def _last_window_inside(call: OpCall) -> bool:
    """Rounding up makes no window that begins beyond the input; PyTorch would leave it out."""
    arguments, tensor = call.arguments, call.tensor("self")
    if not arguments["ceil_mode"]:
        return True
    kernel = arguments["kernel_size"]
    if tensor is None:
        return False
    sides = (kernel, arguments["stride"] or kernel, arguments["padding"])
    spatial = tensor.shape[2:]
    kernels, strides, pads = (list(s) * (len(spatial) if len(s) == 1 else 1) for s in sides)
    return all(
        isinstance(n, int) and -(-(n + 2 * p - k) // s) * s < n + p
        for n, k, s, p in zip(spatial, kernels, strides, pads, strict=True)
    )


def _batched(dims: int) -> Constraint:
    return rank_between("self", dims + 2, dims + 2)


_WINDOWS = holds(_known_windows, ReasonCode.SYMBOLIC, "the input size is dynamic")
_INSIDE = holds(
    _last_window_inside, ReasonCode.ARGUMENT, "ceil_mode makes a window beyond the input"
)
_NO_CEIL = argument_is("ceil_mode", False)
_NO_DIVISOR = argument_is("divisor_override", None)
_NO_DILATION = argument_is("dilation", 1, [1], [1, 1], [1, 1, 1])

RULES = (
    OpRule("aten.max_pool1d.default", "pooling", constraints=(_batched(1), _NO_DILATION, _INSIDE)),
    OpRule("aten.max_pool2d.default", "pooling", constraints=(_batched(2), _NO_DILATION, _INSIDE)),
    OpRule("aten.max_pool3d.default", "pooling", constraints=(_batched(3), _NO_DILATION, _NO_CEIL)),
    OpRule(
        "aten.max_pool2d_with_indices.default",
        "pooling",
        constraints=(only_result_used(0), _batched(2), _NO_DILATION, _INSIDE),
    ),
    OpRule(
        "aten.max_pool3d_with_indices.default",
        "pooling",
        constraints=(only_result_used(0), _batched(3), _NO_DILATION, _NO_CEIL),
    ),
    OpRule("aten.avg_pool1d.default", "pooling", constraints=(_batched(1), _INSIDE)),
    OpRule("aten.avg_pool2d.default", "pooling", constraints=(_batched(2), _NO_DIVISOR, _INSIDE)),
    OpRule("aten.avg_pool3d.default", "pooling", constraints=(_batched(3), _NO_DIVISOR, _NO_CEIL)),
    OpRule("aten.adaptive_avg_pool1d.default", "pooling", constraints=(_WINDOWS,)),
    OpRule("aten.adaptive_avg_pool2d.default", "pooling", constraints=(_WINDOWS,)),
    OpRule("aten._adaptive_avg_pool2d.default", "pooling", constraints=(_WINDOWS,)),
)
