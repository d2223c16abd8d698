"""int32 arithmetic, exact and wrapping at 32 bits, where OpenVINO 2026.4's CPU plugin uses f32.

f32 holds integers up to 2**24. On int32, the plugin computes sums, differences, products,
negations, maxima, minima, sorting and running sums as int32, but comparisons, selections, divisions
and reductions as f32. This module builds the ops that round from the exact ops, and from
comparisons with zero, which rounding does not change.

Source: openvino issues #35830 (Divide) and #37956 (MatMul).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    dims,
    element_type,
    f32,
    ints,
    magnitude,
    output,
    rank,
    scalar,
)
from coreml_delegate.runtime.mil.dtypes import DType

_EXACT = 1 << 24
_WORD = 32
_HALF = np.int32(1 << 16)
_SHORT = (ov.Type.boolean, ov.Type.i8, ov.Type.u8)


def may_round(value: Any) -> bool:
    """Whether f32 may round a value: it is int32, and not known to be below 2**24."""
    if element_type(value) != ov.Type.i32:
        return False
    data = constant_data(value)
    if data is not None:
        return bool((np.abs(data.astype(np.int64)) >= _EXACT).any())
    node = output(value).get_node()
    return node.get_type_name() != "Convert" or node.get_input_element_type(0) not in _SHORT


Compare = Callable[[Any, Any], Any]


def exact_equality(compare: Compare) -> Compare:
    """Return ``compare`` (equal or not equal) made exact for integers: ``x - y`` against 0."""

    def build(x: Any, y: Any) -> Any:
        if not (may_round(x) and may_round(y)):
            return compare(x, y)
        difference = ops.subtract(x, y)
        return compare(difference, scalar(0, difference))

    return build


def exact_order(compare: Compare, as_equality: Compare, *, first: bool) -> Compare:
    """Return an ordering comparison made exact: ``max(x, y) - operand`` against 0.

    Args:
        compare: The plugin's op, such as ``less``.
        as_equality: Equal or not equal: how ``max(x, y)`` relates to the operand where the order
            holds.
        first: Whether the operand is ``x``; else it is ``y``.
    """

    def build(x: Any, y: Any) -> Any:
        # If one operand is below 2**24, rounding keeps the other on the same side of it.
        if not (may_round(x) and may_round(y)):
            return compare(x, y)
        above = ops.subtract(ops.maximum(x, y), x if first else y)
        return as_equality(above, scalar(0, above))

    return build


def exact_select(condition: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where a boolean condition holds, ``b`` elsewhere."""
    if not (may_round(a) or may_round(b)):
        return ops.select(condition, a, b)
    chosen = ops.convert(condition, element_type(a))
    return ops.add(ops.multiply(chosen, ops.subtract(a, b)), b)


def floor_divide(x: Any, y: Any) -> Any:
    """Return ``x / y`` rounded towards negative infinity, for int32."""
    exponents = _exponents(y)
    if exponents is not None:
        return _shift_right(x, exponents)
    quotient = ops.convert(ops.round(ops.divide(f32(x), f32(y)), "half_to_even"), "i32")
    # The quotient may be off by hundreds. The remainder is small, so f32 divides it within one.
    remainder = ops.subtract(x, ops.multiply(quotient, y))
    quotient = ops.add(quotient, ops.convert(ops.floor(ops.divide(f32(remainder), f32(y))), "i32"))
    remainder = ops.multiply(ops.subtract(x, ops.multiply(quotient, y)), ops.sign(y))
    size = magnitude(y)
    below = _is_negative(remainder)
    remainder = ops.add(remainder, ops.multiply(below, size))
    above = ops.subtract(ints(1), _is_negative(ops.subtract(remainder, size)))
    return ops.add(ops.subtract(quotient, below), above)


def floor_modulo(x: Any, y: Any) -> Any:
    """Return the remainder of ``x / y``, with the sign of ``y``, for int32."""
    exponents = _exponents(y)
    if exponents is not None:
        return ops.bitwise_and(x, ops.constant((1 << exponents) - 1))
    return ops.subtract(x, ops.multiply(floor_divide(x, y), y))


def _exponents(y: Any) -> NDArray[np.int32] | None:
    """Return the exponents of constant int32 powers of two; None for any other value."""
    data = constant_data(y)
    if data is None or element_type(y) != ov.Type.i32:
        return None
    wide = data.astype(np.int64)
    if (wide <= 0).any() or (wide & (wide - 1)).any():
        return None
    return np.log2(wide).astype(np.int32)


def _shift_right(x: Any, exponents: NDArray[np.int32]) -> Any:
    """Return int32 ``x >> exponents``, as multiplications: the plugin's own shift is slow."""
    # f32 is exact for a dividend without the shifted-out bits; if these are few, for two halves.
    masks = [-(1 << exponents)]
    if exponents.min() < _WORD - _EXACT.bit_length() + 1:
        masks = [masks[0] & -_HALF, masks[0] & (_HALF - 1)]
    scale = ops.constant(np.exp2(-exponents).astype(np.float32))
    parts = [
        ops.convert(ops.multiply(f32(ops.bitwise_and(x, ops.constant(mask))), scale), "i32")
        for mask in masks
    ]
    return parts[0] if len(parts) == 1 else ops.add(*parts)


def truncated_divide(x: Any, y: Any) -> Any:
    """Return ``x / y`` rounded towards zero, for int32."""
    quotient = floor_divide(x, y)
    remainder = ops.subtract(x, ops.multiply(quotient, y))
    # ``floor_divide`` rounds down; add one where the quotient is negative and not an integer.
    is_negative = ops.subtract(_is_negative(x), _is_negative(y))
    correction = ops.multiply(
        ops.multiply(is_negative, is_negative), magnitude(ops.sign(remainder))
    )
    return ops.add(quotient, correction)


def _is_negative(x: Any) -> Any:
    """Return 1 where ``x`` is below zero, else 0."""
    return ops.convert(ops.less(x, scalar(0, x)), "i32")


def wrap_to(x: Any, dtype: DType) -> Any:
    """Return int32 values wrapped to the range of ``dtype``, which is int32 in the graph."""
    is_signed = dtype.numpy.kind == "i"
    least, span = ints(-(1 << (dtype.bits - 1)) if is_signed else 0), ints((1 << dtype.bits) - 1)
    return ops.add(ops.bitwise_and(ops.subtract(x, least), span), least)


Reduce = Callable[[Any, Sequence[int], bool], Any]


def exact_sum(x: Any, axes: Sequence[int], keep_dims: bool) -> Any:
    """Return the sum along axes, for int32: the last of the running sums."""
    for axis in axes:
        if not dims(x)[axis]:  # may be empty: pad, so that there is a last sum
            before = ints([int(index == axis % rank(x)) for index in range(rank(x))])
            x = ops.pad(x, before, ints([0] * rank(x)), "constant", scalar(0, x))
        x = ops.gather(ops.cum_sum(x, ints(axis), False, False), ints([-1]), ints(axis))
    return _drop_axes(x, axes, keep_dims)


def exact_product(x: Any, axes: Sequence[int], keep_dims: bool) -> Any:
    """Return the product along axes, for int32; rounded where a size is not known."""
    if not all(dims(x)[axis] for axis in axes):
        return ops.reduce_prod(x, ints(list(axes)), keep_dims)
    for axis in axes:
        # The kernel of the reduction multiplies as f32, so halves are multiplied elementwise.
        size = dims(x)[axis] or 0
        while size > 1:
            half = size // 2
            parts = [half, half, size - 2 * half]
            first, second, last = ops.variadic_split(x, ints(axis), ints(parts)).outputs()
            x = ops.multiply(first, second)
            if size % 2:
                x = ops.concat([x, last], axis)
            size -= half
    return _drop_axes(x, axes, keep_dims)


def exact_extremum(mode: str) -> Reduce:
    """Return a reduction to the largest (``max``) or the smallest (``min``), for int32."""

    def build(x: Any, axes: Sequence[int], keep_dims: bool) -> Any:
        for axis in axes:
            best = ops.topk(x, ints(1), axis % rank(x), mode, "value", index_element_type="i32")
            x = best.output(0)
        return _drop_axes(x, axes, keep_dims)

    return build


def _drop_axes(x: Any, axes: Sequence[int], keep_dims: bool) -> Any:
    return x if keep_dims else ops.squeeze(x, ints(list(axes)))
