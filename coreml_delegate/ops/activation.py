"""Activations."""

from __future__ import annotations

import math
from functools import partial

from torch.fx import Node

from coreml_delegate.ops.call import ANY, OpCall, ReasonCode
from coreml_delegate.ops.constraints import IsConstant, holds
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    insert,
    positional,
    promote,
    value_of,
)
from coreml_delegate.ops.flops import SOFTMAX_FLOPS, per_result
from coreml_delegate.ops.merging import along, pointwise
from coreml_delegate.ops.quantization import CompositeOp, Pattern, Quantization, activation
from coreml_delegate.ops.record import OpRecord


def _has_positive_formula(call: OpCall) -> bool:
    return call.arguments["beta"] > 0 and call.arguments["threshold"] >= 0


def _gelu(node: Node) -> None:
    """``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2`` for ``approximate="tanh"``.

    Coremltools overlooks the argument, but fuses the formula.
    """
    arguments = arguments_of(node)
    x = arguments["self"]
    if arguments["approximate"] != "tanh":
        become(node, node.target, x)
        return
    cube = insert(node, ATEN.pow.Tensor_Scalar, x, 3.0)
    scaled = insert(node, ATEN.mul.Scalar, cube, 0.044715)
    total = insert(node, ATEN.add.Tensor, x, scaled)
    angle = insert(node, ATEN.mul.Scalar, total, math.sqrt(2 / math.pi))
    tanh = insert(node, ATEN.tanh.default, angle)
    half = insert(node, ATEN.mul.Scalar, insert(node, ATEN.add.Scalar, tanh, 1.0), 0.5)
    become(node, ATEN.mul.Tensor, half, x)


def _elu(node: Node) -> None:
    """``scale * (x if x > 0 else alpha * (exp(input_scale * x) - 1))``; MIL has only alpha."""
    arguments = arguments_of(node)
    x, alpha, scale, input_scale = (
        cast(node, arguments[n], value_of(node).dtype)
        for n in ("self", "alpha", "scale", "input_scale")
    )
    if scale == input_scale == 1:
        become(node, node.target, x, alpha)
        return
    # The clamp makes the exponential 1 for positive x: it adds nothing and cannot overflow.
    negative = insert(node, ATEN.clamp.default, x, None, 0.0)
    scaled = insert(node, ATEN.mul.Scalar, negative, input_scale)
    below_zero = insert(node, ATEN.mul.Scalar, insert(node, ATEN.expm1.default, scaled), alpha)
    total = insert(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), below_zero)
    become(node, ATEN.mul.Scalar, total, scale)


def _log_softmax(node: Node) -> None:
    """``(x - max) - log(sum(exp(x - max)))``, with maximum and sum along ``dim``.

    Coremltools takes the logarithm of the softmax, which underflows to zero for scores far below
    the maximum: apple/coremltools#2763.
    """
    arguments = arguments_of(node)
    x, dim = cast(node, arguments["self"], value_of(node).dtype), arguments["dim"]
    maximum = insert(node, ATEN.amax.default, x, [dim], True)
    shifted = insert(node, ATEN.sub.Tensor, x, maximum)
    exponentials = insert(node, ATEN.exp.default, shifted)
    total = insert(node, ATEN.sum.dim_IntList, exponentials, [dim], True)
    become(node, ATEN.sub.Tensor, shifted, insert(node, ATEN.log.default, total))


def _softplus(node: Node) -> None:
    """``softplus(beta * x) / beta``; ``x`` above the threshold.

    Coremltools overlooks the threshold: apple/coremltools#2725.
    """
    arguments = arguments_of(node)
    x, beta, threshold = (arguments[n] for n in ("self", "beta", "threshold"))
    if beta == 1 and threshold >= _NEGLIGIBLE_FROM:
        return
    scaled = x if beta == 1 else insert(node, ATEN.mul.Scalar, x, float(beta))
    formula = insert(node, ATEN.softplus.default, scaled)
    if beta != 1:
        formula = insert(node, ATEN.mul.Scalar, formula, 1.0 / beta)
    above = insert(node, ATEN.gt.Scalar, scaled, float(min(threshold, _NEGLIGIBLE_FROM)))
    become(node, ATEN.where.self, above, x, formula)


def _mish(node: Node) -> None:
    """``x * tanh(softplus(x))``."""
    x = arguments_of(node)["self"]
    softplus = insert(node, ATEN.softplus.default, x)
    become(node, ATEN.mul.Tensor, x, insert(node, ATEN.tanh.default, softplus))


def _prelu(node: Node) -> None:
    """``relu(x) + slope * min(x, 0)``; coremltools takes a slope per channel only for rank 4."""
    arguments = arguments_of(node)
    x, weight = arguments["self"], arguments["weight"]
    if value_of(x).dim() == _RANK_WITH_CHANNEL_SLOPES or value_of(weight).numel() == 1:
        return
    shape = [-1 if d == 1 else 1 for d in range(value_of(x).dim())]
    slopes = insert(node, ATEN.view_copy.default, weight, shape)
    negative = insert(node, ATEN.mul.Tensor, insert(node, ATEN.clamp.default, x, None, 0.0), slopes)
    become(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), negative)


_RANK_WITH_CHANNEL_SLOPES = 4
_NEGLIGIBLE_FROM = 16  # softplus(-16) is 1e-7

_POSITIVE = holds(_has_positive_formula, ReasonCode.ARGUMENT, "beta or threshold below zero")

_op = partial(OpRecord, merge=pointwise, quantization=activation())
_along = partial(OpRecord, merge=along("dim"))
_SOFTMAX = per_result(SOFTMAX_FLOPS)
_UNIT = Quantization(patterns=(Pattern("softmax"),), fixed_range=(0.0, 1.0))

RECORDS = (
    *(_op(f"aten.{name}.default") for name in ("hardswish", "leaky_relu", "silu")),
    _op("aten.mish.default", rewrite=_mish),
    _op(
        "aten.softplus.default",
        constraints=(_POSITIVE,),
        rewrite=_softplus,
    ),
    *(
        _op(f"aten.{name}.default", quantization=activation(lower_bound=0.0))
        for name in ("relu", "relu6")
    ),
    _op(
        "aten.hardtanh.default",
        rewrite=positional("self", "min_val", "max_val"),
        quantization=activation(lower_bound="min_val"),
    ),
    _op("aten.hardsigmoid.default", quantization=activation(fixed_range=(0.0, 1.0))),
    _op(
        "aten.sigmoid.default",
        dtypes={"": ANY},
        rewrite=promote("self"),
        quantization=activation(fixed_range=(0.0, 1.0)),
    ),
    _op(
        "aten.tanh.default",
        dtypes={"": ANY},
        rewrite=promote("self"),
        quantization=activation(fixed_range=(-1.0, 1.0)),
    ),
    _op("aten.elu.default", rewrite=_elu),
    _op("aten.gelu.default", rewrite=_gelu),
    _op("aten.prelu.default", constraints=(IsConstant("weight"),), merge=None, rewrite=_prelu),
    _along("aten.glu.default"),
    *(
        _along(name, flops=_SOFTMAX, quantization=_UNIT)
        for name in ("aten._softmax.default", "aten.softmax.int")
    ),
    *(
        _along(name, flops=_SOFTMAX, rewrite=_log_softmax)
        for name in ("aten._log_softmax.default", "aten.log_softmax.int")
    ),
)

COMPOSITES = tuple(
    CompositeOp(f"aten.{name}.default", activation()) for name in ("celu", "log_sigmoid", "selu")
)
