"""Integer division, remainder, power and high product.

MIL rounds quotients towards negative infinity, and division by zero is not specified. StableHLO
rounds towards zero, ``x / 0`` has all bits set, and ``x rem 0`` is x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, ordered, wrap
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.mil.compose import division, mb

INT_MIN = np.int32(-(2**31))


def uniform(var: Var, *, like: Var | None = None) -> int | None:
    """Return the number that all elements of an int32 constant equal, or None.

    It is None, too, if the broadcast shape of both is not the shape of ``like``.
    """
    value = var.val
    if value is None:
        return None
    array = np.asarray(value)
    if like is not None and array.ndim and tuple(array.shape) != tuple(like.shape):
        return None
    first = int(array.reshape(-1)[0])
    return first if bool((array == first).all()) else None


def shift_right_one(x: Var) -> Var:
    """Shift the bits of int32 values right by one, with 0 as the highest bit."""
    half = mb.floor_div(x=x, y=np.int32(2))
    return mb.select(cond=mb.less(x=x, y=np.int32(0)), a=mb.sub(x=half, y=INT_MIN), b=half)


def divide(_: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose the quotient of integers, rounded towards zero."""
    dtype = node.types[0].dtype
    if dtype is DType.UINT32:
        return _divide_unsigned_words(x, y)
    special, quotient_of = (0, -1), division.truncate_divide
    if dtype.is_unsigned:
        special, quotient_of = (0,), division.floor_divide
    if y.val is not None and not np.isin(y.val, special).any():
        return quotient_of(x, y)
    is_zero = mb.equal(x=y, y=np.int32(0))
    if dtype.is_unsigned:
        quotient = quotient_of(x, mb.select(cond=is_zero, a=np.int32(1), b=y))
        return wrap(mb.select(cond=is_zero, a=np.int32(-1), b=quotient), dtype)
    # The least integer by -1 overflows: division by -1 is the difference 0 - x, which wraps.
    is_negation = mb.equal(x=y, y=np.int32(-1))
    is_special = mb.logical_or(x=is_zero, y=is_negation)
    divisor = mb.select(cond=is_special, a=np.int32(1), b=y)
    quotient = quotient_of(x, divisor)
    negated = mb.sub(x=np.int32(0), y=x)
    quotient = mb.select(cond=is_negation, a=negated, b=quotient)
    return wrap(mb.select(cond=is_zero, a=np.int32(-1), b=quotient), dtype)


def remainder(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose ``x - y * trunc(x / y)`` of integers, which has the sign of ``x``."""
    dtype = node.types[0].dtype
    if dtype is DType.UINT32:
        return mb.sub(x=x, y=mb.mul(x=divide(c, node, x, y), y=y))
    remainder_of = division.remainder if dtype.is_unsigned else division.fmod
    if y.val is not None and np.all(y.val):
        return remainder_of(x, y)
    is_zero = mb.equal(x=y, y=np.int32(0))
    result = remainder_of(x, mb.select(cond=is_zero, a=np.int32(1), b=y))
    return mb.select(cond=is_zero, a=x, b=result)


def _divide_unsigned_words(x: Var, y: Var) -> Var:
    """Return the quotient of uint32, stored as the bits of int32."""
    is_small = mb.greater(x=y, y=np.int32(0))
    divisor = mb.select(cond=is_small, a=y, b=np.int32(1))
    # 2 * floor(floor(x / 2) / y) is at most one too small.
    quotient = mb.mul(x=mb.floor_div(x=shift_right_one(x), y=divisor), y=np.int32(2))
    remainder = mb.sub(x=x, y=mb.mul(x=quotient, y=divisor))
    quotient = mb.add(x=quotient, y=_is_at_least(remainder, divisor))
    if y.val is not None and (np.asarray(y.val) > 0).all():
        return quotient
    # With a divisor of 2**31 or more, the quotient is 0 or 1.
    large_quotient = _is_at_least(x, y)
    is_zero = mb.equal(x=y, y=np.int32(0))
    large_quotient = mb.select(cond=is_zero, a=np.int32(-1), b=large_quotient)
    return mb.select(cond=is_small, a=quotient, b=large_quotient)


def _is_at_least(x: Var, y: Var) -> Var:
    """Return 1 where x >= y as uint32, else 0."""
    x, y = ordered(x, DType.UINT32), ordered(y, DType.UINT32)
    return mb.cast(x=mb.greater_equal(x=x, y=y), dtype="int32")


def high_product(_: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose ``floor(x * y / 2**n)`` for integers of n bits: the high half of the product."""
    dtype = node.type.dtype
    if dtype.wraps:
        product = mb.mul(x=x, y=y)
        # The product of two uint16 may set bit 31, the sign bit of int32; wrapping corrects that.
        return wrap(mb.floor_div(x=product, y=np.int32(1 << dtype.bits)), dtype)
    high = _high_word(x, y)
    if dtype.bits == 64:
        # The product of operands stored in 32 bits has 64 bits; higher bits repeat the sign.
        is_negative = mb.cast(x=mb.less(x=high, y=np.int32(0)), dtype="int32")
        high = mb.sub(x=np.int32(0), y=is_negative)
    if not dtype.is_unsigned:
        return high
    # An operand with the highest bit set is stored as a negative int32, too small by 2**n.
    for var, other in ((x, y), (y, x)):
        is_large = mb.cast(x=mb.less(x=var, y=np.int32(0)), dtype="int32")
        high = mb.add(x=high, y=mb.mul(x=is_large, y=other))
    return high


def _high_word(x: Var, y: Var) -> Var:
    """Return the upper 32 bits of the product of int32 values, from products of 16-bit halves.

    Source: Warren, Hacker's Delight, section 8-2 (mulhs).
    """
    half = np.int32(1 << 16)
    (x_high, x_low), (y_high, y_low) = (
        (mb.floor_div(x=var, y=half), mb.mod(x=var, y=half)) for var in (x, y)
    )
    low = mb.mul(x=x_low, y=y_low)
    # The product of two low halves is unsigned.
    carry = mb.mod(x=mb.floor_div(x=low, y=half), y=half)
    middle = mb.add(x=mb.mul(x=x_high, y=y_low), y=carry)
    cross = mb.add(x=mb.mul(x=x_low, y=y_high), y=mb.mod(x=middle, y=half))
    high = mb.add(x=mb.mul(x=x_high, y=y_high), y=mb.floor_div(x=middle, y=half))
    return mb.add(x=high, y=mb.floor_div(x=cross, y=half))


def power(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose ``x ** y`` of integers, modulo 2**bits; ``x ** -n`` is ``trunc(1 / x ** n)``."""
    dtype = node.type.dtype
    exponent = uniform(y, like=x)
    if exponent is not None and (exponent >= 0 or dtype.is_unsigned):
        return wrap(_power_by_constant(x, exponent % (1 << 32)), dtype)
    if dtype.is_unsigned:
        return wrap(_power_by_loop(c, node, x, y), dtype)
    is_negative = mb.less(x=y, y=np.int32(0))
    last_bit = mb.mod(x=y, y=np.int32(2))
    result = _power_by_loop(c, node, x, mb.select(cond=is_negative, a=last_bit, b=y))
    is_unit = mb.equal(x=mb.abs(x=x), y=np.int32(1))
    vanishes = mb.logical_and(x=is_negative, y=mb.logical_not(x=is_unit))
    return wrap(mb.select(cond=vanishes, a=np.int32(0), b=result), dtype)


def _power_by_constant(x: Var, exponent: int) -> Var:
    """Return ``x ** exponent`` for a constant, by repeated squaring."""
    result = mb.add(x=mb.mul(x=x, y=np.int32(0)), y=np.int32(1)) if exponent == 0 else None
    while exponent:
        if exponent & 1:
            result = x if result is None else mb.mul(x=result, y=x)
        exponent >>= 1
        if exponent:
            x = mb.mul(x=x, y=x)
    return result


def _power_by_loop(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Return ``x ** y`` by repeated squaring, in a loop until all exponents are 0."""
    is_word = node.type.dtype is DType.UINT32
    shape = node.type.shape
    result_start = c.full(1, node.type.with_dtype(DType.INT32))

    def has_exponents(_: Var, __: Var, exponent: Var) -> Var:
        nonzero = mb.cast(x=mb.not_equal(x=exponent, y=np.int32(0)), dtype="int32")
        largest = mb.reduce_max(x=nonzero, axes=list(range(len(shape)))) if shape else nonzero
        return mb.greater(x=largest, y=np.int32(0))

    def step(result: Var, base: Var, exponent: Var) -> Any:
        is_odd = mb.not_equal(x=mb.mod(x=exponent, y=np.int32(2)), y=np.int32(0))
        result = mb.mul(x=result, y=mb.select(cond=is_odd, a=base, b=np.int32(1)))
        halved_exponent = (
            shift_right_one(exponent) if is_word else mb.floor_div(x=exponent, y=np.int32(2))
        )
        return result, mb.mul(x=base, y=base), halved_exponent

    start = (result_start, c.broadcast(x, shape), c.broadcast(y, shape))
    return mb.while_loop(_cond=has_exponents, _body=step, loop_vars=start)[0]
