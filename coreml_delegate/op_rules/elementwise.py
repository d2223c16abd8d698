"""Elementwise arithmetic, comparison and logic.

PyTorch promotes operands of several kinds; ``preprocess.rewrite_elementwise`` casts them, as Core
ML does not promote.
"""

import torch

from coreml_delegate.op_rules.constraints import floating_result, holds, numeric_result
from coreml_delegate.op_rules.rule import ANY, BOOL, NUMERIC, OpCall, OpRule, ReasonCode

_UNARY = (
    "aten.ceil.default",
    "aten.floor.default",
    "aten.isnan.default",
    "aten.round.decimals",
    "aten.round.default",
    "aten.square.default",
    "aten.trunc.default",
)
# Floats whatever they are given.
_FLOATING = (
    "aten.acos.default",
    "aten.asin.default",
    "aten.atan.default",
    "aten.atan2.default",
    "aten.atanh.default",
    "aten.cos.default",
    "aten.cosh.default",
    "aten.div.Scalar",
    "aten.div.Tensor",
    "aten.erf.default",
    "aten.exp.default",
    "aten.exp2.default",
    "aten.expm1.default",
    "aten.log.default",
    "aten.log10.default",
    "aten.log1p.default",
    "aten.log2.default",
    "aten.reciprocal.default",
    "aten.rsqrt.default",
    "aten.sin.default",
    "aten.sinh.default",
    "aten.sqrt.default",
    "aten.tan.default",
)
_UNARY_NUMERIC = (
    "aten.abs.default",
    "aten.clamp.Tensor",
    "aten.clamp.default",
    "aten.clamp_max.default",
    "aten.clamp_min.default",
    "aten.neg.default",
    "aten.sign.default",
)
# MIL has powers of floats alone.
_POWERS = (
    "aten.pow.Scalar",
    "aten.pow.Tensor_Tensor",
)
# PyTorch itself does not take booleans alone for these.
_ARITHMETIC = (
    "aten.div.Scalar_mode",
    "aten.div.Tensor_mode",
    "aten.floor_divide.default",
    "aten.fmod.Scalar",
    "aten.fmod.Tensor",
    "aten.remainder.Scalar",
    "aten.remainder.Scalar_Tensor",
    "aten.remainder.Tensor",
    "aten.rsub.Scalar",
    "aten.sub.Scalar",
    "aten.sub.Tensor",
)
_NUMERIC = (
    "aten.add.Scalar",
    "aten.add.Tensor",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.mul.Scalar",
    "aten.mul.Tensor",
)
_BITWISE = (
    "aten.bitwise_and.Tensor",
    "aten.bitwise_not.default",
    "aten.bitwise_or.Tensor",
    "aten.bitwise_xor.Tensor",
)
_LOGICAL = (
    "aten.logical_and.default",
    "aten.logical_not.default",
    "aten.logical_or.default",
    "aten.logical_xor.default",
)
_EQUALITIES = ("eq", "ne")
_ORDERS = ("lt", "le", "gt", "ge")
_HIGHEST_POWER = 4


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


_ORDERED = holds(_ordered, ReasonCode.DTYPE, "booleans have no order in Core ML")

RULES = (
    *(OpRule(target, "elementwise") for target in _UNARY),
    *(OpRule(target, "elementwise", dtypes={"": ANY}) for target in (*_FLOATING, *_ARITHMETIC)),
    *(OpRule(target, "elementwise", dtypes={"": NUMERIC}) for target in _UNARY_NUMERIC),
    *(
        OpRule(target, "elementwise", dtypes={"": ANY}, constraints=(floating_result,))
        for target in _POWERS
    ),
    *(
        OpRule(target, "elementwise", dtypes={"": ANY}, constraints=(numeric_result,))
        for target in _NUMERIC
    ),
    OpRule(
        "aten.pow.Tensor_Scalar",
        "elementwise",
        dtypes={"": NUMERIC},
        constraints=(
            holds(_power, ReasonCode.ARGUMENT, "Core ML has powers of integers from 2 to 4 alone"),
        ),
    ),
    *(OpRule(f"aten.{op}.Tensor", "elementwise", dtypes={"": ANY}) for op in _EQUALITIES),
    *(
        OpRule(f"aten.{op}.Tensor", "elementwise", dtypes={"": ANY}, constraints=(_ORDERED,))
        for op in _ORDERS
    ),
    *(
        OpRule(f"aten.{op}.Scalar", "elementwise", dtypes={"": ANY}, constraints=(_ORDERED,))
        for op in (*_EQUALITIES, *_ORDERS)
    ),
    *(OpRule(target, "elementwise", dtypes={"": ANY}) for target in _LOGICAL),
    *(OpRule(target, "elementwise", dtypes={"": BOOL}) for target in _BITWISE),
    OpRule("aten.where.self", "elementwise", dtypes={"": ANY, "condition": BOOL}),
    OpRule("aten.masked_fill.Scalar", "elementwise", dtypes={"self": NUMERIC, "mask": BOOL}),
)
