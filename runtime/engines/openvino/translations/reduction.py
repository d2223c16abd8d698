"""Reductions along axes, and indices of extrema."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    dims,
    f32,
    ints,
    is_float,
    magnitude,
    output,
    rank,
    stable_topk,
)
from coreml_delegate.runtime.engines.openvino.plugin import integers, nan
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Ints, Result, Tensor

_Reduce = Callable[[Tensor, Sequence[int], bool], Result]


def _plain(reduce: Callable[..., Result]) -> _Reduce:
    return lambda x, axes, keep_dims: reduce(x, ints(axes), keep_dims)


def _log_sum_exp(x: Tensor, axes: Sequence[int], keep_dims: bool) -> Result:
    # An infinite peak would give inf - inf, so the peak is clamped to finite numbers.
    largest = float(np.finfo(np.float32).max)
    peak = ops.clamp(ops.reduce_max(x, ints(axes), True), -largest, largest)
    total = ops.reduce_sum(nan.exp(ops.subtract(x, peak)), ints(axes), keep_dims)
    return ops.add(ops.log(total), peak if keep_dims else ops.squeeze(peak, ints(axes)))


def _mean(x: Tensor, axes: Sequence[int], keep_dims: bool) -> Result:
    """Return the mean.

    OpenVINO 2026.4 takes ``x / sqrt(mean(x ** 2) + epsilon)`` for a root mean square norm also if
    the mean has one dimension less and broadcasts along another, or is that of single elements.
    """
    if all(dims(x)[axis] == 1 for axis in axes):
        return x if keep_dims or not axes else ops.squeeze(x, ints(axes))
    node = output(x).get_node()
    if keep_dims or node.get_type_name() not in ("Multiply", "Power"):
        return ops.reduce_mean(x, ints(axes), keep_dims)
    return ops.squeeze(ops.reduce_mean(x, ints(axes), True), ints(axes))


def _of_squares(total: _Reduce) -> _Reduce:
    return lambda x, axes, keep_dims: total(ops.multiply(x, x), axes, keep_dims)


# op type -> (graph, graph for integers or None to reduce them as floats); see ``_EXTREMA``
_REDUCTIONS: dict[str, tuple[_Reduce, _Reduce | None]] = {
    "reduce_l1_norm": (
        _plain(ops.reduce_l1),
        lambda x, axes, keep_dims: integers.exact_sum(magnitude(x), axes, keep_dims),
    ),
    "reduce_l2_norm": (_plain(ops.reduce_l2), None),
    "reduce_log_sum": (
        lambda x, axes, keep_dims: ops.log(ops.reduce_sum(x, ints(axes), keep_dims)),
        None,
    ),
    "reduce_log_sum_exp": (_log_sum_exp, None),
    "reduce_mean": (_mean, None),
    "reduce_prod": (_plain(ops.reduce_prod), integers.exact_product),
    "reduce_sum": (_plain(ops.reduce_sum), integers.exact_sum),
    "reduce_sum_square": (_of_squares(_plain(ops.reduce_sum)), _of_squares(integers.exact_sum)),
}


def _register(op_type: str, build: _Reduce, of_integers: _Reduce | None) -> None:
    def reduce(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Result:
        over = tuple(range(rank(x))) if axes is None else axes
        if is_float(x) or of_integers is None:
            return build(f32(x), over, keep_dims)
        return of_integers(x, over, keep_dims)

    translation(op_type)(reduce)


for _op_type, (_build, _of_integers) in _REDUCTIONS.items():
    _register(_op_type, _build, _of_integers)


# op type -> (graph, graph for integers, 1 for the largest or -1 for the smallest)
_EXTREMA: dict[str, tuple[_Reduce, _Reduce, int]] = {
    "reduce_max": (_plain(ops.reduce_max), integers.exact_extremum("max"), 1),
    "reduce_min": (_plain(ops.reduce_min), integers.exact_extremum("min"), -1),
}


def _register_extremum(op_type: str, build: _Reduce, of_integers: _Reduce, sign: int) -> None:
    def reduce(
        x: Tensor, axes: Ints | None = None, keep_dims: bool = False, *, exact_nan: bool = False
    ) -> Result:
        over = tuple(range(rank(x))) if axes is None else axes
        if not is_float(x):
            return of_integers(x, over, keep_dims)

        def extremum(x: Tensor) -> Result:
            return build(x, over, keep_dims)

        return nan.spread_nan(extremum, x, sign=sign) if exact_nan else extremum(x)

    translation(op_type)(reduce)


for _op_type, (_build, _of_ints, _sign) in _EXTREMA.items():
    _register_extremum(_op_type, _build, _of_ints, _sign)


def _register_argument(op_type: str, mode: str) -> None:
    def argument(
        x: Tensor,
        axis: int = -1,
        keep_dims: bool = False,
        output_dtype: str = "int32",  # noqa: ARG001 - the declared output type says the same
    ) -> Result:
        if is_float(x):
            x = nan.sort_key(x, largest=mode == "max")
        _, best = stable_topk(x, ints(1), axis, mode)  # the first of equal elements
        return best if keep_dims else ops.squeeze(best, ints((axis,)))

    translation(op_type)(argument)


_register_argument("reduce_argmax", "max")
_register_argument("reduce_argmin", "min")


@translation("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Result:
    """``y[i] = x[0] + ... + x[i]`` along ``axis``; ``exclusive`` leaves out ``x[i]``."""
    return ops.cum_sum(x, ints(axis), exclusive, reverse)
