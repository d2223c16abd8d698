"""Pooling."""

from coreml_delegate.op_rules.constraints import (
    holds,
    only_result_used,
    static_argument,
)
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode


def _known_windows(call: OpCall) -> bool:
    """The input size is known, or there is one window."""
    tensor, size = call.tensor("self"), call.arguments["output_size"]
    if tensor is None:
        return False
    spatial = tensor.shape[-len(size) :]
    return all(isinstance(n, int) or out == 1 for n, out in zip(spatial, size, strict=True))


def _few_windows(call: OpCall) -> bool:
    """Each window of an uneven division is an op of its own."""
    return sum(call.arguments["output_size"]) <= _MANY


def _places_windows(call: OpCall) -> bool:
    """Where windows lie depends on the size of the input."""
    dilation = call.arguments.get("dilation", [1])
    dilated = dilation != 1 if isinstance(dilation, int) else any(d != 1 for d in dilation)
    return dilated or bool(call.arguments["ceil_mode"])


def _few_holes(call: OpCall) -> bool:
    """A dilated window is taken apart into one op per element of each side."""
    dilation, kernel = ([v] if isinstance(v, int) else v for v in _holes(call))
    return all(d == 1 for d in dilation) or sum(kernel) <= _MANY


def _holes(call: OpCall) -> tuple[int | list[int], int | list[int]]:
    return call.arguments["dilation"], call.arguments["kernel_size"]


_MANY = 64
_WINDOWS = holds(_known_windows, ReasonCode.SYMBOLIC, "the input size is dynamic")
_FEW_WINDOWS = holds(
    _few_windows, ReasonCode.ARGUMENT, f"more than {_MANY} windows along the dimensions, an op each"
)
_FEW_HOLES = holds(
    _few_holes, ReasonCode.ARGUMENT, f"a dilated window has more than {_MANY} elements, an op each"
)
_PLACED = static_argument("self", when=_places_windows)


RULES = (
    # Exporting it fixes every size.
    OpRule("aten.max_pool1d.default", "pooling", constraints=(_FEW_HOLES,)),
    *(
        OpRule(f"aten.max_pool{dims}d.default", "pooling", constraints=(_PLACED, _FEW_HOLES))
        for dims in (2, 3)
    ),
    *(
        OpRule(
            f"aten.max_pool{dims}d_with_indices.default",
            "pooling",
            constraints=(only_result_used(0), _PLACED, _FEW_HOLES),
        )
        for dims in (2, 3)
    ),
    *(
        OpRule(f"aten.avg_pool{dims}d.default", "pooling", constraints=(_PLACED,))
        for dims in (1, 2, 3)
    ),
    OpRule("aten.adaptive_avg_pool1d.default", "pooling", constraints=(_WINDOWS,)),
    OpRule("aten.adaptive_avg_pool2d.default", "pooling", constraints=(_WINDOWS,)),
    OpRule("aten._adaptive_avg_pool2d.default", "pooling", constraints=(_WINDOWS,)),
    *(
        OpRule(f"aten.{op}.default", "pooling", constraints=(_WINDOWS, _FEW_WINDOWS))
        for op in ("adaptive_avg_pool3d", "_adaptive_avg_pool3d")
    ),
    *(
        OpRule(
            f"aten.adaptive_max_pool{dims}d.default",
            "pooling",
            constraints=(only_result_used(0), _WINDOWS, _FEW_WINDOWS),
        )
        for dims in (2, 3)
    ),
)
