"""Elementwise arithmetic, functions and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import (
    Composer,
    Var,
    cast_storage,
    convert,
    in_order,
    ordered,
    wrap,
)
from coreml_delegate.graph.emitter import (
    Emitter,
    broadcast_shapes,
    elementwise,
    mil_op,
    operation,
    require_same_dtype,
    unary,
)
from coreml_delegate.graph.node import Compose, Node, Value
from coreml_delegate.graph.operations import integers
from coreml_delegate.graph.operations.float_bits import compose_reduce_precision
from coreml_delegate.graph.tensor_types import ALL, BOOLEANS, FLOATS, INTEGERS, NUMBERS, DType
from coreml_delegate.mil.compose import division, functions, mb, movement

OPS = {
    "EQ": "equal",
    "NE": "not_equal",
    "LT": "less",
    "LE": "less_equal",
    "GT": "greater",
    "GE": "greater_equal",
}
"""MIL's ops by StableHLO's names of directions."""

MIRRORED = {"EQ": "EQ", "NE": "NE", "LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
"""The direction that holds of exchanged operands."""


def _arithmetic(op: str, of_bools: str = "") -> Compose:
    """Return a compose function: a MIL op of ``x`` and ``y`` that wraps, or the op for bools."""

    def compose(_: Composer, node: Node, x: Var, y: Var) -> Var:
        if node.type.dtype is DType.BOOL:
            return getattr(mb, of_bools)(x=x, y=y)
        return wrap(getattr(mb, op)(x=x, y=y), node.type.dtype)

    return compose


def _extremum(op: str, of_bools: str) -> Compose:
    def compose(_: Composer, node: Node, x: Var, y: Var) -> Var:
        dtype = node.type.dtype
        if dtype is DType.BOOL:
            return getattr(mb, of_bools)(x=x, y=y)
        return in_order(lambda x, y: getattr(mb, op)(x=x, y=y), dtype, x, y)

    return compose


def _composed(composition: Callable[..., Var]) -> Compose:
    """Return a compose function: a composition of the operands."""

    def compose(_: Composer, __: Node, *operands: Var) -> Var:
        return composition(*operands)

    return compose


def _in_fp32(composition: Callable[..., Var]) -> Compose:
    """Return a compose function: a composition that is computed in fp32."""

    def compose(_: Composer, node: Node, x: Var) -> Var:
        storage_dtype = node.type.dtype.storage_dtype
        result = composition(cast_storage(x, storage_dtype, "fp32"))
        return cast_storage(result, "fp32", storage_dtype)

    return compose


def _by_kind(of_floats: Compose, of_integers: Compose) -> Compose:
    def compose(c: Composer, node: Node, *operands: Var) -> Var:
        is_float = node.types[0].dtype.is_float
        return (of_floats if is_float else of_integers)(c, node, *operands)

    return compose


def _compose_abs(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    return x if dtype.is_unsigned else wrap(mb.abs(x=x), dtype)


def _compose_negate(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    if dtype.is_float:
        return mb.mul(x=x, y=dtype.storage_numpy.type(-1))
    return wrap(mb.sub(x=np.int32(0), y=x), dtype)


def _compose_sign(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    if dtype.is_unsigned:
        return mb.cast(x=mb.not_equal(x=x, y=np.int32(0)), dtype="int32")
    sign = mb.sign(x=x)
    if not dtype.is_float:
        return sign
    return mb.select(cond=mb.not_equal(x=x, y=x), a=x, b=sign)


def _compose_clamp(_: Composer, node: Node, low: Var, x: Var, high: Var) -> Var:
    def clamp(low: Var, x: Var, high: Var) -> Var:
        return mb.minimum(x=mb.maximum(x=x, y=low), y=high)

    return in_order(clamp, node.type.dtype, low, x, high)


def _is_nan(x: Var) -> Var:
    return mb.not_equal(x=x, y=x)


def _compose_is_finite(_: Composer, node: Node, x: Var) -> Var:
    return mb.less(x=mb.abs(x=x), y=node.types[0].dtype.storage_numpy.type(np.inf))


def _compose_convert(_: Composer, node: Node, x: Var) -> Var:
    return convert(x, node.types[0].dtype, node.type.dtype)


def _compose_compare(c: Composer, node: Node, x: Var, y: Var) -> Var:
    dtype, direction = node.types[0].dtype, node["direction"]
    if node["total_order"]:
        return _compare_in_total_order(c, direction, dtype, x, y)
    op = getattr(mb, OPS[direction])
    if dtype is DType.BOOL:
        return op(x=mb.cast(x=x, dtype="int32"), y=mb.cast(x=y, dtype="int32"))
    if direction in ("EQ", "NE"):
        return op(x=x, y=y)
    return op(x=ordered(x, dtype), y=ordered(y, dtype))


def _compare_in_total_order(c: Composer, direction: str, dtype: DType, x: Var, y: Var) -> Var:
    """Compare floats in the total order -infinity < ... < -0 < 0 < ... < infinity < NaN."""
    if direction in ("GT", "LE"):
        return _compare_in_total_order(c, {"GT": "LT", "LE": "GE"}[direction], dtype, y, x)
    if direction in ("NE", "GE"):
        opposite = {"NE": "EQ", "GE": "LT"}[direction]
        return mb.logical_not(x=_compare_in_total_order(c, opposite, dtype, x, y))
    x_is_nan, y_is_nan = mb.not_equal(x=x, y=x), mb.not_equal(x=y, y=y)
    x_sign, y_sign = functions.sign_bit(x), functions.sign_bit(y)
    is_equal = mb.equal(x=x, y=y)
    signs_differ = mb.logical_xor(x=x_sign, y=y_sign)
    if direction == "EQ":
        equal_with_sign = mb.logical_and(x=is_equal, y=mb.logical_not(x=signs_differ))
        return mb.logical_or(x=equal_with_sign, y=mb.logical_and(x=x_is_nan, y=y_is_nan))
    # Equal numbers of different signs are zeros.
    is_zero_pair = mb.logical_and(x=is_equal, y=mb.logical_and(x=signs_differ, y=x_sign))
    before_nan = mb.logical_and(x=y_is_nan, y=mb.logical_not(x=x_is_nan))
    is_less = mb.logical_or(x=mb.less(x=x, y=y), y=is_zero_pair)
    return mb.logical_or(x=is_less, y=before_nan)


class Elementwise(Emitter):
    """Elementwise arithmetic, functions and comparisons.

    Operands of an operation have the same element type, and shapes that are equal, except that
    sizes of 1 and tensors of rank 0 are repeated.

    Comparisons with NaN are false, but for not equal. In the total order, -0 is less than 0, and
    NaN equals itself and is greater than all other floats.
    """

    @elementwise(ALL, _arithmetic("add", "logical_or"))
    def add(self, x: Value, y: Value) -> Value:
        """Return ``x + y``; integers wrap; of bools, whether one is true."""
        return self.emit_elementwise("add", x, y)

    @elementwise(NUMBERS, _arithmetic("sub"))
    def subtract(self, x: Value, y: Value) -> Value:
        """Return ``x - y``; integers wrap."""
        return self.emit_elementwise("subtract", x, y)

    @elementwise(ALL, _arithmetic("mul", "logical_and"))
    def multiply(self, x: Value, y: Value) -> Value:
        """Return ``x * y``; integers wrap; of bools, whether both are true."""
        return self.emit_elementwise("multiply", x, y)

    @elementwise(INTEGERS, integers.high_product)
    def mulhi(self, x: Value, y: Value) -> Value:
        """Return ``x * y // 2**n`` for integers of n bits: the high half of the product."""
        return self.emit_elementwise("mulhi", x, y)

    @elementwise(NUMBERS, _by_kind(_arithmetic("real_div"), integers.divide))
    def divide(self, x: Value, y: Value) -> Value:
        """Return ``x / y``; of integers rounded towards 0, and with all bits set for ``x / 0``."""
        return self.emit_elementwise("divide", x, y)

    @elementwise(NUMBERS, _by_kind(_composed(division.fmod), integers.remainder))
    def remainder(self, x: Value, y: Value) -> Value:
        """Return ``x - y * trunc(x / y)``; of integers, ``x`` where ``y`` is 0."""
        return self.emit_elementwise("remainder", x, y)

    @elementwise(NUMBERS, _by_kind(_arithmetic("pow"), integers.power))
    def power(self, x: Value, y: Value) -> Value:
        """Return ``x ** y``; integers wrap, and negative powers are rounded towards 0."""
        return self.emit_elementwise("power", x, y)

    @elementwise(ALL, _extremum("maximum", "logical_or"))
    def maximum(self, x: Value, y: Value) -> Value:
        """Return the larger of two elements; NaN if one is NaN."""
        return self.emit_elementwise("maximum", x, y)

    @elementwise(ALL, _extremum("minimum", "logical_and"))
    def minimum(self, x: Value, y: Value) -> Value:
        """Return the smaller of two elements; NaN if one is NaN."""
        return self.emit_elementwise("minimum", x, y)

    @elementwise(FLOATS, _composed(functions.atan2))
    def atan2(self, x: Value, y: Value) -> Value:
        """Return the angle of the point with ordinate ``x`` and abscissa ``y``, from -pi to pi."""
        return self.emit_elementwise("atan2", x, y)

    abs = unary(
        "abs", _compose_abs, "the absolute value; the least integer wraps to itself", dtypes=NUMBERS
    )
    negate = unary("negate", _compose_negate, "``-x``; integers wrap", dtypes=NUMBERS)
    sign = unary("sign", _compose_sign, "-1, 0 or 1; NaN for NaN", dtypes=NUMBERS)
    ceil = unary("ceil", mil_op("ceil"), "the smallest integer >= ``x``")
    floor = unary("floor", mil_op("floor"), "the largest integer <= ``x``")
    round_nearest_even = unary(
        "round_nearest_even", mil_op("round"), "the nearest integer; halves are rounded to even"
    )
    round_nearest_afz = unary(
        "round_nearest_afz",
        _composed(functions.round_half_away_from_zero),
        "the nearest integer; halves are rounded away from zero",
    )
    sqrt = unary("sqrt", mil_op("sqrt"), "the square root")
    rsqrt = unary("rsqrt", mil_op("rsqrt", epsilon=0.0), "``1 / sqrt(x)``")
    cbrt = unary("cbrt", _in_fp32(functions.cube_root), "the cube root")

    @operation(NUMBERS)
    def square(self, x: Value) -> Value:
        """Return ``x * x``; integers wrap."""
        return self.multiply(x, x)

    exponential = unary("exponential", mil_op("exp"), "``exp(x)``")
    exponential_minus_one = unary(
        "exponential_minus_one",
        _in_fp32(functions.exponential_minus_one),
        "``exp(x) - 1``, accurate near 0",
    )
    log = unary("log", mil_op("log", epsilon=0.0), "the natural logarithm")
    log_plus_one = unary(
        "log_plus_one", _in_fp32(functions.log_plus_one), "``log(1 + x)``, accurate near 0"
    )
    logistic = unary("logistic", mil_op("sigmoid"), "``1 / (1 + exp(-x))``")
    erf = unary("erf", mil_op("erf"), "the error function")
    erfc = unary("erfc", _in_fp32(functions.erfc), "``1 - erf(x)``, accurate in the tail")
    erf_inv = unary("erf_inv", _in_fp32(functions.erf_inv), "the inverse of the error function")
    sine = unary("sine", mil_op("sin"), "the sine of an angle in radians")
    cosine = unary("cosine", mil_op("cos"), "the cosine of an angle in radians")
    tan = unary("tan", mil_op("tan"), "the tangent of an angle in radians")
    asin = unary("asin", mil_op("asin"), "the arcsine, from -pi / 2 to pi / 2")
    acos = unary("acos", mil_op("acos"), "the arccosine, from 0 to pi")
    atan = unary("atan", mil_op("atan"), "the arctangent, from -pi / 2 to pi / 2")
    sinh = unary("sinh", mil_op("sinh"), "the hyperbolic sine")
    cosh = unary("cosh", mil_op("cosh"), "the hyperbolic cosine")
    tanh = unary("tanh", mil_op("tanh"), "the hyperbolic tangent")
    asinh = unary("asinh", _in_fp32(functions.asinh), "the inverse hyperbolic sine")
    acosh = unary("acosh", _in_fp32(functions.acosh), "the inverse hyperbolic cosine")
    atanh = unary("atanh", mil_op("atanh"), "the inverse hyperbolic tangent")
    is_nan = unary("is_nan", _composed(_is_nan), "whether elements are NaN", is_test=True)
    is_inf = unary(
        "is_inf", _composed(functions.is_infinite), "whether elements are infinite", is_test=True
    )
    is_finite = unary(
        "is_finite",
        _compose_is_finite,
        "whether elements are neither infinite nor NaN",
        is_test=True,
    )

    @elementwise(NUMBERS, _compose_clamp)
    def clamp(self, low: Value, x: Value, high: Value) -> Value:
        """Return ``min(max(x, low), high)``; NaN if one of the three is NaN."""
        return self.emit_elementwise("clamp", low, x, high)

    @elementwise(BOOLEANS, _composed(movement.select))
    def select(self, predicate: Value, on_true: Value, on_false: Value) -> Value:
        """Return elements of ``on_true`` where the predicate holds, else of ``on_false``."""
        require_same_dtype("select", on_true, on_false)
        operands = (predicate, on_true, on_false)
        shape = broadcast_shapes("select", *(operand.type for operand in operands))
        return self.emit("select", operands, on_true.type.with_shape(shape))

    @elementwise(ALL, _compose_convert)
    def convert(self, x: Value, dtype: Any) -> Value:
        """Convert to another element type: floats are rounded towards 0, integers lose high bits.

        Args:
            x: Any value.
            dtype: See ``DType.of``.
        """
        return self.emit_elementwise("convert", x, dtype=DType.of(dtype))

    @elementwise(FLOATS, compose_reduce_precision)
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
        return self.emit_elementwise(
            "reduce_precision", x, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits
        )

    @elementwise(ALL, _compose_compare)
    def compare(self, x: Value, y: Value, direction: str, total_order: bool = False) -> Value:
        """Return whether a relation holds.

        Args:
            x: Any value.
            y: A value of the same element type.
            direction: ``EQ``, ``NE``, ``LT``, ``LE``, ``GT`` or ``GE``.
            total_order: Whether floats compare in the total order.
        """
        if direction not in OPS:
            raise GraphError(
                "compare: no such direction", got=repr(direction), expected=" | ".join(OPS)
            )
        total_order = total_order and x.dtype.is_float
        return self.emit_elementwise(
            "compare", x, y, dtype=DType.BOOL, direction=direction, total_order=total_order
        )

    @operation(ALL)
    def equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements are equal."""
        return self.compare(x, y, "EQ", total_order)

    @operation(ALL)
    def not_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements differ."""
        return self.compare(x, y, "NE", total_order)

    @operation(ALL)
    def less(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are less."""
        return self.compare(x, y, "LT", total_order)

    @operation(ALL)
    def less_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are less or equal."""
        return self.compare(x, y, "LE", total_order)

    @operation(ALL)
    def greater(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are greater."""
        return self.compare(x, y, "GT", total_order)

    @operation(ALL)
    def greater_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are greater or equal."""
        return self.compare(x, y, "GE", total_order)
