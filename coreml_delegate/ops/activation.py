"""Activations."""

from __future__ import annotations

import math
from functools import partial

from torch.fx import Node

from coreml_delegate.ops.call import ANY
from coreml_delegate.ops.constraints import IsConstant
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
from coreml_delegate.ops.record import MaskRole, OpRecord


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

_op = partial(OpRecord, merge=pointwise, quantization=activation())
_along = partial(OpRecord, merge=along("dim"))
_SOFTMAX = per_result(SOFTMAX_FLOPS)
_UNIT = Quantization(patterns=(Pattern("softmax"),), fixed_range=(0.0, 1.0))

RECORDS = (
    *(
        _op(f"aten.{name}.default")
        for name in ("hardswish", "leaky_relu", "mish", "silu", "softplus")
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
        _along(name, mask_role=MaskRole.NORMALIZES, flops=_SOFTMAX, quantization=_UNIT)
        for name in ("aten._softmax.default", "aten.softmax.int")
    ),
    *(
        _along(name, flops=_SOFTMAX)
        for name in ("aten._log_softmax.default", "aten.log_softmax.int")
    ),
)

COMPOSITES = tuple(
    CompositeOp(f"aten.{name}.default", activation()) for name in ("celu", "log_sigmoid", "selu")
)
