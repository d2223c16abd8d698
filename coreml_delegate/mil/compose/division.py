"""Rounded quotients, and remainders.

MIL's ``floor_div`` and ``mod`` round quotients towards negative infinity. Integers stay integers:
fp32 does not represent all of them. Results are right for every pair of int32, but for divisions by
zero and of the least integer by -1, whose quotient is beyond int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coreml_delegate.mil.compose import Var, constant_of, is_float, mb


def floor_divide(x: Var, y: Var) -> Var:
    """``floor(x / y)``."""
    quotient = mb.floor_div(x=x, y=y)
    divisor = constant_of(y)
    if is_float(quotient) and divisor is not None and (divisor == 1).all():
        # coremltools replaces even a rounded quotient by 1 with the dividend:
        # apple/coremltools#2836.
        return mb.floor(x=quotient)
    return quotient


def truncate(x: Var) -> Var:
    """``sign(x) * floor(abs(x))``: ``x``, a float, rounded towards zero."""
    return mb.mul(x=mb.floor(x=mb.abs(x=x)), y=mb.sign(x=x))


def truncate_divide(x: Var, y: Var) -> Var:
    """``x / y`` rounded towards zero."""
    if is_float(x):
        # floor_div is one op: coremltools replaces x / y by a constant y with x * (1 / y), which
        # may fall below a whole number.
        quotient = floor_divide(mb.abs(x=x), mb.abs(x=y))
        return mb.mul(x=quotient, y=mb.mul(x=mb.sign(x=x), y=mb.sign(x=y)))
    magnitude = _constant_magnitude(y)
    if magnitude is not None:
        # floor((x + magnitude - 1) / magnitude) is the quotient of a negative x.
        raised = mb.add(x=x, y=magnitude - np.int32(1))
        dividend = mb.select(cond=mb.less(x=x, y=np.int32(0)), a=raised, b=x)
        quotient = mb.floor_div(x=dividend, y=magnitude)
        signs = np.sign(np.asarray(constant_of(y), np.int32))[()]
        return quotient if (signs > 0).all() else mb.mul(x=quotient, y=signs)
    quotient = mb.floor_div(x=x, y=y)
    # The floor of a negative quotient with a fraction is one too low.
    is_inexact = mb.not_equal(x=mb.mul(x=quotient, y=y), y=x)
    is_negative = mb.less(x=quotient, y=np.int32(0))
    is_low = mb.logical_and(x=is_negative, y=is_inexact)
    return mb.add(x=quotient, y=mb.cast(x=is_low, dtype="int32"))


def remainder(x: Var, y: Var) -> Var:
    """``x - y * floor(x / y)``, with the sign of ``y``."""
    return mb.mod(x=x, y=y)


def fmod(x: Var, y: Var) -> Var:
    """``x - y * trunc(x / y)``, with the sign of ``x``."""
    if is_float(x):
        magnitude, divisor = mb.abs(x=x), mb.abs(x=y)
        result = mb.mod(x=magnitude, y=divisor)
        known_divisor = constant_of(divisor)
        if known_divisor is None or not np.isfinite(known_divisor).all():
            # A finite number modulo infinity is the number.
            is_less = mb.less(x=magnitude, y=divisor)
            result = mb.select(cond=is_less, a=magnitude, b=result)
        return mb.mul(x=result, y=mb.sign(x=x))
    magnitude = _constant_magnitude(y)
    if magnitude is not None:
        is_negative = mb.less(x=x, y=np.int32(0))
        remainders = (mb.mod(x=x, y=-magnitude), mb.mod(x=x, y=magnitude))
        return mb.select(cond=is_negative, a=remainders[0], b=remainders[1])
    # mod has the sign of y; where that is not the sign of x, it is y too large.
    result = mb.mod(x=x, y=y)
    signs = mb.mul(x=mb.sign(x=x), y=mb.sign(x=result))
    is_off = mb.less(x=signs, y=np.int32(0))
    return mb.select(cond=is_off, a=mb.sub(x=result, y=y), b=result)


def _constant_magnitude(y: Var) -> Any:
    """Return ``abs(y)`` of constant integers, which is at least 1; else None."""
    value = constant_of(y)
    if value is None:
        return None
    magnitude = np.abs(np.asarray(value, np.int32))[()]
    return magnitude if (magnitude > 0).all() else None
