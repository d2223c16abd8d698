"""Formulations that keep NaN, where a kernel of OpenVINO 2026.4's CPU plugin loses it.

Its kernels bound by x86 instructions whose result is the second operand where either is NaN, and
which operand that is depends on what the plugin fuses; "greater" they take for "not less or equal".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import constant_data, ints, is_float, scalar
from coreml_delegate.runtime.engines.openvino.values import Tensor

# Beyond the half of every finite number, in f32 and in bf16.
_BEYOND_HALVES = 2.0**127


def keep_nan(x: Tensor, result: Tensor) -> Any:
    """``result``, computed of ``x`` element by element, and NaN where ``x`` is."""
    return ops.select(_is_nan(x), x, result)


def maximum(x: Tensor, y: Tensor) -> Any:
    """The larger of two, NaN where either is."""
    return _extremum(ops.maximum, x, y)


def minimum(x: Tensor, y: Tensor) -> Any:
    """The smaller of two, NaN where either is."""
    return _extremum(ops.minimum, x, y)


def greater(x: Tensor, y: Tensor) -> Any:
    """Whether ``x`` is greater; false beside NaN."""
    return ops.less(y, x)


def greater_equal(x: Tensor, y: Tensor) -> Any:
    """Whether ``x`` is as great or greater; false beside NaN."""
    return ops.less_equal(y, x)


def exp(x: Tensor) -> Any:
    """``e ** x``; the kernel's is infinite for NaN."""
    return keep_nan(x, ops.exp(x))


def softmax(x: Tensor, axis: int) -> Any:
    """Softmax along one axis: all NaN where one element is; the kernel has zeros for the others."""
    shares = ops.softmax(x, axis)
    total = ops.reduce_sum(shares, ints((axis,)), True)
    return ops.select(_is_nan(total), total, shares)


def sort_key(x: Tensor, *, largest: bool = True) -> Any:
    """Numbers in the order of ``x``, none of them NaN.

    Args:
        x: Floating-point values.
        largest: Whether NaN is larger than all numbers, or smaller.
    """
    # Half of every number leaves room beyond for infinity, and beyond that for NaN.
    half = ops.multiply(x, scalar(0.5, x))
    if largest:
        return _replace_nan(x, ops.minimum(half, scalar(_BEYOND_HALVES, x)), np.inf)
    return _replace_nan(x, ops.maximum(half, scalar(-_BEYOND_HALVES, x)), -np.inf)


def spread_nan(build: Callable[..., Any], *operands: Tensor, sign: int) -> Any:
    """What a selecting ``build`` makes of its operands, NaN where it selects from one.

    Args:
        build: Selects the largest or the smallest of some elements.
        operands: What it selects from.
        sign: 1 for the largest, -1 for the smallest.
    """
    if not all(is_float(operand) for operand in operands):
        return build(*operands)
    marks = build(*(_replace_nan(x, scalar(0, x), sign) for x in operands))
    found = ops.not_equal(marks, scalar(0, marks))
    return ops.select(found, scalar(np.nan, marks), build(*operands))


def _extremum(of_both: Callable[[Any, Any], Any], x: Tensor, y: Tensor) -> Any:
    result = of_both(x, y)
    for operand in (x, y):
        if is_float(operand) and not _is_constant_without_nan(operand):
            result = keep_nan(operand, result)
    return result


def _is_constant_without_nan(x: Tensor) -> bool:
    """Whether ``x`` is a constant without NaN."""
    data = constant_data(x)
    return data is not None and not np.isnan(data).any()


def _is_nan(x: Tensor) -> Any:
    # The plugin computes this in the loop of the ops around it, and ``IsNaN`` apart.
    return ops.not_equal(x, x)


def _replace_nan(x: Tensor, otherwise: Any, number: float) -> Any:
    return ops.select(_is_nan(x), scalar(number, x), otherwise)
