"""Elementwise ops: unary, binary, ternary."""

from __future__ import annotations

from collections.abc import Callable

import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    GRAPH_TYPE,
    convert_to,
    f32,
    is_float,
    magnitude,
    scalar,
)
from coreml_delegate.runtime.engines.openvino.plugin import integers, nan
from coreml_delegate.runtime.engines.openvino.translations import register_expressions, translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal
from coreml_delegate.runtime.mil.dtypes import DType

_UNARY: dict[str, Callable[[Tensor], Result]] = {
    "abs": magnitude,
    "acos": ops.acos,
    "asin": ops.asin,
    "atan": ops.atan,
    "atanh": ops.atanh,
    "ceil": ops.ceiling,
    "cos": ops.cos,
    "cosh": ops.cosh,
    "erf": ops.erf,
    "exp": nan.exp,
    "floor": ops.floor,
    "logical_not": ops.logical_not,
    "round": lambda x: ops.round(x, "half_to_even"),
    "sign": ops.sign,
    "sin": ops.sin,
    "sinh": ops.sinh,
    "sqrt": ops.sqrt,
    "square": lambda x: ops.multiply(x, x),
    "tan": ops.tan,
    "tanh": ops.tanh,
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Result]] = {
    "add": ops.add,
    "equal": integers.exact_equality(ops.equal),
    "greater": integers.exact_order(nan.greater, ops.not_equal, first=False),
    "greater_equal": integers.exact_order(nan.greater_equal, ops.equal, first=True),
    "less": integers.exact_order(ops.less, ops.not_equal, first=True),
    "less_equal": integers.exact_order(ops.less_equal, ops.equal, first=False),
    "logical_and": ops.logical_and,
    "logical_or": ops.logical_or,
    "logical_xor": ops.logical_xor,
    "maximum": nan.maximum,
    "minimum": nan.minimum,
    "mul": ops.multiply,
    "not_equal": integers.exact_equality(ops.not_equal),
    "sub": ops.subtract,
}


def _register_unary(op_type: str, build: Callable[[Tensor], Result]) -> None:
    def unary(x: Tensor) -> Result:
        return build(x)

    translation(op_type)(unary)


def _register_binary(op_type: str, build: Callable[[Tensor, Tensor], Result]) -> None:
    def binary(x: Tensor, y: Tensor) -> Result:
        return build(x, y)

    translation(op_type)(binary)


for _op_type, _unary in _UNARY.items():
    _register_unary(_op_type, _unary)
for _op_type, _binary in _BINARY.items():
    _register_binary(_op_type, _binary)


_Y = {"y": Tensor}
_EPSILON = {"epsilon": float}


def _with_epsilon(build: Callable[[Tensor], Result], default: float) -> Callable[..., Result]:
    return lambda x, epsilon=default: build(ops.add(x, scalar(epsilon, x)))


register_expressions(
    {
        # Integers are rounded towards zero.
        "real_div": (
            _Y,
            lambda x, y: ops.divide(x, y) if is_float(x) else integers.truncated_divide(x, y),
        ),
        "floor_div": (
            _Y,
            lambda x, y: (
                ops.floor(ops.divide(x, y)) if is_float(x) else integers.floor_divide(x, y)
            ),
        ),
        # The sign of the divisor.
        "mod": (
            _Y,
            lambda x, y: ops.floor_mod(x, y) if is_float(x) else integers.floor_modulo(x, y),
        ),
        "exp2": ({}, lambda x: ops.power(scalar(2, f32(x)), f32(x))),
        "inverse": (_EPSILON, _with_epsilon(lambda x: ops.divide(scalar(1, x), x), 1e-4)),
        "log": (_EPSILON, _with_epsilon(ops.log, 1e-45)),
        "rsqrt": (
            _EPSILON,
            _with_epsilon(lambda x: ops.divide(scalar(1, x), ops.sqrt(x)), 1e-12),
        ),
        "threshold": ({"alpha": float}, lambda x, alpha: nan.maximum(x, scalar(alpha, x))),
        "identity": ({}, lambda x: x),
    }
)


@translation("pow")
def power(x: Tensor, y: Tensor) -> Result:
    """``x ** y``."""
    if is_float(x):
        return ops.power(x, y)
    return ops.round(ops.power(f32(x), f32(y)), "half_to_even")


@translation("clip")
def clip(x: Tensor, alpha: float, beta: float, *, exact_nan: bool = False) -> Result:
    """``x`` bounded to [alpha, beta]."""
    bounded = ops.clamp(x, alpha, beta)
    return nan.keep_nan(x, bounded) if exact_nan else bounded


@translation("cast")
def cast(x: Tensor, dtype: str) -> Result:
    """``x`` as ``dtype``; a cast between fp16 and fp32 does nothing, as both are f32 in the graph.

    Floats are truncated to integers and compared with zero for booleans.
    """
    target = DType.from_label(dtype)
    destination = GRAPH_TYPE.get(target)
    if destination is None:
        raise refusal("cast to an unsupported type", dtype)
    if is_float(x) and destination in (ov.Type.i8, ov.Type.u8):
        # In one step, out-of-range floats would saturate; by way of i32 they wrap, as in MIL.
        x = ops.convert(x, "i32")
    result = convert_to(x, destination)
    return integers.wrap_to(result, target) if target in (DType.INT16, DType.UINT16) else result


@translation("select")
def select(cond: Tensor, a: Tensor, b: Tensor) -> Result:
    """``a`` where ``cond`` is true, ``b`` elsewhere."""
    return integers.exact_select(convert_to(cond, ov.Type.boolean), a, b)
