"""Functions of floating-point numbers that MIL lacks, made of those it has.

Each is as accurate near zero, and in its tails, as the function itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.tensor_types import DType

# Below it, 1 + x loses digits that the result has.
_SMALL = 0.35
# Where x * x is beyond fp32, log(x + sqrt(x * x + 1)) is log(2 * x) in all digits.
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
# M. Giles, Approximating the erfinv function, 2012: polynomials of w = -log(1 - x * x), less 2.5,
# and of its square root, less 3, from the constant term on.
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
    """Return a compose function that computes in fp32 whatever carries the operands."""

    def compose(c: Composer, node: Node, *operands: Var) -> Var:
        storage = node.types[0].dtype.storage_dtype
        if storage == "fp32":
            return function(c, *operands)
        wide = [c.mb.cast(x=operand, dtype="fp32") for operand in operands]
        return c.mb.cast(x=function(c, *wide), dtype=storage)

    return compose


def polynomial(c: Composer, x: Var, coefficients: Sequence[float]) -> Var:
    """Return a polynomial of fp32, by its coefficients from the constant term on."""
    *others, result = (np.float32(coefficient) for coefficient in coefficients)
    for coefficient in reversed(others):
        result = c.mb.add(x=c.mb.mul(x=x, y=result), y=coefficient)
    return result


def sign_bit(c: Composer, x: Var, dtype: DType) -> Var:
    """Return whether floats are below zero, or -0."""
    zero, one = (dtype.storage_numpy.type(n) for n in (0, 1))
    below = c.mb.less(x=c.mb.real_div(x=one, y=x), y=zero)
    return c.mb.logical_or(x=below, y=c.mb.less(x=x, y=zero))


def _is_small(c: Composer, x: Var) -> Var:
    return c.mb.less(x=c.mb.abs(x=x), y=np.float32(_SMALL))


@in_fp32
def exponential_minus_one(c: Composer, x: Var) -> Var:
    """Compose ``exp(x) - 1``."""
    series = polynomial(c, x, [1 / math.factorial(n) for n in range(1, 9)])
    direct = c.mb.sub(x=c.mb.exp(x=x), y=np.float32(1))
    return c.mb.select(cond=_is_small(c, x), a=c.mb.mul(x=x, y=series), b=direct)


def _log1p(c: Composer, x: Var) -> Var:
    # log(1 + x) is twice the inverse hyperbolic tangent of x / (2 + x).
    small = _is_small(c, x)
    ratio = c.mb.real_div(x=x, y=c.mb.add(x=x, y=np.float32(2)))
    square = c.mb.mul(x=ratio, y=ratio)
    series = polynomial(c, square, [2 / (2 * n + 1) for n in range(6)])
    direct = c.mb.log(x=c.mb.add(x=x, y=np.float32(1)), epsilon=np.float32(0))
    return c.mb.select(cond=small, a=c.mb.mul(x=ratio, y=series), b=direct)


log_plus_one = in_fp32(_log1p)


@in_fp32
def cube_root(c: Composer, x: Var) -> Var:
    """Compose the cube root, which has the sign of ``x``."""
    size = c.mb.pow(x=c.mb.abs(x=x), y=np.float32(1 / 3))
    below = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=below, a=c.mb.mul(x=size, y=np.float32(-1)), b=size)


@in_fp32
def erfc(c: Composer, x: Var) -> Var:
    """Compose ``1 - erf(x)``."""
    size = c.mb.abs(x=x)
    t = c.mb.real_div(x=np.float32(2), y=c.mb.add(x=size, y=np.float32(2)))
    exponent = c.mb.sub(x=polynomial(c, t, _ERFC), y=c.mb.mul(x=size, y=size))
    tail = c.mb.mul(x=t, y=c.mb.exp(x=exponent))
    below = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=below, a=c.mb.sub(x=np.float32(2), y=tail), b=tail)


@in_fp32
def erf_inv(c: Composer, x: Var) -> Var:
    """Compose the inverse of the error function."""
    w = c.mb.mul(x=_log1p(c, c.mb.mul(x=c.mb.mul(x=x, y=x), y=np.float32(-1))), y=np.float32(-1))
    centre = polynomial(c, c.mb.sub(x=w, y=np.float32(2.5)), _ERF_INV_CENTRE)
    root = c.mb.sqrt(x=c.mb.maximum(x=w, y=np.float32(0)))
    tail = polynomial(c, c.mb.sub(x=root, y=np.float32(3)), _ERF_INV_TAIL)
    factor = c.mb.select(cond=c.mb.less(x=w, y=np.float32(5)), a=centre, b=tail)
    is_end = c.mb.equal(x=c.mb.abs(x=x), y=np.float32(1))
    factor = c.mb.select(cond=is_end, a=np.float32(np.inf), b=factor)
    return c.mb.mul(x=x, y=factor)


@in_fp32
def asinh(c: Composer, x: Var) -> Var:
    """Compose the inverse hyperbolic sine."""
    size = c.mb.abs(x=x)
    is_large = c.mb.greater(x=size, y=np.float32(_LARGE))
    near = c.mb.select(cond=is_large, a=np.float32(1), b=size)
    square = c.mb.mul(x=near, y=near)
    root = c.mb.sqrt(x=c.mb.add(x=square, y=np.float32(1)))
    beyond = c.mb.real_div(x=square, y=c.mb.add(x=root, y=np.float32(1)))
    result = c.mb.select(
        cond=is_large,
        a=_log_of_double(c, size),
        b=_log1p(c, c.mb.add(x=near, y=beyond)),
    )
    below = c.mb.less(x=x, y=np.float32(0))
    return c.mb.select(cond=below, a=c.mb.mul(x=result, y=np.float32(-1)), b=result)


@in_fp32
def acosh(c: Composer, x: Var) -> Var:
    """Compose the inverse hyperbolic cosine, NaN below 1."""
    is_large = c.mb.greater(x=x, y=np.float32(_LARGE))
    near = c.mb.select(cond=is_large, a=np.float32(1), b=c.mb.sub(x=x, y=np.float32(1)))
    product = c.mb.mul(x=near, y=c.mb.add(x=near, y=np.float32(2)))
    # Below -2 the product is positive again.
    is_outside = c.mb.less(x=near, y=np.float32(0))
    product = c.mb.select(cond=is_outside, a=np.float32(np.nan), b=product)
    result = _log1p(c, c.mb.add(x=near, y=c.mb.sqrt(x=product)))
    return c.mb.select(cond=is_large, a=_log_of_double(c, x), b=result)


def _log_of_double(c: Composer, x: Var) -> Var:
    return c.mb.add(x=c.mb.log(x=x, epsilon=np.float32(0)), y=np.float32(math.log(2)))


def atan2(c: Composer, node: Node, y: Var, x: Var) -> Var:
    """Compose the angle of the point (x, y), from -pi to pi."""
    dtype = node.type.dtype
    number = dtype.storage_numpy.type
    width, height = c.mb.abs(x=x), c.mb.abs(x=y)
    # The smaller by the larger is at most 1, and 1 for two infinities.
    large = c.mb.maximum(x=width, y=height)
    small = c.mb.minimum(x=width, y=height)
    is_diagonal = c.mb.logical_and(
        x=c.mb.equal(x=width, y=height), y=c.mb.greater(x=height, y=number(0))
    )
    is_origin = c.mb.equal(x=large, y=number(0))
    ratio = c.mb.real_div(x=small, y=c.mb.select(cond=is_origin, a=number(1), b=large))
    angle = c.mb.atan(x=c.mb.select(cond=is_diagonal, a=number(1), b=ratio))
    is_steep = c.mb.greater(x=height, y=width)
    angle = c.mb.select(cond=is_steep, a=c.mb.sub(x=number(np.pi / 2), y=angle), b=angle)
    angle = c.mb.select(cond=sign_bit(c, x, dtype), a=c.mb.sub(x=number(np.pi), y=angle), b=angle)
    negated = c.mb.mul(x=angle, y=number(-1))
    return c.mb.select(cond=sign_bit(c, y, dtype), a=negated, b=angle)


def round_nearest_afz(c: Composer, node: Node, x: Var) -> Var:
    """Compose the nearest integer, where a half is rounded away from zero."""
    number = node.type.dtype.storage_numpy.type
    size = c.mb.abs(x=x)
    whole = c.mb.floor(x=size)
    is_half = c.mb.greater_equal(x=c.mb.sub(x=size, y=whole), y=number(0.5))
    up = c.mb.cast(x=is_half, dtype=node.type.dtype.storage_dtype)
    return c.mb.mul(x=c.mb.sign(x=x), y=c.mb.add(x=whole, y=up))


def remainder(c: Composer, node: Node, x: Var, y: Var) -> Var:
    """Compose the rest of a division towards zero: it has the sign of ``x``."""
    number = node.type.dtype.storage_numpy.type
    size, divisor = c.mb.abs(x=x), c.mb.abs(x=y)
    rest = c.mb.mod(x=size, y=divisor)
    # All of a number is less than infinity.
    is_whole = c.mb.logical_and(
        x=c.mb.equal(x=divisor, y=number(np.inf)), y=c.mb.less(x=size, y=number(np.inf))
    )
    rest = c.mb.select(cond=is_whole, a=size, b=rest)
    below = c.mb.less(x=x, y=number(0))
    return c.mb.select(cond=below, a=c.mb.mul(x=rest, y=number(-1)), b=rest)
