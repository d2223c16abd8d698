"""Calls of activations."""

from __future__ import annotations

import torch
from ops.op_samples.sample import accept, i, reject, w, x

from coreml_delegate.ops import ReasonCode

_PLAIN = (
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
)
_SOFTMAX = ("aten.softmax.int", "aten.log_softmax.int")
_CORE_SOFTMAX = ("aten._softmax.default", "aten._log_softmax.default")
_WIDE = {"low": -8.0, "high": 8.0}
_FAR = x(values=[[0.0, 200.0, 150.0], [-300.0, 0.0, -0.5]])

ACCEPTED = (
    *(accept(f"aten.{op}.default", x(2, 3, 4, **_WIDE)) for op in _PLAIN),
    *(accept(f"aten.{op}.default", x(5, **_WIDE), note="rank1") for op in _PLAIN),
    *(accept(f"aten.{op}.default", x(), note="rank0") for op in _PLAIN),
    *(accept(f"aten.{op}.default", x(1, 2, 1, 3, 2, **_WIDE), note="rank5") for op in _PLAIN),
    accept("aten.elu.default", x(2, 3, **_WIDE), 0.5, note="alpha"),
    accept("aten.gelu.default", x(2, 3, **_WIDE), approximate="tanh", note="tanh"),
    accept("aten.hardtanh.default", x(2, 3), -0.5, 0.75, note="limits"),
    accept("aten.hardtanh.default", x(2, 3, **_WIDE), 0.0, 6.0, note="relu6"),
    accept("aten.leaky_relu.default", x(2, 3), 0.3, note="slope"),
    accept("aten.softplus.default", x(2, 3, low=-30.0, high=30.0), 2.0, 10.0, note="beta"),
    accept("aten.softplus.default", x(2, 3, **_WIDE), 0.5, 1.0, note="threshold"),
    accept("aten.prelu.default", x(2, 3, 4, 4), w(3), note="channels"),
    accept("aten.prelu.default", x(2, 3, 4), w(1), note="shared-rank3"),
    accept("aten.prelu.default", x(2, 3), w(1), note="shared-rank2"),
    accept("aten.prelu.default", x(3), w(1), note="shared-rank1"),
    accept("aten.glu.default", x(2, 6)),
    accept("aten.glu.default", x(4, 3), 0, note="first"),
    accept("aten.prelu.default", x(2, 3, 4, 4), w(1), note="shared"),
    *(accept(op, x(2, 3, 4), -1, note="last") for op in _SOFTMAX),
    *(accept(op, x(2, 3, 4), 1, torch.float32, note="dtype") for op in _SOFTMAX),
    *(accept(op, x(2, 3, 4), 0, False, note="first") for op in _CORE_SOFTMAX),
    *(accept(op, x(4), -1, False, note="rank1") for op in _CORE_SOFTMAX),
    *(accept(op, x(1, 2, 2, 3, 2), -2, False, note="rank5") for op in _CORE_SOFTMAX),
    accept("aten._log_softmax.default", _FAR, -1, False, note="far"),
    accept("aten.elu.default", x(2, 3, **_WIDE), 0.5, 1.5, note="scale"),
    accept("aten.elu.default", x(2, 3, **_WIDE), 0.5, 1, 2.0, note="input_scale"),
    *(
        accept("aten.prelu.default", x(2, 3, *rest), w(3), note=f"channels-rank{2 + len(rest)}")
        for rest in ((), (4,), (2, 2, 2))
    ),
    *(accept(f"aten.{op}.default", i(2, 3), note="int64") for op in ("sigmoid", "tanh")),
)

REJECTED = (
    reject(
        ReasonCode.ARGUMENT,
        "'weight' is computed, Core ML takes a constant",
        "aten.prelu.default",
        x(2, 3, 4, 4),
        x(3),
        note="computed",
    ),
    *(
        reject(ReasonCode.DTYPE, "the result is float64", op, x(2, 3), -1, torch.float64)
        for op in _SOFTMAX
    ),
    reject(
        ReasonCode.DTYPE,
        "argument 'self' is float64, Core ML takes bool, float32, int32, int64 here",
        "aten.sigmoid.default",
        x(2, 3, dtype=torch.float64),
        note="float64",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "beta or threshold below zero",
        "aten.softplus.default",
        x(2, 3),
        -1.0,
        note="below-zero",
    ),
    reject(
        ReasonCode.RANK,
        "'self' has rank 6, Core ML takes at most 5",
        "aten.prelu.default",
        x(1, 1, 2, 1, 1, 2),
        w(1),
        note="rank6",
    ),
    reject(
        ReasonCode.SHAPE,
        "'self' is empty: (2, 0)",
        "aten.sigmoid.default",
        x(2, 0),
        note="empty",
    ),
)
