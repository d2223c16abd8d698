"""Shifts of bits: products with powers of two, and divisions by them.

Places below none, or as many as an element has bits or more, shift everything out.
"""

from __future__ import annotations

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.integers import INT_MIN, halved, uniform
from coreml_delegate.graph.tensor_types import DType

_SIGNED = {DType.UINT8: DType.INT8, DType.UINT16: DType.INT16}
# Operations that change neither what elements are nor how they relate to others'.
_COPIES = ("broadcast_in_dim", "broadcast", "reshape", "identity", "expand_dims")


def left(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose a shift to the left."""
    width = min(node.type.dtype.bits, 32)
    factors = [_as_int32(1 << places) for places in range(width)] + [np.int32(0)]
    return c.wrap(c.mb.mul(x=x, y=_look_up(c, factors, y, width)), node.type.dtype)


def right_arithmetic(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose a shift to the right that repeats the highest bit."""
    dtype = node.type.dtype
    if dtype in _SIGNED:
        x = c.wrap(x, _SIGNED[dtype])
    return c.wrap(_floor(c, x, y, dtype.bits), dtype)


def right_logical(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose a shift to the right that fills with zeros."""
    dtype = node.type.dtype
    if dtype.bits < 32:
        return c.wrap(_floor(c, _unsigned(c, x, dtype), y, dtype.bits), dtype)
    if dtype.bits == 64:
        return _right_logical_64(c, x, y)
    places = uniform(y, like=x)
    if places is None:
        return _right_logical_32(c, x, y)
    return shift_right_word(c, x, places) if 0 <= places < 32 else c.mb.mul(x=x, y=np.int32(0))


def shift_right_word(c: Composer, x: Var, places: int) -> Var:
    """Return the bits of int32 values moved down by a constant, 0 to 31, filled with zeros."""
    if places == 0:
        return x
    if places == 1:
        return halved(c, x)
    if places == 31:
        return c.mb.cast(x=c.mb.less(x=x, y=np.int32(0)), dtype="int32")
    quotient = c.mb.floor_div(x=x, y=np.int32(1 << places))
    return c.mb.mod(x=quotient, y=np.int32(1 << (32 - places)))


def _right_logical_32(c: Composer, x: Var, y: Var) -> Var:
    # 2**31 is no int32: the first place is divided off before.
    divisors = [np.int32(1 << max(places - 1, 0)) for places in range(32)] + [np.int32(1)]
    kept = [np.int32(1)] * 32 + [np.int32(0)]
    quotient = c.mb.floor_div(x=halved(c, x), y=_look_up(c, divisors, y, 32))
    quotient = c.mb.mul(x=quotient, y=_look_up(c, kept, y, 32))
    return c.mb.select(cond=c.mb.equal(x=y, y=np.int32(0)), a=x, b=quotient)


def _right_logical_64(c: Composer, x: Var, y: Var) -> Var:
    # Fewer places leave more than 31 bits of a negative number.
    added = [0 if places < 33 else 1 << (64 - places) for places in range(65)]
    number = _look_up(c, [_as_int32(a) for a in added], y, 64)
    below = c.mb.cast(x=c.mb.less(x=x, y=np.int32(0)), dtype="int32")
    return c.mb.add(x=_floor(c, x, y, 64), y=c.mb.mul(x=below, y=number))


def _floor(c: Composer, x: Var, y: Var, width: int) -> Var:
    """Return ``x / 2**y`` rounded down, where ``y`` is ``width`` if it is beyond 0 to ``width``."""
    places = uniform(y, like=x)
    if places is not None:
        places = places if 0 <= places < width else width
        whole = c.mb.floor_div(x=x, y=np.int32(1 << min(places, 30))) if places else x
        return c.mb.floor_div(x=whole, y=np.int32(2)) if places > 30 else whole
    divisors = [np.int32(1 << min(places, 30)) for places in range(width + 1)]
    whole = c.mb.floor_div(x=x, y=_look_up(c, divisors, y, width))
    if width < 32:
        return whole
    is_far = _look_up(c, [np.int32(places > 30) for places in range(width + 1)], y, width)
    rest = c.mb.floor_div(x=whole, y=np.int32(2))
    return c.mb.select(cond=c.mb.not_equal(x=is_far, y=np.int32(0)), a=rest, b=whole)


def _look_up(c: Composer, table: list[np.int32], y: Var, width: int) -> Var:
    """Return the element of a table for a number of places, the last one for impossible numbers."""
    if y.val is not None:
        places = np.asarray(y.val)
        index = np.where((places >= 0) & (places < width), places, width)
        found = np.array(table, np.int32)[index]
        return found[()] if found.ndim == 0 else c.const(found)
    bounded = c.mb.maximum(x=c.mb.minimum(x=y, y=np.int32(width)), y=np.int32(-1))
    # One more in front, for numbers below 0.
    indices = c.mb.add(x=bounded, y=np.int32(1))
    return c.mb.gather(x=c.const(np.array([table[-1], *table])), indices=indices, axis=0)


def _unsigned(c: Composer, x: Var, dtype: DType) -> Var:
    return x if dtype.is_unsigned else c.mb.mod(x=x, y=np.int32(1 << dtype.bits))


def _as_int32(number: int) -> np.int32:
    return np.int32(number if number < 1 << 31 else INT_MIN)


def are_disjoint(c: Composer, x: Value, y: Value) -> bool:
    """Whether two values are known to have no bit in common: the two halves of a rotation."""
    if y.node.name == "shift_left":
        x, y = y, x
    if (x.node.name, y.node.name) != ("shift_left", "shift_right_logical"):
        return False
    up, down = x.node.operands[1], y.node.operands[1]
    ups, downs = (_constant(c, value) for value in (up, down))
    if ups is not None and downs is not None:
        in_range = min(ups, downs) >= 0 and max(ups, downs) < x.dtype.bits
        return in_range and ups + downs >= x.dtype.bits
    return _is_complement(c, up, down) or _is_complement(c, down, up)


def _is_complement(c: Composer, places: Value, others: Value) -> bool:
    """Whether ``others`` is an element's width less ``places``."""
    difference = _original(others).node
    if difference.name != "subtract":
        return False
    width, taken = difference.operands
    is_width = _constant(c, width) == places.dtype.bits
    return is_width and _original(taken) is _original(places)


def _original(value: Value) -> Value:
    while value.node.name in _COPIES:
        value = value.node.operands[0]
    return value


def _constant(c: Composer, value: Value) -> int | None:
    var = c.var(value)
    return None if var is None else uniform(var)
