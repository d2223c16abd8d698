"""Elementwise arithmetic and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.emitter import (
    Emitter,
    broadcast_shapes,
    operation,
    require_same_dtype,
)
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations import integers
from coreml_delegate.graph.operations.float_bits import compose_reduce_precision
from coreml_delegate.graph.operations.sizes import fold
from coreml_delegate.graph.tensor_types import (
    ALL,
    BOOLEANS,
    FLOATS,
    INTEGERS,
    NUMBERS,
    DType,
    TensorType,
)
from coreml_delegate.mil.compose import division, functions, movement

_Compose = Callable[..., Var]


def _unary(op: str, **arguments: float) -> _Compose:
    """Return a compose function: a MIL op of ``x``, and arguments in its element type."""

    def compose(c: Composer, node: Node, x: Var) -> Var:
        number = node.type.dtype.storage_numpy.type
        typed = {name: number(value) for name, value in arguments.items()}
        return getattr(c.mb, op)(x=x, **typed)

    return compose


def _arithmetic(op: str, of_bools: str = "") -> _Compose:
    """Return a compose function: a MIL op of ``x`` and ``y`` that wraps at 32 bits.

    Args:
        op: MIL's name of the op.
        of_bools: The op for bools.
    """

    def compose(c: Composer, node: Node, x: Var, y: Var) -> Var:
        if node.type.dtype is DType.BOOL:
            return getattr(c.mb, of_bools)(x=x, y=y)
        return c.wrap(getattr(c.mb, op)(x=x, y=y), node.type.dtype)

    return compose


def _extremum(op: str, of_bools: str) -> _Compose:
    def compose(c: Composer, node: Node, x: Var, y: Var) -> Var:
        dtype = node.type.dtype
        if dtype is DType.BOOL:
            return getattr(c.mb, of_bools)(x=x, y=y)
        return c.ordered(getattr(c.mb, op)(x=c.ordered(x, dtype), y=c.ordered(y, dtype)), dtype)

    return compose


def _composed(composition: Callable[..., Var]) -> _Compose:
    """Return a compose function: a composition of the operands."""

    def compose(_: Composer, __: Node, *operands: Var) -> Var:
        return composition(*operands)

    return compose


def _in_fp32(composition: Callable[..., Var]) -> _Compose:
    """Return a compose function: a composition that is computed in fp32."""

    def compose(c: Composer, node: Node, x: Var) -> Var:
        if node.types[0].dtype.storage_dtype == "fp32":
            return composition(x)
        return c.mb.cast(x=composition(c.mb.cast(x=x, dtype="fp32")), dtype="fp16")

    return compose


def _by_kind(of_floats: _Compose, of_integers: _Compose) -> _Compose:
    def compose(c: Composer, node: Node, *operands: Var) -> Var:
        is_float = node.types[0].dtype.is_float
        return (of_floats if is_float else of_integers)(c, node, *operands)

    return compose


def _compose_abs(c: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    return x if dtype.is_unsigned else c.wrap(c.mb.abs(x=x), dtype)


def _compose_negate(c: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    if dtype.is_float:
        return c.mb.mul(x=x, y=dtype.storage_numpy.type(-1))
    return c.wrap(c.mb.sub(x=np.int32(0), y=x), dtype)


def _compose_sign(c: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    if dtype.is_unsigned:
        return c.mb.cast(x=c.mb.not_equal(x=x, y=np.int32(0)), dtype="int32")
    sign = c.mb.sign(x=x)
    if not dtype.is_float:
        return sign
    return c.mb.select(cond=c.mb.not_equal(x=x, y=x), a=x, b=sign)


def _compose_clamp(c: Composer, node: Node, low: Var, x: Var, high: Var) -> Var:
    dtype = node.type.dtype
    low, x, high = (c.ordered(var, dtype) for var in (low, x, high))
    return c.ordered(c.mb.minimum(x=c.mb.maximum(x=x, y=low), y=high), dtype)


def _compose_is_nan(c: Composer, _: Node, x: Var) -> Var:
    return c.mb.not_equal(x=x, y=x)


def _compose_is_finite(c: Composer, node: Node, x: Var) -> Var:
    return c.mb.less(x=c.mb.abs(x=x), y=node.types[0].dtype.storage_numpy.type(np.inf))


def _compose_convert(c: Composer, node: Node, x: Var) -> Var:
    return c.convert(x, node.types[0].dtype, node.type.dtype)


class Elementwise(Emitter):
    """Elementwise arithmetic and functions.

    Operands of an operation have the same element type, and shapes that are equal, except that
    sizes of 1 and tensors of rank 0 are repeated.
    """

    @operation(ALL, _arithmetic("add", "logical_or"))
    def add(self, x: Value, y: Value) -> Value:
        """Return ``x + y``; integers wrap; of bools, whether one is true."""
        return self._elementwise("add", x, y)

    @operation(NUMBERS, _arithmetic("sub"))
    def subtract(self, x: Value, y: Value) -> Value:
        """Return ``x - y``; integers wrap."""
        return self._elementwise("subtract", x, y)

    @operation(ALL, _arithmetic("mul", "logical_and"))
    def multiply(self, x: Value, y: Value) -> Value:
        """Return ``x * y``; integers wrap; of bools, whether both are true."""
        return self._elementwise("multiply", x, y)

    @operation(INTEGERS, integers.high_product)
    def mulhi(self, x: Value, y: Value) -> Value:
        """Return ``x * y // 2**n`` for integers of n bits: the high half of the product."""
        return self._elementwise("mulhi", x, y)

    @operation(NUMBERS, _by_kind(_arithmetic("real_div"), integers.divide))
    def divide(self, x: Value, y: Value) -> Value:
        """Return ``x / y``; of integers rounded towards 0, and with all bits set for ``x / 0``."""
        return self._elementwise("divide", x, y)

    @operation(NUMBERS, _by_kind(_composed(division.fmod), integers.remainder))
    def remainder(self, x: Value, y: Value) -> Value:
        """Return ``x - y * trunc(x / y)``; of integers, ``x`` where ``y`` is 0."""
        return self._elementwise("remainder", x, y)

    @operation(NUMBERS, _by_kind(_arithmetic("pow"), integers.power))
    def power(self, x: Value, y: Value) -> Value:
        """Return ``x ** y``; integers wrap, and negative powers are rounded towards 0."""
        return self._elementwise("power", x, y)

    @operation(ALL, _extremum("maximum", "logical_or"))
    def maximum(self, x: Value, y: Value) -> Value:
        """Return the larger of two elements; NaN if one is NaN."""
        return self._elementwise("maximum", x, y)

    @operation(ALL, _extremum("minimum", "logical_and"))
    def minimum(self, x: Value, y: Value) -> Value:
        """Return the smaller of two elements; NaN if one is NaN."""
        return self._elementwise("minimum", x, y)

    @operation(FLOATS, _composed(functions.atan2))
    def atan2(self, x: Value, y: Value) -> Value:
        """Return the angle of the point with ordinate ``x`` and abscissa ``y``, from -pi to pi."""
        return self._elementwise("atan2", x, y)

    @operation(NUMBERS, _compose_abs)
    def abs(self, x: Value) -> Value:
        """Return the absolute value; the least integer wraps to itself."""
        return self._elementwise("abs", x)

    @operation(NUMBERS, _compose_negate)
    def negate(self, x: Value) -> Value:
        """Return ``-x``; integers wrap."""
        return self._elementwise("negate", x)

    @operation(NUMBERS, _compose_sign)
    def sign(self, x: Value) -> Value:
        """Return -1, 0 or 1; NaN for NaN."""
        return self._elementwise("sign", x)

    @operation(FLOATS, _unary("ceil"))
    def ceil(self, x: Value) -> Value:
        """Return the smallest integer >= ``x``."""
        return self._elementwise("ceil", x)

    @operation(FLOATS, _unary("floor"))
    def floor(self, x: Value) -> Value:
        """Return the largest integer <= ``x``."""
        return self._elementwise("floor", x)

    @operation(FLOATS, _unary("round"))
    def round_nearest_even(self, x: Value) -> Value:
        """Return the nearest integer; halves are rounded to even."""
        return self._elementwise("round_nearest_even", x)

    @operation(FLOATS, _composed(functions.round_half_away_from_zero))
    def round_nearest_afz(self, x: Value) -> Value:
        """Return the nearest integer; halves are rounded away from zero."""
        return self._elementwise("round_nearest_afz", x)

    @operation(FLOATS, _unary("sqrt"))
    def sqrt(self, x: Value) -> Value:
        """Return the square root."""
        return self._elementwise("sqrt", x)

    @operation(FLOATS, _unary("rsqrt", epsilon=0.0))
    def rsqrt(self, x: Value) -> Value:
        """Return ``1 / sqrt(x)``."""
        return self._elementwise("rsqrt", x)

    @operation(FLOATS, _in_fp32(functions.cube_root))
    def cbrt(self, x: Value) -> Value:
        """Return the cube root."""
        return self._elementwise("cbrt", x)

    @operation(NUMBERS)
    def square(self, x: Value) -> Value:
        """Return ``x * x``; integers wrap."""
        return self.multiply(x, x)

    @operation(FLOATS, _unary("exp"))
    def exponential(self, x: Value) -> Value:
        """Return ``exp(x)``."""
        return self._elementwise("exponential", x)

    @operation(FLOATS, _in_fp32(functions.exponential_minus_one))
    def exponential_minus_one(self, x: Value) -> Value:
        """Return ``exp(x) - 1``, accurate near 0."""
        return self._elementwise("exponential_minus_one", x)

    @operation(FLOATS, _unary("log", epsilon=0.0))
    def log(self, x: Value) -> Value:
        """Return the natural logarithm."""
        return self._elementwise("log", x)

    @operation(FLOATS, _in_fp32(functions.log_plus_one))
    def log_plus_one(self, x: Value) -> Value:
        """Return ``log(1 + x)``, accurate near 0."""
        return self._elementwise("log_plus_one", x)

    @operation(FLOATS, _unary("sigmoid"))
    def logistic(self, x: Value) -> Value:
        """Return ``1 / (1 + exp(-x))``."""
        return self._elementwise("logistic", x)

    @operation(FLOATS, _unary("erf"))
    def erf(self, x: Value) -> Value:
        """Return the error function."""
        return self._elementwise("erf", x)

    @operation(FLOATS, _in_fp32(functions.erfc))
    def erfc(self, x: Value) -> Value:
        """Return ``1 - erf(x)``, accurate in the tail."""
        return self._elementwise("erfc", x)

    @operation(FLOATS, _in_fp32(functions.erf_inv))
    def erf_inv(self, x: Value) -> Value:
        """Return the inverse of the error function."""
        return self._elementwise("erf_inv", x)

    @operation(FLOATS, _unary("sin"))
    def sine(self, x: Value) -> Value:
        """Return the sine of an angle in radians."""
        return self._elementwise("sine", x)

    @operation(FLOATS, _unary("cos"))
    def cosine(self, x: Value) -> Value:
        """Return the cosine of an angle in radians."""
        return self._elementwise("cosine", x)

    @operation(FLOATS, _unary("tan"))
    def tan(self, x: Value) -> Value:
        """Return the tangent of an angle in radians."""
        return self._elementwise("tan", x)

    @operation(FLOATS, _unary("asin"))
    def asin(self, x: Value) -> Value:
        """Return the arcsine, from -pi / 2 to pi / 2."""
        return self._elementwise("asin", x)

    @operation(FLOATS, _unary("acos"))
    def acos(self, x: Value) -> Value:
        """Return the arccosine, from 0 to pi."""
        return self._elementwise("acos", x)

    @operation(FLOATS, _unary("atan"))
    def atan(self, x: Value) -> Value:
        """Return the arctangent, from -pi / 2 to pi / 2."""
        return self._elementwise("atan", x)

    @operation(FLOATS, _unary("sinh"))
    def sinh(self, x: Value) -> Value:
        """Return the hyperbolic sine."""
        return self._elementwise("sinh", x)

    @operation(FLOATS, _unary("cosh"))
    def cosh(self, x: Value) -> Value:
        """Return the hyperbolic cosine."""
        return self._elementwise("cosh", x)

    @operation(FLOATS, _unary("tanh"))
    def tanh(self, x: Value) -> Value:
        """Return the hyperbolic tangent."""
        return self._elementwise("tanh", x)

    @operation(FLOATS, _in_fp32(functions.asinh))
    def asinh(self, x: Value) -> Value:
        """Return the inverse hyperbolic sine."""
        return self._elementwise("asinh", x)

    @operation(FLOATS, _in_fp32(functions.acosh))
    def acosh(self, x: Value) -> Value:
        """Return the inverse hyperbolic cosine."""
        return self._elementwise("acosh", x)

    @operation(FLOATS, _unary("atanh"))
    def atanh(self, x: Value) -> Value:
        """Return the inverse hyperbolic tangent."""
        return self._elementwise("atanh", x)

    @operation(FLOATS, _compose_is_nan)
    def is_nan(self, x: Value) -> Value:
        """Return whether elements are NaN."""
        return self.emit("is_nan", (x,), x.type.with_dtype(DType.BOOL))

    @operation(FLOATS, _composed(functions.is_infinite))
    def is_inf(self, x: Value) -> Value:
        """Return whether elements are infinite."""
        return self.emit("is_inf", (x,), x.type.with_dtype(DType.BOOL))

    @operation(FLOATS, _compose_is_finite)
    def is_finite(self, x: Value) -> Value:
        """Return whether elements are neither infinite nor NaN."""
        return self.emit("is_finite", (x,), x.type.with_dtype(DType.BOOL))

    @operation(NUMBERS, _compose_clamp)
    def clamp(self, low: Value, x: Value, high: Value) -> Value:
        """Return ``min(max(x, low), high)``; NaN if one of the three is NaN."""
        return self._elementwise("clamp", low, x, high)

    @operation(BOOLEANS, _composed(movement.select))
    def select(self, predicate: Value, on_true: Value, on_false: Value) -> Value:
        """Return elements of ``on_true`` where the predicate holds, else of ``on_false``."""
        require_same_dtype("select", on_true, on_false)
        operands = (predicate, on_true, on_false)
        shape = broadcast_shapes("select", *(operand.type for operand in operands))
        return self.emit("select", operands, on_true.type.with_shape(shape))

    @operation(ALL, _compose_convert)
    def convert(self, x: Value, dtype: Any) -> Value:
        """Convert to another element type: floats are rounded towards 0, integers lose high bits.

        Args:
            x: Any value.
            dtype: See ``DType.of``.
        """
        type = x.type.with_dtype(DType.of(dtype))
        return self.emit("convert", (x,), type, elements=fold("convert", type, x))

    @operation(FLOATS, compose_reduce_precision)
    def reduce_precision(self, x: Value, exponent_bits: int, mantissa_bits: int) -> Value:
        """Round floats to a narrower format, whose subnormal numbers become 0.

        Args:
            x: Floats.
            exponent_bits: 1 or more.
            mantissa_bits: 0 or more, without the leading one.
        """
        if exponent_bits < 1 or mantissa_bits < 0:
            raise GraphError(
                "reduce_precision: no such floating-point format",
                got=f"{exponent_bits} exponent bits, {mantissa_bits} mantissa bits",
                expected="1 or more, 0 or more",
            )
        return self._elementwise(
            "reduce_precision", x, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits
        )

    def _elementwise(self, name: str, *operands: Value, **attributes: Any) -> Value:
        """Add a node whose result has the operands' element type and their broadcast shape."""
        require_same_dtype(name, *operands)
        shape = broadcast_shapes(name, *(operand.type for operand in operands))
        type = TensorType(operands[0].dtype, shape)
        return self.emit(name, operands, type, elements=fold(name, type, *operands), **attributes)
