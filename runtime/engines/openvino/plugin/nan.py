"""Subgraphs that propagate NaN, where a kernel of OpenVINO 2026.4's CPU plugin loses it.

The kernels compute extrema by x86 instructions that return the second operand where either is NaN,
and the order of operands depends on what the plugin fuses. They compute "greater" as "not less or
equal".

Source: openvino issues #35649 (Relu), #35839 (Minimum), #35928 (ReduceMin), #35930 (HardSigmoid),
#35935 (MaxPool) and #35898 (TopK).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import constant_data, ints, is_float, scalar
from coreml_delegate.runtime.engines.openvino.values import Tensor

# Greater than half of every finite number, in f32 and in bf16.
_BEYOND_HALVES = 2.0**127


def keep_nan(x: Tensor, result: Tensor) -> Any:
    """Return ``result``, computed from ``x`` element by element, but NaN where ``x`` is NaN."""
    return ops.select(_is_nan(x), x, result)


def maximum(x: Tensor, y: Tensor) -> Any:
    """Return the larger of two values, NaN where either is NaN."""
    return _extremum(ops.maximum, x, y)


def minimum(x: Tensor, y: Tensor) -> Any:
    """Return the smaller of two values, NaN where either is NaN."""
    return _extremum(ops.minimum, x, y)


def greater(x: Tensor, y: Tensor) -> Any:
    """Return whether ``x`` is greater; false where either is NaN."""
    return ops.less(y, x)


def greater_equal(x: Tensor, y: Tensor) -> Any:
    """Return whether ``x`` is greater or equal; false where either is NaN."""
    return ops.less_equal(y, x)


def exp(x: Tensor) -> Any:
    """Return ``e ** x``; the kernel returns infinity for NaN."""
    return keep_nan(x, ops.exp(x))


def softmax(x: Tensor, axis: int) -> Any:
    """Return the softmax along one axis: all NaN if an element is, where the kernel returns 0."""
    shares = ops.softmax(x, axis)
    total = ops.reduce_sum(shares, ints((axis,)), True)
    return ops.select(_is_nan(total), total, shares)


def sort_key(x: Tensor, *, largest: bool = True) -> Any:
    """Return numbers that sort as ``x`` does, with NaN replaced by an infinity.

    NaN is larger than all numbers if ``largest``, else smaller.
    """
    # Halving leaves room above the finite numbers: for infinity, and for NaN beyond infinity.
    half = ops.multiply(x, scalar(0.5, x))
    if largest:
        return _replace_nan(x, ops.minimum(half, scalar(_BEYOND_HALVES, x)), np.inf)
    return _replace_nan(x, ops.maximum(half, scalar(-_BEYOND_HALVES, x)), -np.inf)


def spread_nan(build: Callable[..., Any], *operands: Tensor, sign: int) -> Any:
    """Return the extrema that ``build`` selects, NaN where one of the candidates is NaN.

    A kernel's maximum starts at the lowest finite number, which is wrong if all elements are -inf;
    likewise the minimum. The result is the infinity there.

    Args:
        build: Builds a subgraph that selects the largest or the smallest of some elements.
        operands: The operands of ``build``.
        sign: 1 for the largest, -1 for the smallest.
    """
    if not all(is_float(operand) for operand in operands):
        return build(*operands)
    marks: list[Any] = []
    for x in operands:
        is_infinite = ops.equal(x, scalar(-sign * np.inf, x))
        infinity = ops.select(is_infinite, scalar(-sign, x), scalar(0, x))
        marks.append(_replace_nan(x, infinity, sign))
    mark = ops.multiply(build(*marks), scalar(sign, marks[0]))
    zero = scalar(0, mark)
    extrema = ops.select(ops.less(mark, zero), scalar(-sign * np.inf, mark), build(*operands))
    return ops.select(ops.greater(mark, zero), scalar(np.nan, mark), extrema)


def _extremum(build: Callable[[Any, Any], Any], x: Tensor, y: Tensor) -> Any:
    result = build(x, y)
    for operand in (x, y):
        data = constant_data(operand)
        if is_float(operand) and (data is None or np.isnan(data).any()):
            result = keep_nan(operand, result)
    return result


def _is_nan(x: Tensor) -> Any:
    # The plugin fuses this comparison with the ops around it, and does not fuse ``IsNaN``.
    return ops.not_equal(x, x)


def _replace_nan(x: Tensor, otherwise: Any, number: float) -> Any:
    return ops.select(_is_nan(x), scalar(number, x), otherwise)
