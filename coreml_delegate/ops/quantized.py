"""Quantized values between ``quantize`` and ``dequantize``, as PT2E quantization leaves them.

Core ML fuses an op with the ``quantize`` and ``dequantize`` calls around it: dequantized weights
are stored as integers, and an op between dequantized inputs and a quantized result may compute in
integers. These integers exist only inside a delegate: no 8-bit tensor crosses its boundary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    DEQUANTIZE,
    FLOAT,
    INTEGER,
    MAX_RANK,
    QUANTIZE,
    OpCall,
    Reason,
    ReasonCode,
    target_name,
)
from coreml_delegate.ops.constants import is_derived
from coreml_delegate.ops.constraints import IsConstant, rank_between
from coreml_delegate.ops.record import Constraint, OpRecord
from coreml_delegate.targets import Opset

INT8 = frozenset({torch.int8, torch.uint8})

_DEQUANTIZE_CHANNELS, _DEQUANTIZE = sorted(DEQUANTIZE)


def _clips_to_dtype_range(call: OpCall) -> Reason | None:
    """Quantization clips to the full range of the dtype, as Core ML does."""
    dtype = call.arguments["dtype"]
    if dtype not in INT8:
        return None  # the check of the result's dtype refuses it
    limits = torch.iinfo(dtype)
    low, high = call.arguments["quant_min"], call.arguments["quant_max"]
    if (low, high) == (limits.min, limits.max):
        return None
    text = f"it clips to {low} .. {high}, Core ML to {limits.min} .. {limits.max}"
    return Reason(ReasonCode.ARGUMENT, text)


_QUANTIZES: tuple[Constraint, ...] = (_clips_to_dtype_range, rank_between("input", 1, MAX_RANK))


def _is_dequantized_inside(call: OpCall) -> Reason | None:
    """Every use of the quantized result is a dequantize call that Core ML takes."""
    for user in call.node.users:
        dequantizes = target_name(user.target) in DEQUANTIZE
        if not dequantizes or user.meta["val"].dtype not in FLOAT:
            return Reason(
                ReasonCode.USE, f"{user.name!r} takes its integers, which leave no delegate"
            )
    return None


def _is_quantized_inside(call: OpCall) -> Reason | None:
    """The integers are constants, or quantized by a call that Core ML takes."""
    source = call.arguments["input"]
    if not isinstance(source, Node) or is_derived(source, call.constants):
        return None
    if source.op != "call_function" or target_name(source.target) != QUANTIZE:
        text = f"{source.name!r} is neither a constant nor quantized in the program"
        return Reason(ReasonCode.ARGUMENT, text)
    call_of_quantize = OpCall.of(source, call.constants)
    for check in (*_QUANTIZES, _is_dequantized_inside):
        reason = check(call_of_quantize)
        if reason is not None:
            return Reason(reason.code, f"{source.name!r} is not quantized by Core ML: {reason}")
    return None


def _has_zero_points(call: OpCall) -> Reason | None:
    if call.arguments["zero_points"] is not None:
        return None
    return Reason(ReasonCode.ARGUMENT, "zero_points=None, Core ML takes integers")


# For iOS16, coremltools casts zero points per channel to the type of the integers, which has no op.
_op = partial(OpRecord, since=Opset.iOS17, preserve=False, standalone=False)

RECORDS = (
    _op(
        QUANTIZE,
        results=INT8,
        constraints=(*_QUANTIZES, _is_dequantized_inside),
    ),
    _op(
        _DEQUANTIZE,
        dtypes={"": INT8},
        results=FLOAT,
        constraints=(_is_quantized_inside,),
    ),
    _op(
        _DEQUANTIZE_CHANNELS,
        dtypes={"": INT8, "scales": FLOAT, "zero_points": INTEGER | INT8},
        results=FLOAT,
        constraints=(
            _is_quantized_inside,
            IsConstant("scales"),
            _has_zero_points,
            IsConstant("zero_points"),
        ),
    ),
)
