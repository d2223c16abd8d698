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
    filled,
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
from coreml_delegate.ops.record import OpRecord, Rewrite, ScoreRole


def _ordered(call: OpCall) -> bool:
    """Something else than booleans is compared."""
    kinds = {t.dtype for _, t in call.tensors()}
    number = call.arguments["other"]
    return kinds != {torch.bool} or type(number) in (int, float)


def _power(call: OpCall) -> bool:
    """A float to any power, or an integer to a small one, which is a product."""
    exponent = call.arguments["exponent"]
    if all(t.dtype.is_floating_point for t in call.outputs()):
        return True
    return isinstance(exponent, int) and 2 <= exponent <= _HIGHEST_POWER


def _compare(node: Node) -> None:
    """Cast the tensors compared to the dtype in which PyTorch compares them."""
    arguments = arguments_of(node)
    sides = {name: arguments[name] for name in ("self", "other")}
    operands = (value_of(s) if isinstance(s, Node) else s for s in sides.values())
    dtype = torch.result_type(*operands)
    if dtype is torch.bool:
        return
    tensors = {n: cast(node, side, dtype) for n, side in sides.items() if isinstance(side, Node)}
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
        _become_whole_quotient(node, x, y, mode)
    elif mode == "trunc":
        sizes = _absolute(node, x), _absolute(node, y)
        signs = insert(node, ATEN.mul.Tensor, insert(node, ATEN.sign.default, x), _sign(node, y))
        become(node, ATEN.mul.Tensor, insert(node, *_floor_quotient(node, *sizes)), signs)
    elif mode == "floor":
        become(node, *_floor_quotient(node, x, y))
    else:
        become(node, ATEN.div.Tensor, x, y)


def _floor_quotient(node: Node, x: Node, y: Any) -> tuple[Any, ...]:
    """The call, with its arguments, that divides floats and rounds down.

    No division and rounding apart: by a constant, coremltools multiplies with its reciprocal, and
    the product may fall below a whole number.
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


def _is_filled_with(operand: Any, number: int) -> bool:
    """Whether an operand is that number throughout; fills may have been cast already."""
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
    """Whether coremltools may find that a divisor is one throughout.

    It then takes even a quotient rounded down for the dividend: apple/coremltools#2836.
    """
    is_computed = isinstance(divisor, Node) and divisor.op == "call_function"
    return _is_filled_with(divisor, 1) or (is_computed and is_known(divisor))


def _become_whole_quotient(node: Node, x: Node, y: Any, mode: str) -> None:
    """Integers are divided as integers: floats have not all of them."""
    if mode == "floor":
        become(node, floor_divide(), x, filled(node, x, y))
        return
    size, sign = insert(node, ATEN.abs.default, x), insert(node, ATEN.sign.default, x)
    if isinstance(y, Node):
        divisor, other = insert(node, ATEN.abs.default, y), insert(node, ATEN.sign.default, y)
    else:
        divisor, other = filled(node, x, abs(y)), 1 if y > 0 else -1
    quotient = insert(node, floor_divide(), size, divisor)
    become(node, ATEN.mul.Tensor, quotient, insert(node, ATEN.mul.Tensor, sign, other))


def _truncate(node: Node) -> None:
    _become_truncated(node, arguments_of(node)["self"])


def _become_truncated(node: Node, x: Node) -> None:
    """Round towards zero, which Core ML has not."""
    size = insert(node, ATEN.floor.default, insert(node, ATEN.abs.default, x))
    become(node, ATEN.mul.Tensor, size, insert(node, ATEN.sign.default, x))


def _fmod(node: Node) -> None:
    """The remainder with the sign of the dividend; Core ML has that of the divisor."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    rest = insert(node, *_rest(node, _absolute(node, x), _absolute(node, y)))
    become(node, ATEN.mul.Tensor, rest, insert(node, ATEN.sign.default, x))


def _remainder(node: Node) -> None:
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    become(node, *_rest(node, x, y))


def _rest(node: Node, x: Node, y: Any) -> tuple[Any, ...]:
    """The call, with its arguments, that leaves the rest of a division rounded down."""
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
    """The angle of the shorter side over the longer, mirrored into its octant.

    Coremltools divides by ``x``, and turns no angle whose ``y`` is zero: apple/coremltools#2769.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    y, x = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    height, width = (insert(node, ATEN.abs.default, side) for side in (y, x))
    long = insert(node, ATEN.maximum.default, height, width)
    short = insert(node, ATEN.minimum.default, height, width)
    nowhere = cast(node, insert(node, ATEN.eq.Scalar, long, 0.0), dtype)
    ratio = insert(node, ATEN.div.Tensor, short, insert(node, ATEN.add.Tensor, long, nowhere))
    angle = insert(node, ATEN.atan.default, ratio)
    mirrors = (
        (insert(node, ATEN.gt.Tensor, height, width), math.pi / 2),
        (_is_negative(node, x), math.pi),
    )
    for where, turn in mirrors:
        way = _way_to_mirrored(node, angle, where, turn)
        angle = insert(node, ATEN.add.Tensor, angle, way)
    way = _way_to_mirrored(node, angle, _is_negative(node, y), 0.0)
    become(node, ATEN.add.Tensor, angle, way)


def _way_to_mirrored(node: Node, angle: Node, where: Node, turn: float) -> Node:
    """Return the difference of ``turn - angle`` and the angle, or 0 where ``where`` is false."""
    way = insert(node, ATEN.add.Scalar, insert(node, ATEN.mul.Scalar, angle, -2.0), turn)
    return insert(node, ATEN.mul.Tensor, way, cast(node, where, value_of(angle).dtype))


def _is_negative(node: Node, x: Node) -> Node:
    """Truths, also of a negative zero, whose reciprocal is infinite."""
    one = insert(node, ATEN.full_like.default, x, 1.0)
    reciprocal = insert(node, ATEN.div.Tensor, one, x)
    signs = (insert(node, ATEN.lt.Scalar, value, 0.0) for value in (x, reciprocal))
    return insert(node, ATEN.logical_or.default, *signs)


def _pow(node: Node) -> None:
    """Small powers of integers as products: MIL has powers of floats alone."""
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
    """Powers of two by their own op: the device squares the exponent, apple/coremltools#2742."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    base, exponent = (cast(node, arguments[n], dtype) for n in ("self", "exponent"))
    if not _is_filled_with(arguments["self"], 2):
        become(node, node.target, base, exponent)
        return
    if shape_of(exponent) != shape_of(node):
        exponent = insert(node, ATEN.expand_copy.default, exponent, shape_of(node))
    become(node, ATEN.exp2.default, exponent)


def _round_decimals(node: Node) -> None:
    """Scale, round to even, scale back, in PyTorch's own order."""
    arguments = arguments_of(node)
    x, decimals = arguments["self"], arguments["decimals"]
    to, back = (ATEN.mul.Tensor, ATEN.div.Tensor)[:: 1 if decimals >= 0 else -1]
    scale = 10.0 ** abs(decimals)
    rounded = insert(node, ATEN.round.default, insert(node, to, x, scale))
    become(node, back, rounded, scale)


def _clamp(node: Node) -> None:
    """Bounds of the result's dtype.

    For a missing bound coremltools takes the largest float, and so computes with floats, which have
    not all integers: apple/coremltools#2839.
    """
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x = cast(node, arguments["self"], dtype)
    bounds = [None if arguments[n] is None else cast(node, arguments[n], dtype) for n in _BOUNDS]
    given = [bound for bound in bounds if bound is not None]
    if any(isinstance(bound, Node) for bound in given):
        if len(given) > 1:
            x = insert(node, ATEN.maximum.default, x, given[0])
        last = ATEN.maximum if bounds[1] is None else ATEN.minimum
        become(node, last.default, x, given[-1])
    elif dtype.is_floating_point or len(given) > 1:
        become(node, node.target, x, *bounds)
    else:
        become(node, (ATEN.clamp_min if bounds[1] is None else ATEN.clamp_max).default, x, *given)


def _of_truths(logic: Any, rewrite: Rewrite) -> Rewrite:
    """Arithmetic that is a logical op where the result is bool."""

    def rewritten(node: Node) -> None:
        if value_of(node).dtype is not torch.bool:
            rewrite(node)
            return
        arguments = arguments_of(node)
        sides = [arguments["self"], arguments["other"]]
        like = next(side for side in sides if isinstance(side, Node))
        become(node, logic, *(filled(node, like, side) for side in sides))

    return rewritten


def _unscaled_truths(call: OpCall) -> bool:
    alpha, results = call.arguments["alpha"], call.outputs()
    return all(result.dtype is not torch.bool for result in results) or alpha in (1, True)


def _isinf(node: Node) -> None:
    size = insert(node, ATEN.abs.default, arguments_of(node)["self"])
    become(node, ATEN.eq.Scalar, size, math.inf)


def _asinh(node: Node) -> None:
    """``log(a + sqrt(a * a + 1))`` of the magnitude, with the sign of ``x``."""
    x = cast(node, arguments_of(node)["self"], value_of(node).dtype)
    size = insert(node, ATEN.abs.default, x)
    near = insert(node, ATEN.clamp.default, size, None, _DOUBLES)
    # The root is long * sqrt(1 + (short / long) ** 2), for fp16 has no squares from 256 on.
    long = insert(node, ATEN.clamp.default, near, 1.0, None)
    short = insert(node, ATEN.clamp.default, near, None, 1.0)
    ratio = insert(node, ATEN.div.Tensor, short, long)
    square = insert(node, ATEN.add.Scalar, insert(node, ATEN.mul.Tensor, ratio, ratio), 1.0)
    root = insert(node, ATEN.mul.Tensor, long, insert(node, ATEN.sqrt.default, square))
    share = insert(node, ATEN.div.Tensor, near, insert(node, ATEN.add.Scalar, root, 1.0))
    beyond = insert(node, ATEN.add.Tensor, near, insert(node, ATEN.mul.Tensor, near, share))
    result = insert(node, *_with_log_of_large(node, _log_plus_one(node, beyond), size))
    become(node, ATEN.mul.Tensor, result, insert(node, ATEN.sign.default, x))


def _acosh(node: Node) -> None:
    """``log(x + sqrt(x * x - 1))``, where ``x * x - 1`` is ``(x - 1) * (x + 1)``; NaN below 1."""
    x = cast(node, arguments_of(node)["self"], value_of(node).dtype)
    near = insert(node, ATEN.clamp.default, x, None, _DOUBLES)
    distance = insert(node, ATEN.sub.Scalar, near, 1.0)
    factors = distance, insert(node, ATEN.add.Scalar, near, 1.0)
    # Two roots, for the product may be beyond fp16, and is positive again below -1.
    roots = (insert(node, ATEN.sqrt.default, factor) for factor in factors)
    beyond = insert(node, ATEN.add.Tensor, distance, insert(node, ATEN.mul.Tensor, *roots))
    become(node, *_with_log_of_large(node, _log_plus_one(node, beyond), x))


def _with_log_of_large(node: Node, result: Node, x: Node) -> tuple[Any, ...]:
    """Return the call that adds ``log(x / limit)`` to a result for x of at most the limit.

    From there on both functions are ``log(2 * x)``, in all digits of fp32.
    """
    # Of a missing bound coremltools makes the largest float, which infinities are above.
    size = insert(node, ATEN.clamp_min.default, x, _DOUBLES)
    factor = insert(node, ATEN.mul.Scalar, size, 1 / _DOUBLES)
    return ATEN.add.Tensor, result, insert(node, ATEN.log.default, factor)


def _log_plus_one(node: Node, x: Node) -> Node:
    """Return ``log(1 + x)``, small ``x`` with all their digits.

    The logarithm of the rounded sum is scaled by ``x`` over what the sum has of it.
    """
    total = insert(node, ATEN.add.Scalar, x, 1.0)
    has = insert(node, ATEN.sub.Scalar, total, 1.0)
    nothing = cast(node, insert(node, ATEN.eq.Scalar, has, 0.0), value_of(x).dtype)
    log = insert(node, ATEN.add.Tensor, insert(node, ATEN.log.default, total), nothing)
    slope = insert(node, ATEN.div.Tensor, log, insert(node, ATEN.add.Tensor, has, nothing))
    return insert(node, ATEN.mul.Tensor, x, slope)


def _reciprocal(node: Node) -> None:
    # MIL's inverse adds an epsilon of 1e-4, which is wrong by a tenth of a percent at 0.1.
    become(node, ATEN.div.Tensor, 1.0, cast(node, node.args[0], value_of(node).dtype))


_DOUBLES = 1024.0
_HIGHEST_POWER = 4
_BOUNDS = ("min", "max")
_ONES_LIKE = "aten.ones_like.default"
_UNSCALED_TRUTHS = holds(
    _unscaled_truths, ReasonCode.ARGUMENT, "booleans are added with another alpha than 1"
)
_ORDERED = holds(_ordered, ReasonCode.DTYPE, "booleans have no order in Core ML")
_SMALL_POWER = holds(
    _power, ReasonCode.ARGUMENT, "Core ML has powers of integers from 2 to 4 alone"
)

_op = partial(OpRecord, score_role=ScoreRole.CARRIES, merge=pointwise)
# Their results are floats whatever they are given.
_floating = partial(_op, dtypes={"": ANY}, rewrite=promote("self"))
_numeric = partial(_op, dtypes={"": NUMERIC})
# PyTorch itself does not take booleans alone for these.
_arithmetic = partial(_op, dtypes={"": ANY})
_number = partial(_op, dtypes={"": ANY}, constraints=(numeric_result,))
_power_of_floats = partial(
    _op, dtypes={"": ANY}, constraints=(floating_result,), rewrite=_floating_pow
)
_ADD = Quantization((Pattern("add", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_MUL = Quantization((Pattern("mul", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_SUM = ScoreRole.CARRIES | ScoreRole.ADDS
_PRODUCT = ScoreRole.CARRIES | ScoreRole.SCALES
_QUOTIENT = ScoreRole.CARRIES | ScoreRole.DIVIDES
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
        _floating(f"aten.{name}", rewrite=promote("self", "other"), score_role=_QUOTIENT)
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
    _arithmetic("aten.sub.Tensor", rewrite=_add_scaled(ATEN.sub.Tensor), score_role=_SUM),
    _number("aten.add.Scalar", rewrite=_add_scaled(ATEN.add.Scalar), score_role=_SUM),
    _arithmetic(
        "aten.add.Tensor",
        constraints=(_UNSCALED_TRUTHS,),
        rewrite=_of_truths(ATEN.logical_or.default, _add_scaled(ATEN.add.Tensor)),
        score_role=_SUM,
        quantization=_ADD,
    ),
    _number("aten.mul.Scalar", rewrite=promote("self", "other"), score_role=_PRODUCT),
    _arithmetic(
        "aten.mul.Tensor",
        rewrite=_of_truths(ATEN.logical_and.default, promote("self", "other")),
        score_role=_PRODUCT,
        quantization=_MUL,
    ),
    *(
        _arithmetic(f"aten.{name}.default", rewrite=_of_truths(logic, promote("self", "other")))
        for name, logic in (
            ("maximum", ATEN.logical_or.default),
            ("minimum", ATEN.logical_and.default),
        )
    ),
    # MIL has powers of floats alone.
    _power_of_floats("aten.pow.Scalar"),
    _power_of_floats("aten.pow.Tensor_Tensor"),
    _numeric("aten.pow.Tensor_Scalar", constraints=(_SMALL_POWER,), rewrite=_pow),
    *(_op(f"aten.{name}.Tensor", dtypes={"": ANY}, rewrite=_compare) for name in ("eq", "ne")),
    *(
        _op(f"aten.{name}", dtypes={"": ANY}, constraints=(_ORDERED,), rewrite=_compare)
        for name in (
            *("lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor"),
            *("eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar"),
        )
    ),
)
