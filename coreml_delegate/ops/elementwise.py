"""Elementwise arithmetic and comparison.

PyTorch promotes operands of several kinds; the rewrites cast them, as Core ML does not promote.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    ANY,
    CAST,
    NUMERIC,
    OpCall,
    ReasonCode,
    target_name,
)
from coreml_delegate.ops.constants import is_known, is_stored, stored_value
from coreml_delegate.ops.constraints import floating_result, holds, numeric_result
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    fill_like,
    insert,
    number,
    positional,
    promote,
    set_arguments,
    shape_of,
    value_of,
)
from coreml_delegate.ops.merging import pointwise
from coreml_delegate.ops.mil_ops import floor_divide
from coreml_delegate.ops.quantization import Pattern, Quantization, Tail, activation
from coreml_delegate.ops.record import OpRecord, Rewrite


def _compares_numbers(call: OpCall) -> bool:
    """A number, or a tensor that is not bool, is compared."""
    dtypes = {t.dtype for _, t in call.tensors()}
    number = call.arguments["other"]
    return dtypes != {torch.bool} or type(number) in (int, float)


def _is_computable_power(call: OpCall) -> bool:
    """The result is a float, or the exponent is an integer small enough for a product."""
    exponent = call.arguments["exponent"]
    if all(t.dtype.is_floating_point for t in call.outputs()):
        return True
    return isinstance(exponent, int) and 2 <= exponent <= _HIGHEST_POWER


def _compare(node: Node) -> None:
    """Cast the tensors compared to the dtype in which PyTorch compares them."""
    arguments = arguments_of(node)
    operands = {name: arguments[name] for name in ("self", "other")}
    values = (value_of(s) if isinstance(s, Node) else s for s in operands.values())
    dtype = torch.result_type(*values)
    if dtype is torch.bool:
        return
    tensors = {n: cast(node, x, dtype) for n, x in operands.items() if isinstance(x, Node)}
    set_arguments(node, **tensors)


def _add_scaled(target: Any) -> Rewrite:
    """``self ± alpha * other``; coremltools overlooks alpha: apple/coremltools#2573."""

    def rewrite(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        x, y, alpha = (cast(node, arguments[n], dtype) for n in ("self", "other", "alpha"))
        if alpha == 1:
            become(node, node.target, x, y)
        elif isinstance(y, Node):
            become(node, target, x, insert(node, ATEN.mul.Tensor, y, alpha))
        else:
            become(node, target, x, y * alpha)

    return rewrite


def _rsub(node: Node) -> None:
    """``other - alpha * self``."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y, alpha = (cast(node, arguments[n], dtype) for n in ("self", "other", "alpha"))
    if alpha != 1:
        x = insert(node, ATEN.mul.Tensor, x, alpha)
    become(node, ATEN.sub.Tensor, y, x)


def _divide(node: Node) -> None:
    """Division with rounding; the mode is a keyword that coremltools does not see everywhere."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    mode = arguments.get("rounding_mode", "floor")
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    if not dtype.is_floating_point:
        _become_integer_quotient(node, x, y, mode)
    elif mode == "trunc":
        magnitudes = _absolute(node, x), _absolute(node, y)
        signs = insert(node, ATEN.mul.Tensor, insert(node, ATEN.sign.default, x), _sign(node, y))
        become(node, ATEN.mul.Tensor, insert(node, *_floor_quotient(node, *magnitudes)), signs)
    elif mode == "floor":
        become(node, *_floor_quotient(node, x, y))
    else:
        become(node, ATEN.div.Tensor, x, y)


def _floor_quotient(node: Node, x: Node, y: Any) -> tuple[Any, ...]:
    """Return target and arguments of the call that computes ``floor(x / y)`` of floats.

    It is one op: coremltools replaces a division by a constant with a product with the reciprocal,
    which may fall below a whole number.
    """
    if _may_be_ones(y):
        return ATEN.floor.default, insert(node, ATEN.floor_divide.default, x, y)
    return ATEN.floor_divide.default, x, y


def _absolute(node: Node, value: Any) -> Any:
    return insert(node, ATEN.abs.default, value) if isinstance(value, Node) else abs(value)


def _sign(node: Node, value: Any) -> Any:
    if isinstance(value, Node):
        return insert(node, ATEN.sign.default, value)
    return math.copysign(1.0, value)


def _is_full_of(operand: Any, number: int) -> bool:
    """Whether all elements of an operand are ``number``; casts of the operand are skipped."""
    while isinstance(operand, Node) and target_name(operand.target) == CAST:
        operand = operand.args[0]
    if is_stored(operand):
        value = stored_value(operand)
        return value is not None and bool((value == number).all())
    if operand.op != "call_function":
        return False
    if target_name(operand.target) == _ONES_LIKE:
        return number == 1
    return arguments_of(operand).get("fill_value") == number


def _may_be_ones(divisor: Any) -> bool:
    """Whether coremltools may find that all elements of a divisor are 1.

    It then replaces even a rounded quotient with the dividend: apple/coremltools#2836.
    """
    is_computed = isinstance(divisor, Node) and divisor.op == "call_function"
    return _is_full_of(divisor, 1) or (is_computed and is_known(divisor))


def _become_integer_quotient(node: Node, x: Node, y: Any, mode: str) -> None:
    """Divide integers as integers: fp32 does not represent all of them."""
    if mode == "floor":
        become(node, floor_divide(), x, fill_like(node, x, y))
        return
    magnitude, sign = insert(node, ATEN.abs.default, x), insert(node, ATEN.sign.default, x)
    if isinstance(y, Node):
        divisor, sign_of_y = insert(node, ATEN.abs.default, y), insert(node, ATEN.sign.default, y)
    else:
        divisor, sign_of_y = fill_like(node, x, abs(y)), 1 if y > 0 else -1
    quotient = insert(node, floor_divide(), magnitude, divisor)
    become(node, ATEN.mul.Tensor, quotient, insert(node, ATEN.mul.Tensor, sign, sign_of_y))


def _truncate(node: Node) -> None:
    _become_truncated(node, arguments_of(node)["self"])


def _become_truncated(node: Node, x: Node) -> None:
    """``sign(x) * floor(abs(x))``: Core ML has no op that rounds towards zero."""
    magnitude = insert(node, ATEN.floor.default, insert(node, ATEN.abs.default, x))
    become(node, ATEN.mul.Tensor, magnitude, insert(node, ATEN.sign.default, x))


def _fmod(node: Node) -> None:
    """``sign(x) * (abs(x) mod abs(y))``: Core ML's remainder has the sign of the divisor."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    remainder = insert(node, *_remainder_call(node, _absolute(node, x), _absolute(node, y)))
    become(node, ATEN.mul.Tensor, remainder, insert(node, ATEN.sign.default, x))


def _remainder(node: Node) -> None:
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    become(node, *_remainder_call(node, x, y))


def _remainder_call(node: Node, x: Node, y: Any) -> tuple[Any, ...]:
    """Return target and arguments of the call that computes ``x - floor(x / y) * y``."""
    if not value_of(x).dtype.is_floating_point or not _may_be_ones(y):
        overload = ATEN.remainder.Tensor if isinstance(y, Node) else ATEN.remainder.Scalar
        return overload, x, y
    quotient = insert(node, *_floor_quotient(node, x, y))
    return ATEN.sub.Tensor, x, insert(node, ATEN.mul.Tensor, quotient, y)


def _remainder_of_number(node: Node) -> None:
    """A number divided by a tensor; MIL's op takes two tensors of one kind."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    divisor = cast(node, arguments["other"], dtype)
    dividend = insert(node, ATEN.full_like.default, divisor, number(arguments["self"], dtype))
    become(node, ATEN.remainder.Tensor, dividend, divisor)


def _atan2(node: Node) -> None:
    """``atan(min(|x|, |y|) / max(|x|, |y|))``, reflected into its octant.

    Coremltools divides by ``x``, and is wrong for ``y`` of zero: apple/coremltools#2769.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    y, x = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    height, width = (insert(node, ATEN.abs.default, side) for side in (y, x))
    longer = insert(node, ATEN.maximum.default, height, width)
    shorter = insert(node, ATEN.minimum.default, height, width)
    is_origin = cast(node, insert(node, ATEN.eq.Scalar, longer, 0.0), dtype)
    ratio = insert(node, ATEN.div.Tensor, shorter, insert(node, ATEN.add.Tensor, longer, is_origin))
    angle = insert(node, ATEN.atan.default, ratio)
    reflections = (
        (insert(node, ATEN.gt.Tensor, height, width), math.pi / 2),
        (_is_negative(node, x), math.pi),
    )
    for condition, total in reflections:
        difference = _reflect_where(node, angle, condition, total)
        angle = insert(node, ATEN.add.Tensor, angle, difference)
    difference = _reflect_where(node, angle, _is_negative(node, y), 0.0)
    become(node, ATEN.add.Tensor, angle, difference)


def _reflect_where(node: Node, angle: Node, condition: Node, total: float) -> Node:
    """Return the summand that turns ``angle`` into ``total - angle``; 0 where not ``condition``."""
    difference = insert(node, ATEN.add.Scalar, insert(node, ATEN.mul.Scalar, angle, -2.0), total)
    return insert(node, ATEN.mul.Tensor, difference, cast(node, condition, value_of(angle).dtype))


def _is_negative(node: Node, x: Node) -> Node:
    """Sign bit of ``x``: true for -0.0 too, whose reciprocal is -inf."""
    one = insert(node, ATEN.full_like.default, x, 1.0)
    reciprocal = insert(node, ATEN.div.Tensor, one, x)
    conditions = (insert(node, ATEN.lt.Scalar, tested, 0.0) for tested in (x, reciprocal))
    return insert(node, ATEN.logical_or.default, *conditions)


def _pow(node: Node) -> None:
    """Small powers of integers as products: MIL has only powers of floats."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, exponent = cast(node, arguments["self"], dtype), arguments["exponent"]
    if dtype.is_floating_point:
        become(node, node.target, x, cast(node, exponent, dtype))
        return
    product = x
    for _ in range(exponent - 2):
        product = insert(node, ATEN.mul.Tensor, product, x)
    become(node, ATEN.mul.Tensor, product, x)


def _floating_pow(node: Node) -> None:
    """Powers of base 2 as ``exp2``: the device squares the exponent, apple/coremltools#2742."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    base, exponent = (cast(node, arguments[n], dtype) for n in ("self", "exponent"))
    if not _is_full_of(arguments["self"], 2):
        become(node, node.target, base, exponent)
        return
    if shape_of(exponent) != shape_of(node):
        exponent = insert(node, ATEN.expand_copy.default, exponent, shape_of(node))
    become(node, ATEN.exp2.default, exponent)


def _round_decimals(node: Node) -> None:
    """Scale, round to even, scale back, in PyTorch's own order."""
    arguments = arguments_of(node)
    x, decimals = arguments["self"], arguments["decimals"]
    forward, backward = (ATEN.mul.Tensor, ATEN.div.Tensor)[:: 1 if decimals >= 0 else -1]
    scale = 10.0 ** abs(decimals)
    rounded = insert(node, ATEN.round.default, insert(node, forward, x, scale))
    become(node, backward, rounded, scale)


def _clamp(node: Node) -> None:
    """Clamp with bounds of the result's dtype.

    For a missing bound coremltools takes the largest float, and so computes with floats, which do
    not represent all integers: apple/coremltools#2839.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x = cast(node, arguments["self"], dtype)
    bounds = [None if arguments[n] is None else cast(node, arguments[n], dtype) for n in _BOUNDS]
    present = [bound for bound in bounds if bound is not None]
    if any(isinstance(bound, Node) for bound in present):
        if len(present) > 1:
            x = insert(node, ATEN.maximum.default, x, present[0])
        final_op = ATEN.maximum if bounds[1] is None else ATEN.minimum
        become(node, final_op.default, x, present[-1])
    elif dtype.is_floating_point or len(present) > 1:
        become(node, node.target, x, *bounds)
    else:
        become(node, (ATEN.clamp_min if bounds[1] is None else ATEN.clamp_max).default, x, *present)


def _bool_as(logic: Any, rewrite: Rewrite) -> Rewrite:
    """Return a rewrite: to ``logic`` if the result is bool, else ``rewrite``."""

    def rewritten(node: Node) -> None:
        if value_of(node).dtype is not torch.bool:
            rewrite(node)
            return
        arguments = arguments_of(node)
        operands = [arguments["self"], arguments["other"]]
        like = next(operand for operand in operands if isinstance(operand, Node))
        become(node, logic, *(fill_like(node, like, operand) for operand in operands))

    return rewritten


def _adds_unscaled_bools(call: OpCall) -> bool:
    alpha, results = call.arguments["alpha"], call.outputs()
    return all(result.dtype is not torch.bool for result in results) or alpha in (1, True)


def _isinf(node: Node) -> None:
    magnitude = insert(node, ATEN.abs.default, arguments_of(node)["self"])
    become(node, ATEN.eq.Scalar, magnitude, math.inf)


def _asinh(node: Node) -> None:
    """``sign(x) * log(a + sqrt(a * a + 1))`` with ``a = abs(x)``."""
    x = cast(node, arguments_of(node)["self"], value_of(node).dtype)
    magnitude = insert(node, ATEN.abs.default, x)
    limited = insert(node, ATEN.clamp.default, magnitude, None, _LOG_2X_FROM)
    # The root is long * sqrt(1 + (short / long) ** 2), with long = max(a, 1) and short = min(a, 1):
    # no square overflows fp16 (256 squared is beyond 65504).
    long = insert(node, ATEN.clamp.default, limited, 1.0, None)
    short = insert(node, ATEN.clamp.default, limited, None, 1.0)
    ratio = insert(node, ATEN.div.Tensor, short, long)
    square = insert(node, ATEN.add.Scalar, insert(node, ATEN.mul.Tensor, ratio, ratio), 1.0)
    root = insert(node, ATEN.mul.Tensor, long, insert(node, ATEN.sqrt.default, square))
    share = insert(node, ATEN.div.Tensor, limited, insert(node, ATEN.add.Scalar, root, 1.0))
    excess = insert(node, ATEN.add.Tensor, limited, insert(node, ATEN.mul.Tensor, limited, share))
    result = insert(node, *_with_log_of_large(node, _log_plus_one(node, excess), magnitude))
    become(node, ATEN.mul.Tensor, result, insert(node, ATEN.sign.default, x))


def _acosh(node: Node) -> None:
    """``log(x + sqrt(x * x - 1))``, where ``x * x - 1`` is ``(x - 1) * (x + 1)``; NaN below 1."""
    x = cast(node, arguments_of(node)["self"], value_of(node).dtype)
    limited = insert(node, ATEN.clamp.default, x, None, _LOG_2X_FROM)
    difference = insert(node, ATEN.sub.Scalar, limited, 1.0)
    factors = difference, insert(node, ATEN.add.Scalar, limited, 1.0)
    # Two roots, because the product may overflow fp16, and is positive again below -1.
    roots = (insert(node, ATEN.sqrt.default, factor) for factor in factors)
    excess = insert(node, ATEN.add.Tensor, difference, insert(node, ATEN.mul.Tensor, *roots))
    become(node, *_with_log_of_large(node, _log_plus_one(node, excess), x))


def _with_log_of_large(node: Node, result: Node, x: Node) -> tuple[Any, ...]:
    """Return target and arguments of ``result + log(max(x, limit) / limit)``.

    ``result`` is the function of ``min(x, limit)``; above the limit, asinh and acosh are
    ``log(2 * x)`` in all digits of fp32.
    """
    # A clamp without upper bound would limit infinities: coremltools takes the largest float.
    at_least_limit = insert(node, ATEN.clamp_min.default, x, _LOG_2X_FROM)
    factor = insert(node, ATEN.mul.Scalar, at_least_limit, 1 / _LOG_2X_FROM)
    return ATEN.add.Tensor, result, insert(node, ATEN.log.default, factor)


def _log_plus_one(node: Node, x: Node) -> Node:
    """``log(t) * x / (t - 1)`` with ``t = 1 + x``, rounded: ``log(1 + x)``, exact for small ``x``.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic".
    """
    total = insert(node, ATEN.add.Scalar, x, 1.0)
    rounded_x = insert(node, ATEN.sub.Scalar, total, 1.0)
    is_zero = cast(node, insert(node, ATEN.eq.Scalar, rounded_x, 0.0), value_of(x).dtype)
    log = insert(node, ATEN.add.Tensor, insert(node, ATEN.log.default, total), is_zero)
    slope = insert(node, ATEN.div.Tensor, log, insert(node, ATEN.add.Tensor, rounded_x, is_zero))
    return insert(node, ATEN.mul.Tensor, x, slope)


def _reciprocal(node: Node) -> None:
    # MIL's inverse adds an epsilon of 1e-4, which is wrong by a tenth of a percent at 0.1.
    become(node, ATEN.div.Tensor, 1.0, cast(node, node.args[0], value_of(node).dtype))


_LOG_2X_FROM = 1024.0
_HIGHEST_POWER = 4
_BOUNDS = ("min", "max")
_ONES_LIKE = "aten.ones_like.default"
_UNSCALED_BOOLS = holds(
    _adds_unscaled_bools, ReasonCode.ARGUMENT, "booleans are added with another alpha than 1"
)
_COMPARES_NUMBERS = holds(_compares_numbers, ReasonCode.DTYPE, "booleans have no order in Core ML")
_SMALL_POWER = holds(
    _is_computable_power, ReasonCode.ARGUMENT, "Core ML has only the powers 2 to 4 of integers"
)

_op = partial(OpRecord, merge=pointwise)
# Ops whose results are floats for every dtype.
_floating = partial(_op, dtypes={"": ANY}, rewrite=promote("self"))
_numeric = partial(_op, dtypes={"": NUMERIC})
# PyTorch itself refuses these ops if all operands are booleans.
_arithmetic = partial(_op, dtypes={"": ANY})
_number = partial(_op, dtypes={"": ANY}, constraints=(numeric_result,))
_power_of_floats = partial(
    _op, dtypes={"": ANY}, constraints=(floating_result,), rewrite=_floating_pow
)
_ADD = Quantization((Pattern("add", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_MUL = Quantization((Pattern("mul", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_CLAMPS = activation(lower_bound="min")

RECORDS = (
    *(_op(f"aten.{name}.default") for name in ("ceil", "floor", "isnan", "round", "square")),
    _op("aten.isinf.default", rewrite=_isinf),
    _op("aten.round.decimals", rewrite=_round_decimals),
    _op("aten.trunc.default", rewrite=_truncate),
    *(
        _floating(f"aten.{name}.default")
        for name in (
            *("acos", "asin", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1"),
            *("log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan"),
        )
    ),
    *(
        _floating(f"aten.{name}", rewrite=promote("self", "other"))
        for name in ("div.Scalar", "div.Tensor")
    ),
    _floating("aten.acosh.default", rewrite=_acosh),
    _floating("aten.asinh.default", rewrite=_asinh),
    _floating("aten.atan2.default", rewrite=_atan2),
    _floating("aten.reciprocal.default", rewrite=_reciprocal),
    *(_numeric(f"aten.{name}.default") for name in ("abs", "neg", "sign")),
    _numeric("aten.clamp.Tensor", rewrite=_clamp),
    _numeric("aten.clamp.default", rewrite=_clamp, quantization=_CLAMPS),
    _numeric("aten.clamp_max.default", rewrite=positional("self", "max")),
    _numeric("aten.clamp_min.default", rewrite=positional("self", "min"), quantization=_CLAMPS),
    *(
        _arithmetic(f"aten.{name}", rewrite=_divide)
        for name in ("div.Scalar_mode", "div.Tensor_mode", "floor_divide.default")
    ),
    *(_arithmetic(f"aten.fmod.{kind}", rewrite=_fmod) for kind in ("Scalar", "Tensor")),
    *(_arithmetic(f"aten.remainder.{kind}", rewrite=_remainder) for kind in ("Scalar", "Tensor")),
    _arithmetic("aten.remainder.Scalar_Tensor", rewrite=_remainder_of_number),
    _arithmetic("aten.rsub.Scalar", rewrite=_rsub),
    _arithmetic("aten.sub.Scalar", rewrite=_add_scaled(ATEN.sub.Scalar)),
    _arithmetic("aten.sub.Tensor", rewrite=_add_scaled(ATEN.sub.Tensor)),
    _number("aten.add.Scalar", rewrite=_add_scaled(ATEN.add.Scalar)),
    _arithmetic(
        "aten.add.Tensor",
        constraints=(_UNSCALED_BOOLS,),
        rewrite=_bool_as(ATEN.logical_or.default, _add_scaled(ATEN.add.Tensor)),
        quantization=_ADD,
    ),
    _number("aten.mul.Scalar", rewrite=promote("self", "other")),
    _arithmetic(
        "aten.mul.Tensor",
        rewrite=_bool_as(ATEN.logical_and.default, promote("self", "other")),
        quantization=_MUL,
    ),
    *(
        _arithmetic(f"aten.{name}.default", rewrite=_bool_as(logic, promote("self", "other")))
        for name, logic in (
            ("maximum", ATEN.logical_or.default),
            ("minimum", ATEN.logical_and.default),
        )
    ),
    # MIL has only powers of floats.
    _power_of_floats("aten.pow.Scalar"),
    _power_of_floats("aten.pow.Tensor_Tensor"),
    _numeric("aten.pow.Tensor_Scalar", constraints=(_SMALL_POWER,), rewrite=_pow),
    *(_op(f"aten.{name}.Tensor", dtypes={"": ANY}, rewrite=_compare) for name in ("eq", "ne")),
    *(
        _op(f"aten.{name}", dtypes={"": ANY}, constraints=(_COMPARES_NUMBERS,), rewrite=_compare)
        for name in (
            *("lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor"),
            *("eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar"),
        )
    ),
)
