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
from coreml_delegate.ops.record import OpRecord, ScoreRole


def _bends_above_zero(call: OpCall) -> bool:
    return call.arguments["beta"] > 0 and call.arguments["threshold"] >= 0


def _gelu(node: Node) -> None:
    """Spell the tanh approximation out, which coremltools fuses; it overlooks the argument."""
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
    """``scale * (x if x > 0 else alpha * (exp(input_scale * x) - 1))``; MIL has alpha alone."""
    arguments = arguments_of(node)
    x, alpha, scale, input_scale = (
        cast(node, arguments[n], value_of(node).dtype)
        for n in ("self", "alpha", "scale", "input_scale")
    )
    if scale == input_scale == 1:
        become(node, node.target, x, alpha)
        return
    # Above zero the exponential is that of zero, which contributes nothing and cannot overflow.
    negative = insert(node, ATEN.clamp.default, x, None, 0.0)
    scaled = insert(node, ATEN.mul.Scalar, negative, input_scale)
    below = insert(node, ATEN.mul.Scalar, insert(node, ATEN.expm1.default, scaled), alpha)
    both = insert(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), below)
    become(node, ATEN.mul.Scalar, both, scale)


def _log_softmax(node: Node) -> None:
    """The distance from the largest score, less the logarithm of the sum of exponentials.

    Coremltools takes the logarithm of a softmax, which is zero where a score is far below the
    largest: apple/coremltools#2763.
    """
    arguments = arguments_of(node)
    x, dim = cast(node, arguments["self"], value_of(node).dtype), arguments["dim"]
    largest = insert(node, ATEN.amax.default, x, [dim], True)
    distance = insert(node, ATEN.sub.Tensor, x, largest)
    exponentials = insert(node, ATEN.exp.default, distance)
    total = insert(node, ATEN.sum.dim_IntList, exponentials, [dim], True)
    become(node, ATEN.sub.Tensor, distance, insert(node, ATEN.log.default, total))


def _softplus(node: Node) -> None:
    """``relu(x) + softplus(-beta * abs(x)) / beta``; above the threshold ``relu(x)`` alone.

    Coremltools overlooks the threshold: apple/coremltools#2725.
    """
    arguments = arguments_of(node)
    x, beta, threshold = (arguments[n] for n in ("self", "beta", "threshold"))
    scaled = x if beta == 1 else insert(node, ATEN.mul.Scalar, x, float(beta))
    bend = _bend(node, scaled)
    if threshold < _VANISHES:
        below = insert(node, ATEN.le.Scalar, scaled, float(threshold))
        bend = insert(node, ATEN.mul.Tensor, bend, cast(node, below, value_of(node).dtype))
    if beta != 1:
        bend = insert(node, ATEN.mul.Scalar, bend, 1.0 / beta)
    become(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), bend)


def _bend(node: Node, x: Node) -> Node:
    """Return the difference of softplus and relu, ``softplus(-abs(x))``.

    Of large numbers the Neural Engine's softplus is zero in fp16: apple/coremltools#2687.
    """
    below_zero = insert(node, ATEN.mul.Scalar, insert(node, ATEN.abs.default, x), -1.0)
    return insert(node, ATEN.softplus.default, below_zero)


def _mish(node: Node) -> None:
    x = arguments_of(node)["self"]
    relu = insert(node, ATEN.relu.default, x)
    softplus = insert(node, ATEN.add.Tensor, relu, _bend(node, x))
    become(node, ATEN.mul.Tensor, x, insert(node, ATEN.tanh.default, softplus))


def _prelu(node: Node) -> None:
    """The negative part times the slope, where coremltools takes no slope per channel."""
    arguments = arguments_of(node)
    x, weight = arguments["self"], arguments["weight"]
    if value_of(x).dim() == _CHANNELED_RANK or value_of(weight).numel() == 1:
        return
    shape = [-1 if d == 1 else 1 for d in range(value_of(x).dim())]
    slopes = insert(node, ATEN.view_copy.default, weight, shape)
    below = insert(node, ATEN.mul.Tensor, insert(node, ATEN.clamp.default, x, None, 0.0), slopes)
    become(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), below)


_CHANNELED_RANK = 4
_VANISHES = 16  # softplus(-16) is 1e-7

_POSITIVE = holds(_bends_above_zero, ReasonCode.ARGUMENT, "beta or threshold below zero")

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
        _along(name, score_role=ScoreRole.NORMALIZES, flops=_SOFTMAX, quantization=_UNIT)
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
