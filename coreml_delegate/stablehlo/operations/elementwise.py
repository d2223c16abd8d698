"""Elementwise operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from coreml_delegate.graph import DType, Value
from coreml_delegate.graph.emitter import same_shape
from coreml_delegate.graph.operations.elementwise import MIRRORED
from coreml_delegate.graph.tensor_types import Dim
from coreml_delegate.stablehlo.source_op import (
    Operand,
    Rule,
    SourceOp,
    WideConstant,
    Words,
    calling,
)

_UNARY = (
    *("abs", "cbrt", "ceil", "cosine", "count_leading_zeros", "exponential"),
    *("exponential_minus_one", "floor", "is_finite", "log", "log_plus_one", "logistic", "negate"),
    *("popcnt", "round_nearest_afz", "round_nearest_even", "rsqrt", "sign", "sine", "sqrt"),
    *("tan", "tanh"),
)
_BINARY = (
    *("add", "atan2", "divide", "maximum", "minimum", "multiply", "power", "remainder"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "subtract", "xor"),
)
_LOGICAL = {"and": "and_", "or": "or_", "not": "not_"}
CHLO_UNARY = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "erf_inv", "erfc"),
    *("is_inf", "sinh", "square", "tan"),
)
"""Unary operations of CHLO that the builder has under the same names."""

_CHLO_BROADCAST = (*_BINARY, "and", "or", "compare", "select")


def lean(source: SourceOp, values: Sequence[Value]) -> list[Value]:
    """Undo broadcasts of operands, as the builder's operations broadcast themselves.

    At least one operand keeps the shape. Otherwise, a model would store each constant broadcast.
    """
    broadcasts = source.context.broadcasts
    if all(value in broadcasts for value in values):
        return list(values)
    return [_before_broadcast(source, v) if v in broadcasts else v for v in values]


def _before_broadcast(source: SourceOp, value: Value) -> Value:
    small, dimensions = source.context.broadcasts[value]
    if not small.rank:
        return small
    shape: list[Dim] = [1] * value.rank
    for size, axis in zip(small.shape, dimensions, strict=True):
        shape[axis] = size
    if same_shape(shape, value.shape) or list(dimensions) != sorted(dimensions):
        return value
    return source.builder.reshape(small, shape)


def _direct(method: str) -> Rule:
    def rule(source: SourceOp) -> Operand:
        return getattr(source.builder, method)(*lean(source, source.values))

    return rule


def _extremum(method: str, side: str) -> Rule:
    """Read a maximum or minimum; constants beyond 32 bits are clipped where it has no effect."""

    def rule(source: SourceOp) -> Operand:
        if all(isinstance(operand, WideConstant) for operand in source.operands):
            source.value(0)
        values = [source.value_clipped(n, side) for n in (0, 1)]
        return getattr(source.builder, method)(*lean(source, values))

    return rule


def _compare(source: SourceOp) -> Value:
    is_total = source.attribute("compare_type", "") == "TOTALORDER"
    direction = source.attribute("comparison_direction")
    x_operand, y_operand = source.operands
    if isinstance(y_operand, WideConstant):
        return _compare_wide(source, source.value(0), direction, y_operand)
    if isinstance(x_operand, WideConstant):
        return _compare_wide(source, source.value(1), MIRRORED[direction], x_operand)
    x, y = lean(source, source.values)
    return source.builder.compare(x, y, direction, total_order=is_total)


def _compare_wide(source: SourceOp, x: Value, direction: str, constant: WideConstant) -> Value:
    """Compare with a constant beyond 32 bits: the side that it is on decides the result."""
    below, above = constant.is_below, constant.is_above
    is_beyond = below | above
    holds = {"E": np.zeros_like(below), "N": is_beyond, "L": above, "G": below}[direction[0]]
    builder = source.builder
    if is_beyond.all():
        return builder.constant(holds)
    inside = builder.compare(x, builder.constant(constant.clipped), direction)
    return builder.select(builder.constant(is_beyond), builder.constant(holds), inside)


def _select(source: SourceOp) -> Value:
    predicate, on_true, on_false = source.values
    if not predicate.rank or same_shape(predicate.shape, on_true.shape):
        predicate, on_true, on_false = lean(source, (predicate, on_true, on_false))
    return source.builder.select(predicate, on_true, on_false)


def _convert(source: SourceOp) -> Operand:
    operand, dtype = source.operands[0], source.dtype()
    if isinstance(operand, WideConstant):
        return source.constant(operand.array.astype(dtype.numpy), dtype)
    return source.builder.convert(source.value(0), source.dtype())


def _clamp(source: SourceOp) -> Value:
    low, x, high = (
        source.value_clipped(0, "below"),
        source.value(1),
        source.value_clipped(2, "above"),
    )
    return source.builder.clamp(*lean(source, (low, x, high)))


def _bitcast_convert(source: SourceOp) -> Operand:
    operand = source.operands[0]
    spelled = source.spelled_dtype()
    if isinstance(operand, Words):
        if spelled != "ui32":
            raise source.refusal("Core ML has no integers of 64 bits")
        return operand.pairs
    value = source.value(0)
    if value.dtype is DType.UINT32 and spelled == "ui64":
        return Words(value)
    for name in (source.spelled_operand_dtype(), spelled):
        if name == "bf16" or name.endswith("64"):
            raise source.refusal(f"the bits of {name} are not kept")
    return source.builder.bitcast_convert(value, source.dtype())


def _is_infinity(sign: float) -> Rule:
    def rule(source: SourceOp) -> Operand:
        x = source.value(0)
        infinity = source.builder.constant(np.asarray(sign * np.inf, x.dtype.numpy))
        return source.builder.equal(x, infinity)

    return rule


def _map(source: SourceOp) -> list[Operand]:
    (function,) = source.regions
    return list(function(*source.values))


def _broadcasting(name: str) -> Rule:
    """Read an operation of CHLO that broadcasts its operands."""

    def rule(source: SourceOp) -> Operand:
        builder = source.builder
        values = source.values
        rank = max(value.rank for value in values)
        if source.attribute("broadcast_dimensions", None) is not None:
            raise source.refusal("broadcast_dimensions have to be those of NumPy")
        padded = [
            v if not v.rank else builder.reshape(v, (1,) * (rank - v.rank) + v.shape)
            for v in values
        ]
        if name == "compare":
            x, y = padded
            return builder.compare(x, y, source.attribute("comparison_direction"))
        return getattr(builder, _LOGICAL.get(name, name))(*padded)

    return rule


def _constant_like(source: SourceOp) -> Value:
    x = source.value(0)
    scalar = source.builder.constant(np.asarray(source.attribute("value"), x.dtype.numpy))
    return source.builder.broadcast_in_dim(scalar, x.shape, ())


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"stablehlo.{name}": _direct(name) for name in (*_UNARY, *_BINARY)},
        **{f"stablehlo.{name}": _direct(method) for name, method in _LOGICAL.items()},
        **{f"chlo.{name}": _direct(name) for name in CHLO_UNARY},
        **{f"chlo.broadcast_{name}": _broadcasting(name) for name in _CHLO_BROADCAST},
        "chlo.constant_like": _constant_like,
        "chlo.mulhi": _direct("mulhi"),
        "chlo.is_neg_inf": _is_infinity(-1.0),
        "chlo.is_pos_inf": _is_infinity(1.0),
        "stablehlo.bitcast_convert": _bitcast_convert,
        "stablehlo.clamp": _clamp,
        "stablehlo.compare": _compare,
        "stablehlo.convert": _convert,
        "stablehlo.map": _map,
        "stablehlo.maximum": _extremum("maximum", "below"),
        "stablehlo.minimum": _extremum("minimum", "above"),
        "stablehlo.reduce_precision": calling("reduce_precision", "exponent_bits", "mantissa_bits"),
        "stablehlo.select": _select,
    }
)
