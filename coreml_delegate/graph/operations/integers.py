"""Integer division, remainder and power, and the signs and orders of integers.

MIL divides towards negative infinity, and says nothing of division by zero; StableHLO divides
towards zero, x / 0 has all bits set, and x rem 0 is x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.tensor_types import DType

INT_MIN = np.int32(-(2**31))


def uniform(var: Var, *, like: Var | None = None) -> int | None:
    """Return the element that all elements of a constant equal, None for any other value.

    Args:
        var: int32.
        like: A value that has to have the shape of ``var`` and this one broadcast together.
    """
    value = var.val
    if value is None:
        return None
    array = np.asarray(value)
    if like is not None and array.ndim and tuple(array.shape) != tuple(like.shape):
        return None
    first = int(array.reshape(-1)[0])
    return first if bool((array == first).all()) else None


def halved(c: Composer, x: Var) -> Var:
    """Return the bits of int32 values, shifted right by one; the highest is then 0."""
    half = c.mb.floor_div(x=x, y=np.int32(2))
    return c.mb.select(cond=c.mb.less(x=x, y=np.int32(0)), a=c.mb.sub(x=half, y=INT_MIN), b=half)


def divide(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose the quotient of integers."""
    dtype = node.types[0].dtype
    if dtype is DType.UINT32:
        return _divide_unsigned_words(c, x, y)
    special = (0,) if dtype.is_unsigned else (0, -1)
    if y.val is not None and not np.isin(y.val, special).any():
        return _towards_zero(c, x, y, dtype)
    is_zero = c.mb.equal(x=y, y=np.int32(0))
    if dtype.is_unsigned:
        quotient = c.mb.floor_div(x=x, y=c.mb.select(cond=is_zero, a=np.int32(1), b=y))
        return c.wrap(c.mb.select(cond=is_zero, a=np.int32(-1), b=quotient), dtype)
    # The least integer by -1 is beyond the range: that quotient is a difference, which wraps.
    is_negation = c.mb.equal(x=y, y=np.int32(-1))
    is_special = c.mb.logical_or(x=is_zero, y=is_negation)
    divisor = c.mb.select(cond=is_special, a=np.int32(1), b=y)
    quotient = _towards_zero(c, x, divisor, dtype)
    negated = c.mb.sub(x=np.int32(0), y=x)
    quotient = c.mb.select(cond=is_negation, a=negated, b=quotient)
    return c.wrap(c.mb.select(cond=is_zero, a=np.int32(-1), b=quotient), dtype)


def remainder(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose the rest of integer division: it has the sign of ``x``."""
    dtype = node.types[0].dtype
    if y.val is not None and (np.asarray(y.val) > 0).all() and dtype is not DType.UINT32:
        rest = c.mb.mod(x=x, y=y)
        if dtype.is_unsigned:
            return rest
        below = c.mb.less(x=x, y=np.int32(0))
        is_off = c.mb.logical_and(x=below, y=c.mb.not_equal(x=rest, y=np.int32(0)))
        return c.mb.select(cond=is_off, a=c.mb.sub(x=rest, y=y), b=rest)
    # With x / 0 = -1 the rest is x, and x - (-x) * -1 is 0.
    quotient = divide(c, node, x, y)
    return c.wrap(c.mb.sub(x=x, y=c.mb.mul(x=quotient, y=y)), dtype)


def _towards_zero(c: Composer, x: Var, y: Var, dtype: DType) -> Var:
    """Return a quotient without its fraction, where the divisor is not 0 and not -1."""
    quotient = c.mb.floor_div(x=x, y=y)
    if dtype.is_unsigned:
        return quotient
    rest = c.mb.sub(x=x, y=c.mb.mul(x=quotient, y=y))
    is_negative = c.mb.logical_xor(x=c.mb.less(x=x, y=np.int32(0)), y=c.mb.less(x=y, y=np.int32(0)))
    is_off = c.mb.logical_and(x=is_negative, y=c.mb.not_equal(x=rest, y=np.int32(0)))
    return c.mb.add(x=quotient, y=c.mb.cast(x=is_off, dtype="int32"))


def _divide_unsigned_words(c: Composer, x: Var, y: Var) -> Var:
    """Return the quotient of uint32, stored as the bits of an int32."""
    is_small = c.mb.greater(x=y, y=np.int32(0))
    divisor = c.mb.select(cond=is_small, a=y, b=np.int32(1))
    # The half of x divided and doubled is at most one too small.
    quotient = c.mb.mul(x=c.mb.floor_div(x=halved(c, x), y=divisor), y=np.int32(2))
    rest = c.mb.sub(x=x, y=c.mb.mul(x=quotient, y=divisor))
    quotient = c.mb.add(x=quotient, y=_at_least(c, rest, divisor))
    if y.val is not None and (np.asarray(y.val) > 0).all():
        return quotient
    # A divisor of 2**31 or more goes into x once at most.
    once = _at_least(c, x, y)
    is_zero = c.mb.equal(x=y, y=np.int32(0))
    once = c.mb.select(cond=is_zero, a=np.int32(-1), b=once)
    return c.mb.select(cond=is_small, a=quotient, b=once)


def _at_least(c: Composer, x: Var, y: Var) -> Var:
    """Return 1 where x >= y as uint32, else 0."""
    ordered = (c.ordered(x, DType.UINT32), c.ordered(y, DType.UINT32))
    return c.mb.cast(x=c.mb.greater_equal(x=ordered[0], y=ordered[1]), dtype="int32")


def high_product(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose the high half of the bits of a product, which has twice as many as its operands."""
    dtype = node.type.dtype
    if dtype.wraps:
        product = c.mb.mul(x=x, y=y)
        # The product of two uint16 may have bit 31, the int32's sign bit, which wrapping removes.
        return c.wrap(c.mb.floor_div(x=product, y=np.int32(1 << dtype.bits)), dtype)
    high = _high_word(c, x, y)
    if dtype.bits == 64:
        # Of operands that 32 bits hold, the product has 64: the next ones repeat its sign.
        is_negative = c.mb.cast(x=c.mb.less(x=high, y=np.int32(0)), dtype="int32")
        high = c.mb.sub(x=np.int32(0), y=is_negative)
    if not dtype.is_unsigned:
        return high
    # An operand with the highest bit is stored as a negative int32: too small by 2^bits.
    for var, other in ((x, y), (y, x)):
        is_large = c.mb.cast(x=c.mb.less(x=var, y=np.int32(0)), dtype="int32")
        high = c.mb.add(x=high, y=c.mb.mul(x=is_large, y=other))
    return high


def _high_word(c: Composer, x: Var, y: Var) -> Var:
    """Return the upper 32 bits of the product of int32 values, from products of their halves."""
    half = np.int32(1 << 16)
    (x_high, x_low), (y_high, y_low) = (
        (c.mb.floor_div(x=var, y=half), c.mb.mod(x=var, y=half)) for var in (x, y)
    )
    low = c.mb.mul(x=x_low, y=y_low)
    # The product of two low halves has no sign: its bit 31 is worth 2**31.
    carry = c.mb.mod(x=c.mb.floor_div(x=low, y=half), y=half)
    middle = c.mb.add(x=c.mb.mul(x=x_high, y=y_low), y=carry)
    other = c.mb.add(x=c.mb.mul(x=x_low, y=y_high), y=c.mb.mod(x=middle, y=half))
    high = c.mb.add(x=c.mb.mul(x=x_high, y=y_high), y=c.mb.floor_div(x=middle, y=half))
    return c.mb.add(x=high, y=c.mb.floor_div(x=other, y=half))


def power(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose a power of integers, modulo the range: x ** -n is 1 / x ** n without its fraction."""
    dtype = node.type.dtype
    exponent = uniform(y, like=x)
    if exponent is not None and (exponent >= 0 or dtype.is_unsigned):
        return c.wrap(_power_by(c, x, exponent % (1 << 32)), dtype)
    if dtype.is_unsigned:
        return c.wrap(_power_of(c, node, x, y), dtype)
    below = c.mb.less(x=y, y=np.int32(0))
    last_bit = c.mb.mod(x=y, y=np.int32(2))
    result = _power_of(c, node, x, c.mb.select(cond=below, a=last_bit, b=y))
    is_unit = c.mb.equal(x=c.mb.abs(x=x), y=np.int32(1))
    vanishes = c.mb.logical_and(x=below, y=c.mb.logical_not(x=is_unit))
    return c.wrap(c.mb.select(cond=vanishes, a=np.int32(0), b=result), dtype)


def _power_by(c: Composer, x: Var, exponent: int) -> Var:
    """Return a power by a constant, by repeated squaring."""
    result = c.mb.add(x=c.mb.mul(x=x, y=np.int32(0)), y=np.int32(1)) if exponent == 0 else None
    while exponent:
        if exponent & 1:
            result = x if result is None else c.mb.mul(x=result, y=x)
        exponent >>= 1
        if exponent:
            x = c.mb.mul(x=x, y=x)
    return result


def _power_of(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Return a power by repeated squaring, as often as the largest exponent needs it."""
    is_word = node.type.dtype is DType.UINT32
    shape = node.type.shape
    ones = c.full(1, node.type.with_dtype(DType.INT32))

    def is_left(_: Var, __: Var, exponent: Var) -> Var:
        some = c.mb.cast(x=c.mb.not_equal(x=exponent, y=np.int32(0)), dtype="int32")
        largest = c.mb.reduce_max(x=some, axes=list(range(len(shape)))) if shape else some
        return c.mb.greater(x=largest, y=np.int32(0))

    def step(result: Var, base: Var, exponent: Var) -> Any:
        is_odd = c.mb.not_equal(x=c.mb.mod(x=exponent, y=np.int32(2)), y=np.int32(0))
        result = c.mb.mul(x=result, y=c.mb.select(cond=is_odd, a=base, b=np.int32(1)))
        rest = halved(c, exponent) if is_word else c.mb.floor_div(x=exponent, y=np.int32(2))
        return result, c.mb.mul(x=base, y=base), rest

    start = (ones, c.broadcast(x, shape), c.broadcast(y, shape))
    return c.mb.while_loop(_cond=is_left, _body=step, loop_vars=start)[0]
