"""Pooling."""

from typing import Any

from coreml_delegate.op_rules.constraints import (
    holds,
    only_result_used,
)
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode, target_name


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


def _fixed_windows(call: OpCall) -> bool:
    """Where windows lie does not depend on sizes that are known at run time only.

    Rounding up, PyTorch leaves a last window out that would begin beyond the input; with one as
    long as its stride and the padding, that never happens.
    """
    spatial = _spatial(call)
    if spatial is None or all(isinstance(n, int) for n in spatial):
        return True
    if any(d != 1 for d in _each(call, "dilation", spatial)):
        return False
    rows = zip(spatial, *(_each(call, name, spatial) for name in _WINDOW), strict=True)
    return not call.arguments["ceil_mode"] or all(
        isinstance(n, int) or s == 1 or k >= s + p for n, k, s, p in rows
    )


def _rounds_down(call: OpCall) -> bool:
    """Sizes are known, or no window reaches beyond the input and its padding."""
    spatial = _spatial(call)
    known = spatial is None or all(isinstance(n, int) for n in spatial)
    return known or not call.arguments["ceil_mode"]


_WINDOW = ("kernel_size", "stride", "padding")


def _spatial(call: OpCall) -> list[Any] | None:
    """Sizes of the dimensions that are pooled."""
    tensor, dims = call.tensor("self"), int(target_name(call.node.target).partition("pool")[2][0])
    return None if tensor is None else list(tensor.shape[-dims:])


def _each(call: OpCall, name: str, spatial: list[Any]) -> list[int]:
    """An argument of windows, a number per dimension."""
    value = call.arguments.get(name, 1)
    if name == "stride" and not value:
        value = call.arguments["kernel_size"]
    listed = [value] if isinstance(value, int) else list(value)
    return listed * len(spatial) if len(listed) == 1 else listed


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
_PLACED = holds(
    _fixed_windows, ReasonCode.SYMBOLIC, "where windows lie depends on a size that is dynamic"
)
_ROUNDED = holds(
    _rounds_down, ReasonCode.SYMBOLIC, "how many elements a window has depends on a dynamic size"
)


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
        OpRule(f"aten.avg_pool{dims}d.default", "pooling", constraints=(_ROUNDED,))
        for dims in (1, 2, 3)
    ),
    OpRule("aten.adaptive_avg_pool1d.default", "pooling"),
    OpRule("aten.adaptive_avg_pool2d.default", "pooling"),
    OpRule("aten._adaptive_avg_pool2d.default", "pooling"),
    *(
        OpRule(f"aten.{op}.default", "pooling", constraints=(_FEW_WINDOWS,))
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
