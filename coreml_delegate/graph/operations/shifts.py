"""Shifts of bits, by multiplication with powers of two, or floor division by them.

A negative shift, or a shift by the width of an element or more, shifts all bits out.
"""

from __future__ import annotations

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, const, wrap
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.integers import INT_MIN, shift_right_one, uniform
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.mil.compose import mb

_SIGNED = {DType.UINT8: DType.INT8, DType.UINT16: DType.INT16}
# Operations whose result has the operand's elements, only repeated or reshaped.
_COPIES = ("broadcast_in_dim", "broadcast", "reshape", "identity", "expand_dims")


def left(_: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose ``x << y`` as ``x * 2**y``, modulo 2**bits."""
    width = min(node.type.dtype.bits, 32)
    factors = [_as_int32(1 << count) for count in range(width)] + [np.int32(0)]
    return wrap(mb.mul(x=x, y=_look_up(factors, y, width)), node.type.dtype)


def right_arithmetic(_: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose an arithmetic shift to the right: ``floor(x / 2**y)`` of the signed value."""
    dtype = node.type.dtype
    if dtype in _SIGNED:
        x = wrap(x, _SIGNED[dtype])
    return wrap(_floor_shift(x, y, dtype.bits), dtype)


def right_logical(_: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose a logical shift to the right: ``floor(x / 2**y)`` of the unsigned value."""
    dtype = node.type.dtype
    if dtype.bits < 32:
        return wrap(_floor_shift(_unsigned(x, dtype), y, dtype.bits), dtype)
    if dtype.bits == 64:
        return _right_logical_64(x, y)
    count = uniform(y, like=x)
    if count is None:
        return _right_logical_32(x, y)
    return shift_right_word(x, count) if 0 <= count < 32 else mb.mul(x=x, y=np.int32(0))


def shift_right_word(x: Var, count: int) -> Var:
    """Return ``x >>> count`` of int32 values for a constant, 0 to 31: zeros come from above."""
    if count == 0:
        return x
    if count == 1:
        return shift_right_one(x)
    if count == 31:
        return mb.cast(x=mb.less(x=x, y=np.int32(0)), dtype="int32")
    quotient = mb.floor_div(x=x, y=np.int32(1 << count))
    return mb.mod(x=quotient, y=np.int32(1 << (32 - count)))


def _right_logical_32(x: Var, y: Var) -> Var:
    # 2**31 is no int32, so x >>> y is floor((x >>> 1) / 2**(y - 1)).
    divisors = [np.int32(1 << max(count - 1, 0)) for count in range(32)] + [np.int32(1)]
    is_in_range = [np.int32(1)] * 32 + [np.int32(0)]
    quotient = mb.floor_div(x=shift_right_one(x), y=_look_up(divisors, y, 32))
    quotient = mb.mul(x=quotient, y=_look_up(is_in_range, y, 32))
    return mb.select(cond=mb.equal(x=y, y=np.int32(0)), a=x, b=quotient)


def _right_logical_64(x: Var, y: Var) -> Var:
    # Shifts below 33 leave more than 31 bits of a negative number, which int32 cannot hold.
    addends = [0 if count < 33 else 1 << (64 - count) for count in range(65)]
    addend = _look_up([_as_int32(a) for a in addends], y, 64)
    is_negative = mb.cast(x=mb.less(x=x, y=np.int32(0)), dtype="int32")
    return mb.add(x=_floor_shift(x, y, 64), y=mb.mul(x=is_negative, y=addend))


def _floor_shift(x: Var, y: Var, width: int) -> Var:
    """Return ``floor(x / 2**y)``; y out of 0 to ``width`` counts as ``width``."""
    count = uniform(y, like=x)
    if count is not None:
        count = count if 0 <= count < width else width
        quotient = mb.floor_div(x=x, y=np.int32(1 << min(count, 30))) if count else x
        return mb.floor_div(x=quotient, y=np.int32(2)) if count > 30 else quotient
    divisors = [np.int32(1 << min(count, 30)) for count in range(width + 1)]
    quotient = mb.floor_div(x=x, y=_look_up(divisors, y, width))
    if width < 32:
        return quotient
    is_far = _look_up([np.int32(count > 30) for count in range(width + 1)], y, width)
    halved_quotient = mb.floor_div(x=quotient, y=np.int32(2))
    return mb.select(cond=mb.not_equal(x=is_far, y=np.int32(0)), a=halved_quotient, b=quotient)


def _look_up(table: list[np.int32], y: Var, width: int) -> Var:
    """Return ``table[y]``, or the last element for y out of range."""
    if y.val is not None:
        shifts = np.asarray(y.val)
        index = np.where((shifts >= 0) & (shifts < width), shifts, width)
        entries = np.array(table, np.int32)[index]
        return entries[()] if entries.ndim == 0 else const(entries)
    bounded = mb.maximum(x=mb.minimum(x=y, y=np.int32(width)), y=np.int32(-1))
    # An element in front is for negative shifts.
    indices = mb.add(x=bounded, y=np.int32(1))
    return mb.gather(x=const(np.array([table[-1], *table])), indices=indices, axis=0)


def _unsigned(x: Var, dtype: DType) -> Var:
    return x if dtype.is_unsigned else mb.mod(x=x, y=np.int32(1 << dtype.bits))


def _as_int32(number: int) -> np.int32:
    return np.int32(number if number < 1 << 31 else INT_MIN)


def are_disjoint(c: Composer, x: Value, y: Value) -> bool:
    """Whether two values have no common bits: ``x << n`` and ``x >>> width - n`` of a rotation."""
    if y.node.name == "shift_left":
        x, y = y, x
    if (x.node.name, y.node.name) != ("shift_left", "shift_right_logical"):
        return False
    left_shift, right_shift = x.node.operands[1], y.node.operands[1]
    left_count, right_count = (_constant(c, value) for value in (left_shift, right_shift))
    if left_count is not None and right_count is not None:
        in_range = min(left_count, right_count) >= 0 and max(left_count, right_count) < x.dtype.bits
        return in_range and left_count + right_count >= x.dtype.bits
    return _is_complement(c, left_shift, right_shift) or _is_complement(c, right_shift, left_shift)


def _is_complement(c: Composer, shift: Value, other: Value) -> bool:
    """Whether ``other`` is ``width - shift``, where width is the number of bits of an element."""
    difference = _original(other).node
    if difference.name != "subtract":
        return False
    width, subtrahend = difference.operands
    is_width = _constant(c, width) == shift.dtype.bits
    return is_width and _original(subtrahend) is _original(shift)


def _original(value: Value) -> Value:
    while value.node.name in _COPIES:
        value = value.node.operands[0]
    return value


def _constant(c: Composer, value: Value) -> int | None:
    var = c.var(value)
    return None if var is None else uniform(var)
