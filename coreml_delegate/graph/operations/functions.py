"""Floating-point functions that MIL lacks, composed from its ops.

They are accurate near zero and in their tails, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.tensor_types import DType

# Below this, rounding 1 + x would cost digits of the result.
_SMALL = 0.35
# Above this, where x * x may overflow fp32, log(x + sqrt(x * x + 1)) is log(2 * x) in all digits.
_LARGE = 1e9

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

Compose = Callable[..., Var]


def in_fp32(function: Callable[..., Var]) -> Compose:
    """Return a compose function that computes in fp32, whatever the operands' storage dtype."""

    def compose(c: Composer, node: Node, *operands: Var) -> Var:
        storage = node.types[0].dtype.storage_dtype
        if storage == "fp32":
            return function(c, *operands)
        floats = [c.mb.cast(x=operand, dtype="fp32") for operand in operands]
        return c.mb.cast(x=function(c, *floats), dtype=storage)

    return compose


def polynomial(c: Composer, x: Var, coefficients: Sequence[float]) -> Var:
    """Evaluate a polynomial in fp32 by Horner's rule; coefficients from the constant term on."""
    *lower, result = (np.float32(coefficient) for coefficient in coefficients)
    for coefficient in reversed(lower):
        result = c.mb.add(x=c.mb.mul(x=x, y=result), y=coefficient)
    return result


def sign_bit(c: Composer, x: Var, dtype: DType) -> Var:
    """Return the sign bit of floats: true below zero, and for -0, by ``1 / -0 = -inf``."""
    zero, one = (dtype.storage_numpy.type(n) for n in (0, 1))
    is_reciprocal_negative = c.mb.less(x=c.mb.real_div(x=one, y=x), y=zero)
    return c.mb.logical_or(x=is_reciprocal_negative, y=c.mb.less(x=x, y=zero))


def _is_small(c: Composer, x: Var) -> Var:
    return c.mb.less(x=c.mb.abs(x=x), y=np.float32(_SMALL))


@in_fp32
def exponential_minus_one(c: Composer, x: Var) -> Var:
    """Compose ``exp(x) - 1``: near 0 the series ``x + x**2 / 2! + ... + x**8 / 8!``."""
    series = polynomial(c, x, [1 / math.factorial(n) for n in range(1, 9)])
    direct = c.mb.sub(x=c.mb.exp(x=x), y=np.float32(1))
    return c.mb.select(cond=_is_small(c, x), a=c.mb.mul(x=x, y=series), b=direct)


def _log1p(c: Composer, x: Var) -> Var:
    # Near 0: log(1 + x) = 2 * atanh(r) = 2 * (r + r**3 / 3 + ... + r**11 / 11), r = x / (2 + x).
    is_small = _is_small(c, x)
    ratio = c.mb.real_div(x=x, y=c.mb.add(x=x, y=np.float32(2)))
    square = c.mb.mul(x=ratio, y=ratio)
    series = polynomial(c, square, [2 / (2 * n + 1) for n in range(6)])
    direct = c.mb.log(x=c.mb.add(x=x, y=np.float32(1)), epsilon=np.float32(0))
    return c.mb.select(cond=is_small, a=c.mb.mul(x=ratio, y=series), b=direct)


log_plus_one = in_fp32(_log1p)


@in_fp32
def cube_root(c: Composer, x: Var) -> Var:
    """Compose ``sign(x) * abs(x) ** (1 / 3)``."""
    root = c.mb.pow(x=c.mb.abs(x=x), y=np.float32(1 / 3))
    is_negative = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=is_negative, a=c.mb.mul(x=root, y=np.float32(-1)), b=root)


@in_fp32
def erfc(c: Composer, x: Var) -> Var:
    """Compose ``1 - erf(x)``: ``t * exp(p(t) - x**2)``, t = 2 / (2 + x); below 0 by symmetry."""
    magnitude = c.mb.abs(x=x)
    t = c.mb.real_div(x=np.float32(2), y=c.mb.add(x=magnitude, y=np.float32(2)))
    exponent = c.mb.sub(x=polynomial(c, t, _ERFC), y=c.mb.mul(x=magnitude, y=magnitude))
    tail = c.mb.mul(x=t, y=c.mb.exp(x=exponent))
    is_negative = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=is_negative, a=c.mb.sub(x=np.float32(2), y=tail), b=tail)


@in_fp32
def erf_inv(c: Composer, x: Var) -> Var:
    """Compose the inverse of the error function, by Giles's polynomials."""
    w = c.mb.mul(x=_log1p(c, c.mb.mul(x=c.mb.mul(x=x, y=x), y=np.float32(-1))), y=np.float32(-1))
    centre = polynomial(c, c.mb.sub(x=w, y=np.float32(2.5)), _ERF_INV_CENTRE)
    root = c.mb.sqrt(x=c.mb.maximum(x=w, y=np.float32(0)))
    tail = polynomial(c, c.mb.sub(x=root, y=np.float32(3)), _ERF_INV_TAIL)
    factor = c.mb.select(cond=c.mb.less(x=w, y=np.float32(5)), a=centre, b=tail)
    is_one = c.mb.equal(x=c.mb.abs(x=x), y=np.float32(1))
    factor = c.mb.select(cond=is_one, a=np.float32(np.inf), b=factor)
    return c.mb.mul(x=x, y=factor)


@in_fp32
def asinh(c: Composer, x: Var) -> Var:
    """Compose ``asinh(x) = sign(x) * log1p(a + a**2 / (sqrt(a**2 + 1) + 1))`` with a = abs(x)."""
    magnitude = c.mb.abs(x=x)
    is_large = c.mb.greater(x=magnitude, y=np.float32(_LARGE))
    bounded = c.mb.select(cond=is_large, a=np.float32(1), b=magnitude)
    square = c.mb.mul(x=bounded, y=bounded)
    root = c.mb.sqrt(x=c.mb.add(x=square, y=np.float32(1)))
    correction = c.mb.real_div(x=square, y=c.mb.add(x=root, y=np.float32(1)))
    result = c.mb.select(
        cond=is_large,
        a=_log_of_double(c, magnitude),
        b=_log1p(c, c.mb.add(x=bounded, y=correction)),
    )
    is_negative = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=is_negative, a=c.mb.mul(x=result, y=np.float32(-1)), b=result)


@in_fp32
def acosh(c: Composer, x: Var) -> Var:
    """Compose ``acosh(x) = log1p(d + sqrt(d * (d + 2)))`` with d = x - 1; NaN below 1."""
    is_large = c.mb.greater(x=x, y=np.float32(_LARGE))
    excess = c.mb.select(cond=is_large, a=np.float32(1), b=c.mb.sub(x=x, y=np.float32(1)))
    product = c.mb.mul(x=excess, y=c.mb.add(x=excess, y=np.float32(2)))
    # Below -2 the product would be positive.
    is_outside = c.mb.less(x=excess, y=np.float32(0))
    product = c.mb.select(cond=is_outside, a=np.float32(np.nan), b=product)
    result = _log1p(c, c.mb.add(x=excess, y=c.mb.sqrt(x=product)))
    return c.mb.select(cond=is_large, a=_log_of_double(c, x), b=result)


def _log_of_double(c: Composer, x: Var) -> Var:
    return c.mb.add(x=c.mb.log(x=x, epsilon=np.float32(0)), y=np.float32(math.log(2)))


def atan2(c: Composer, node: Node, y: Var, x: Var) -> Var:
    """Compose the angle of the point (x, y), from -pi to pi, by atan of a ratio in [0, 1]."""
    dtype = node.type.dtype
    number = dtype.storage_numpy.type
    width, height = c.mb.abs(x=x), c.mb.abs(x=y)
    # The ratio of the shorter to the longer is at most 1, and 1 for two infinities.
    longer = c.mb.maximum(x=width, y=height)
    shorter = c.mb.minimum(x=width, y=height)
    is_diagonal = c.mb.logical_and(
        x=c.mb.equal(x=width, y=height), y=c.mb.greater(x=height, y=number(0))
    )
    is_origin = c.mb.equal(x=longer, y=number(0))
    ratio = c.mb.real_div(x=shorter, y=c.mb.select(cond=is_origin, a=number(1), b=longer))
    angle = c.mb.atan(x=c.mb.select(cond=is_diagonal, a=number(1), b=ratio))
    is_steep = c.mb.greater(x=height, y=width)
    angle = c.mb.select(cond=is_steep, a=c.mb.sub(x=number(np.pi / 2), y=angle), b=angle)
    angle = c.mb.select(cond=sign_bit(c, x, dtype), a=c.mb.sub(x=number(np.pi), y=angle), b=angle)
    negated = c.mb.mul(x=angle, y=number(-1))
    return c.mb.select(cond=sign_bit(c, y, dtype), a=negated, b=angle)


def round_nearest_afz(c: Composer, node: Node, x: Var) -> Var:
    """Compose rounding to the nearest integer, halves away from zero."""
    number = node.type.dtype.storage_numpy.type
    magnitude = c.mb.abs(x=x)
    floor = c.mb.floor(x=magnitude)
    is_half = c.mb.greater_equal(x=c.mb.sub(x=magnitude, y=floor), y=number(0.5))
    increment = c.mb.cast(x=is_half, dtype=node.type.dtype.storage_dtype)
    return c.mb.mul(x=c.mb.sign(x=x), y=c.mb.add(x=floor, y=increment))


def remainder(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose ``x - y * trunc(x / y)``, which has the sign of ``x``."""
    number = node.type.dtype.storage_numpy.type
    magnitude, divisor = c.mb.abs(x=x), c.mb.abs(x=y)
    result = c.mb.mod(x=magnitude, y=divisor)
    # A finite number modulo infinity is the number.
    is_unchanged = c.mb.logical_and(
        x=c.mb.equal(x=divisor, y=number(np.inf)), y=c.mb.less(x=magnitude, y=number(np.inf))
    )
    result = c.mb.select(cond=is_unchanged, a=magnitude, b=result)
    is_negative = c.mb.less(x=x, y=number(0))
    return c.mb.select(cond=is_negative, a=c.mb.mul(x=result, y=number(-1)), b=result)
