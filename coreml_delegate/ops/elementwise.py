"""Elementwise arithmetic and comparison.

PyTorch promotes operands of several kinds; the rewrites cast them, as Core ML does not promote.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.mil.compose import division, functions
from coreml_delegate.ops.call import (
    ANY,
    CAST,
    NUMERIC,
    OpCall,
    ReasonCode,
    target_name,
)
from coreml_delegate.ops.constants import is_stored, stored_value
from coreml_delegate.ops.constraints import floating_result, holds, numeric_result
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    fill_like,
    insert,
    positional,
    promote,
    set_arguments,
    shape_of,
    value_of,
)
from coreml_delegate.ops.merging import pointwise
from coreml_delegate.ops.mil_ops import truncate_divide
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
    """Division with rounding, by an op for each mode: coremltools overlooks the keyword."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    ops = {
        "floor": ATEN.floor_divide.default,
        "trunc": truncate_divide(),
        None: ATEN.div.Tensor,
    }
    become(node, ops[arguments["rounding_mode"]], x, y)


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


def _reciprocal(node: Node) -> None:
    # MIL's inverse adds an epsilon of 1e-4, which is wrong by a tenth of a percent at 0.1.
    become(node, ATEN.div.Tensor, 1.0, cast(node, node.args[0], value_of(node).dtype))


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
_to_floats = partial(_op, dtypes={"": ANY}, rewrite=promote("self"))
_of_numbers = partial(_op, dtypes={"": NUMERIC})
# PyTorch itself refuses these ops if all operands are booleans.
_of_all_dtypes = partial(_op, dtypes={"": ANY})
_with_numeric_result = partial(_op, dtypes={"": ANY}, constraints=(numeric_result,))
_power_of_floats = partial(
    _op, dtypes={"": ANY}, constraints=(floating_result,), rewrite=_floating_pow
)
_ADD = Quantization((Pattern("add", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_MUL = Quantization((Pattern("mul", tail=(Tail.ACTIVATION,), keeps_sign=True),))
_CLAMPS = activation(lower_bound="min")

RECORDS = (
    *(_op(f"aten.{name}.default") for name in ("ceil", "floor", "isnan", "round", "square")),
    _op("aten.isinf.default", translation=functions.is_infinite),
    _op("aten.round.decimals", rewrite=_round_decimals),
    _op("aten.trunc.default", translation=division.truncate),
    *(
        _to_floats(f"aten.{name}.default")
        for name in (
            *("acos", "asin", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1"),
            *("log1p", "sin", "sinh", "sqrt", "tan"),
        )
    ),
    *(
        _to_floats(f"aten.{name}.default", translation=partial(functions.log, base=base))
        for name, base in (("log", math.e), ("log2", 2), ("log10", 10))
    ),
    _to_floats("aten.rsqrt.default", translation=functions.rsqrt),
    *(
        _to_floats(f"aten.{name}", rewrite=promote("self", "other"))
        for name in ("div.Scalar", "div.Tensor")
    ),
    _to_floats("aten.acosh.default", translation=functions.acosh),
    _to_floats("aten.asinh.default", translation=functions.asinh),
    _to_floats("aten.atan2.default", rewrite=promote("self", "other"), translation=functions.atan2),
    _to_floats("aten.reciprocal.default", rewrite=_reciprocal),
    *(_of_numbers(f"aten.{name}.default") for name in ("abs", "neg", "sign")),
    _of_numbers("aten.clamp.Tensor", rewrite=_clamp),
    _of_numbers("aten.clamp.default", rewrite=_clamp, quantization=_CLAMPS),
    _of_numbers("aten.clamp_max.default", rewrite=positional("self", "max")),
    _of_numbers("aten.clamp_min.default", rewrite=positional("self", "min"), quantization=_CLAMPS),
    *(_of_all_dtypes(f"aten.div.{kind}_mode", rewrite=_divide) for kind in ("Scalar", "Tensor")),
    *(
        _of_all_dtypes(f"aten.{name}", rewrite=promote("self", "other"), translation=translation)
        for name, translation in (
            ("floor_divide.default", division.floor_divide),
            ("fmod.Scalar", division.fmod),
            ("fmod.Tensor", division.fmod),
            ("remainder.Scalar", division.remainder),
            ("remainder.Scalar_Tensor", division.remainder),
            ("remainder.Tensor", division.remainder),
        )
    ),
    _of_all_dtypes("aten.rsub.Scalar", rewrite=_rsub),
    _of_all_dtypes("aten.sub.Scalar", rewrite=_add_scaled(ATEN.sub.Scalar)),
    _of_all_dtypes("aten.sub.Tensor", rewrite=_add_scaled(ATEN.sub.Tensor)),
    _with_numeric_result("aten.add.Scalar", rewrite=_add_scaled(ATEN.add.Scalar)),
    _of_all_dtypes(
        "aten.add.Tensor",
        constraints=(_UNSCALED_BOOLS,),
        rewrite=_bool_as(ATEN.logical_or.default, _add_scaled(ATEN.add.Tensor)),
        quantization=_ADD,
    ),
    _with_numeric_result("aten.mul.Scalar", rewrite=promote("self", "other")),
    _of_all_dtypes(
        "aten.mul.Tensor",
        rewrite=_bool_as(ATEN.logical_and.default, promote("self", "other")),
        quantization=_MUL,
    ),
    *(
        _of_all_dtypes(f"aten.{name}.default", rewrite=_bool_as(logic, promote("self", "other")))
        for name, logic in (
            ("maximum", ATEN.logical_or.default),
            ("minimum", ATEN.logical_and.default),
        )
    ),
    # MIL has only powers of floats.
    _power_of_floats("aten.pow.Scalar"),
    _power_of_floats("aten.pow.Tensor_Tensor"),
    _of_numbers("aten.pow.Tensor_Scalar", constraints=(_SMALL_POWER,), rewrite=_pow),
    *(_op(f"aten.{name}.Tensor", dtypes={"": ANY}, rewrite=_compare) for name in ("eq", "ne")),
    *(
        _op(f"aten.{name}", dtypes={"": ANY}, constraints=(_COMPARES_NUMBERS,), rewrite=_compare)
        for name in (
            *("lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor"),
            *("eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar"),
        )
    ),
)
