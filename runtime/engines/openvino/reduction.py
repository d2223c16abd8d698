"""Reductions along axes, and arguments of the extrema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import f32, ints, is_float, rank
from coreml_delegate.runtime.engines.openvino.registry import (
    Ints,
    Result,
    Tensor,
    register,
    translation,
)

_Reduce = Callable[[Tensor, Any, bool], Result]


def _log_sum_exp(x: Tensor, axes: Any, keep_dims: bool) -> Result:
    peak = ops.reduce_max(x, axes, True)
    total = ops.reduce_sum(ops.exp(ops.subtract(x, peak)), axes, keep_dims)
    return ops.add(ops.log(total), peak if keep_dims else ops.squeeze(peak, axes))


def _sum_square(x: Tensor, axes: Any, keep_dims: bool) -> Result:
    return ops.reduce_sum(ops.multiply(x, x), axes, keep_dims)


def _log_sum(x: Tensor, axes: Any, keep_dims: bool) -> Result:
    return ops.log(ops.reduce_sum(x, axes, keep_dims))


# op type -> (graph, whether integers must be reduced as floats)
_REDUCTIONS: dict[str, tuple[_Reduce, bool]] = {
    "reduce_l1_norm": (ops.reduce_l1, False),
    "reduce_l2_norm": (ops.reduce_l2, True),
    "reduce_log_sum": (_log_sum, True),
    "reduce_log_sum_exp": (_log_sum_exp, True),
    "reduce_max": (ops.reduce_max, False),
    "reduce_mean": (ops.reduce_mean, True),
    "reduce_min": (ops.reduce_min, False),
    "reduce_prod": (ops.reduce_prod, False),
    "reduce_sum": (ops.reduce_sum, False),
    "reduce_sum_square": (_sum_square, False),
}


def _register(op_type: str, build: _Reduce, as_float: bool) -> None:
    def reduce(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Result:
        if as_float and not is_float(x):
            x = f32(x)
        return build(x, ints(axes or tuple(range(rank(x)))), keep_dims)

    register(op_type, reduce)


for _op_type, (_build, _as_float) in _REDUCTIONS.items():
    _register(_op_type, _build, _as_float)


def _register_argument(op_type: str, mode: str) -> None:
    def argument(
        x: Tensor,
        axis: int = -1,
        keep_dims: bool = False,
        output_dtype: str = "int32",  # noqa: ARG001 - the declared output type says the same
    ) -> Result:
        best = ops.topk(x, ints(1), axis, mode, "value", index_element_type="i32").output(1)
        return best if keep_dims else ops.squeeze(best, ints((axis,)))

    register(op_type, argument)


_register_argument("reduce_argmax", "max")
_register_argument("reduce_argmin", "min")


@translation("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Result:
    """Running sum along one axis."""
    return ops.cum_sum(x, ints(axis), exclusive, reverse)
