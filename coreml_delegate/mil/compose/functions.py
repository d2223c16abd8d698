"""Floating-point functions that MIL lacks.

They are accurate near zero and in their tails, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coreml_delegate.mil.compose import Var, cast, mb, number

# Below this, rounding 1 + x would cost digits of the result.
_SMALL = 0.35
# log(erfc(x) / t) + x * x as a polynomial of t = 2 / (2 + x), fitted at Chebyshev's nodes: the
# relative error of erfc is 2e-7 for all positive x.
_ERFC = (
    -1.265512228012085,
    1.0000237226486206,
    0.3740919530391693,
    0.09678418934345245,
    -0.18628805875778198,
    0.27886807918548584,
    -1.1352039575576782,
    1.488515853881836,
    -0.8221522569656372,
    0.1708727777004242,
)
# M. Giles, Approximating the erfinv function, 2012: with w = -log(1 - x * x), erf_inv(x) / x is a
# polynomial of w - 2.5 if w < 5, else of sqrt(w) - 3; coefficients from the constant term on.
_ERF_INV_CENTRE = (
    1.50140941,
    0.246640727,
    -0.00417768164,
    -0.00125372503,
    0.00021858087,
    -4.39150654e-06,
    -3.5233877e-06,
    3.43273939e-07,
    2.81022636e-08,
)
_ERF_INV_TAIL = (
    2.83297682,
    1.00167406,
    0.00943887047,
    -0.0076224613,
    0.00573950773,
    -0.00367342844,
    0.00134934322,
    0.000100950558,
    -0.000200214257,
)

# From here on, asinh(x) and acosh(x) are log(2 * x) in all digits of fp32.
_LOG_2X_FROM = 1024.0


def polynomial(x: Var, coefficients: Sequence[float]) -> Var:
    """A polynomial by Horner's rule; coefficients from the constant term on."""
    *lower, result = (number(coefficient, x) for coefficient in coefficients)
    for coefficient in reversed(lower):
        result = mb.add(x=mb.mul(x=x, y=result), y=coefficient)
    return result


def sign_bit(x: Var) -> Var:
    """The sign bit of floats as bool: true below zero, and for -0, as ``1 / -0 = -inf``."""
    zero = number(0, x)
    is_reciprocal_negative = mb.less(x=mb.real_div(x=number(1, x), y=x), y=zero)
    return mb.logical_or(x=is_reciprocal_negative, y=mb.less(x=x, y=zero))


def negate_where(condition: Var, x: Var) -> Var:
    """``-x`` where the condition holds, else ``x``."""
    return mb.select(cond=condition, a=mb.mul(x=x, y=number(-1, x)), b=x)


def is_infinite(x: Var) -> Var:
    """``abs(x) == inf``."""
    return mb.equal(x=mb.abs(x=x), y=number(np.inf, x))


def round_half_away_from_zero(x: Var) -> Var:
    """``sign(x) * (floor(a) + (a - floor(a) >= 0.5))`` with ``a = abs(x)``."""
    magnitude = mb.abs(x=x)
    floor = mb.floor(x=magnitude)
    is_half = mb.greater_equal(x=mb.sub(x=magnitude, y=floor), y=number(0.5, x))
    increment = cast(is_half, x)
    return mb.mul(x=mb.sign(x=x), y=mb.add(x=floor, y=increment))


def atan2(y: Var, x: Var) -> Var:
    """The angle of the point (x, y), from -pi to pi, by ``atan`` of a ratio in [0, 1].

    Coremltools' own divides by ``x``, and is wrong for ``y`` of zero: apple/coremltools#2769.
    """
    width, height = mb.abs(x=x), mb.abs(x=y)
    # The ratio of the shorter to the longer is at most 1, and 1 for two infinities.
    longer, shorter = mb.maximum(x=width, y=height), mb.minimum(x=width, y=height)
    is_positive = mb.greater(x=height, y=number(0, x))
    is_diagonal = mb.logical_and(x=mb.equal(x=width, y=height), y=is_positive)
    is_origin = mb.equal(x=longer, y=number(0, x))
    ratio = mb.real_div(x=shorter, y=mb.select(cond=is_origin, a=number(1, x), b=longer))
    angle = mb.atan(x=mb.select(cond=is_diagonal, a=number(1, x), b=ratio))
    is_steep = mb.greater(x=height, y=width)
    angle = mb.select(cond=is_steep, a=mb.sub(x=number(math.pi / 2, x), y=angle), b=angle)
    angle = mb.select(cond=sign_bit(x), a=mb.sub(x=number(math.pi, x), y=angle), b=angle)
    return negate_where(sign_bit(y), angle)


def cube_root(x: Var) -> Var:
    """``sign(x) * abs(x) ** (1 / 3)``."""
    root = mb.pow(x=mb.abs(x=x), y=number(1 / 3, x))
    return negate_where(mb.less(x=x, y=number(0, x)), root)


def exponential_minus_one(x: Var) -> Var:
    """``exp(x) - 1``: near 0 the series ``x + x**2 / 2! + ... + x**8 / 8!``."""
    series = polynomial(x, [1 / math.factorial(n) for n in range(1, 9)])
    direct = mb.sub(x=mb.exp(x=x), y=number(1, x))
    return mb.select(cond=_is_small(x), a=mb.mul(x=x, y=series), b=direct)


def log(x: Var, base: float = math.e) -> Var:
    """Return the logarithm; minus infinity of 0, because MIL's epsilon is 0."""
    result = mb.log(x=x, epsilon=number(0, x))
    return result if base == math.e else mb.mul(x=result, y=number(1 / math.log(base), x))


def rsqrt(x: Var) -> Var:
    """``1 / sqrt(x)``; infinity of 0, because MIL's epsilon is 0."""
    return mb.rsqrt(x=x, epsilon=number(0, x))


def log_plus_one(x: Var) -> Var:
    """``log(1 + x)``: near 0 ``2 * (r + r**3 / 3 + ... + r**11 / 11)`` with ``r = x / (2 + x)``."""
    ratio = mb.real_div(x=x, y=mb.add(x=x, y=number(2, x)))
    series = polynomial(mb.mul(x=ratio, y=ratio), [2 / (2 * n + 1) for n in range(6)])
    direct = log(mb.add(x=x, y=number(1, x)))
    return mb.select(cond=_is_small(x), a=mb.mul(x=ratio, y=series), b=direct)


def erfc(x: Var) -> Var:
    """``1 - erf(x)``: ``t * exp(p(t) - x**2)``, t = 2 / (2 + x); below 0 by symmetry."""
    magnitude = mb.abs(x=x)
    t = mb.real_div(x=number(2, x), y=mb.add(x=magnitude, y=number(2, x)))
    exponent = mb.sub(x=polynomial(t, _ERFC), y=mb.mul(x=magnitude, y=magnitude))
    tail = mb.mul(x=t, y=mb.exp(x=exponent))
    is_negative = mb.less(x=x, y=number(0, x))
    return mb.select(cond=is_negative, a=mb.sub(x=number(2, x), y=tail), b=tail)


def erf_inv(x: Var) -> Var:
    """The inverse of the error function, by Giles's polynomials."""
    w = mb.mul(x=log_plus_one(mb.mul(x=mb.mul(x=x, y=x), y=number(-1, x))), y=number(-1, x))
    centre = polynomial(mb.sub(x=w, y=number(2.5, x)), _ERF_INV_CENTRE)
    root = mb.sqrt(x=mb.maximum(x=w, y=number(0, x)))
    tail = polynomial(mb.sub(x=root, y=number(3, x)), _ERF_INV_TAIL)
    factor = mb.select(cond=mb.less(x=w, y=number(5, x)), a=centre, b=tail)
    is_one = mb.equal(x=mb.abs(x=x), y=number(1, x))
    return mb.mul(x=x, y=mb.select(cond=is_one, a=number(np.inf, x), b=factor))


def asinh(x: Var) -> Var:
    """``sign(x) * log(1 + a + a**2 / (sqrt(a**2 + 1) + 1))`` with ``a = abs(x)``."""
    magnitude = mb.abs(x=x)
    limited = mb.minimum(x=magnitude, y=number(_LOG_2X_FROM, x))
    # The root is long * sqrt(1 + (short / long) ** 2), with long = max(a, 1) and short = min(a, 1):
    # no square overflows fp16 (256 squared is beyond 65504).
    long, short = mb.maximum(x=limited, y=number(1, x)), mb.minimum(x=limited, y=number(1, x))
    ratio = mb.real_div(x=short, y=long)
    square = mb.add(x=mb.mul(x=ratio, y=ratio), y=number(1, x))
    root = mb.mul(x=long, y=mb.sqrt(x=square))
    share = mb.real_div(x=limited, y=mb.add(x=root, y=number(1, x)))
    excess = mb.add(x=limited, y=mb.mul(x=limited, y=share))
    return mb.mul(x=_add_log_of_large(_log_of_excess(excess), magnitude), y=mb.sign(x=x))


def acosh(x: Var) -> Var:
    """``log(x + sqrt(x * x - 1))``, where ``x * x - 1`` is ``(x - 1) * (x + 1)``; NaN below 1."""
    limited = mb.minimum(x=x, y=number(_LOG_2X_FROM, x))
    difference = mb.sub(x=limited, y=number(1, x))
    # Two roots, because the product may overflow fp16, and is positive again below -1.
    roots = mb.sqrt(x=difference), mb.sqrt(x=mb.add(x=limited, y=number(1, x)))
    excess = mb.add(x=difference, y=mb.mul(x=roots[0], y=roots[1]))
    return _add_log_of_large(_log_of_excess(excess), x)


def _add_log_of_large(result: Var, x: Var) -> Var:
    """``result + log(max(x, limit) / limit)``, where result is a function of ``min(x, limit)``."""
    large = mb.maximum(x=x, y=number(_LOG_2X_FROM, x))
    return mb.add(x=result, y=log(mb.mul(x=large, y=number(1 / _LOG_2X_FROM, x))))


def _log_of_excess(x: Var) -> Var:
    """``log(t) * x / (t - 1)`` with ``t = 1 + x``, rounded: ``log(1 + x)`` for any positive ``x``.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic".
    """
    total = mb.add(x=x, y=number(1, x))
    rounded = mb.sub(x=total, y=number(1, x))
    is_zero = cast(mb.equal(x=rounded, y=number(0, x)), x)
    logarithm = mb.add(x=log(total), y=is_zero)
    return mb.mul(x=x, y=mb.real_div(x=logarithm, y=mb.add(x=rounded, y=is_zero)))


def _is_small(x: Var) -> Var:
    return mb.less(x=mb.abs(x=x), y=number(_SMALL, x))
