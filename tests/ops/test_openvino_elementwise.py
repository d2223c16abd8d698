"""Elementwise ops, activations and reductions on OpenVINO, against coremltools and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import assert_close, run
from support.mil import mb

from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.mil.opset import Opset

_RNG = np.random.default_rng(0)
_REAL = _RNG.standard_normal((2, 3, 4)).astype(np.float32) * 2
_UNIT = _RNG.uniform(-0.95, 0.95, (2, 3, 4)).astype(np.float32)
_POSITIVE = _RNG.uniform(0.1, 4, (2, 3, 4)).astype(np.float32)
_INTS = _RNG.integers(-9, 10, (2, 3, 4)).astype(np.int32)
_HALVES = np.array([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49]], dtype=np.float32)

_UNARY = {
    "abs": _REAL,
    "acos": _UNIT,
    "asin": _UNIT,
    "atan": _REAL,
    "atanh": _UNIT,
    "ceil": _REAL,
    "cos": _REAL,
    "cosh": _REAL,
    "erf": _REAL,
    "exp": _REAL,
    "exp2": _REAL,
    "floor": _REAL,
    "inverse": _POSITIVE,
    "log": _POSITIVE,
    "relu": _REAL,
    "relu6": _REAL * 4,
    "round": _HALVES,
    "rsqrt": _POSITIVE,
    "sigmoid": _REAL,
    "sign": np.array([-2.0, 0.0, 3.0], dtype=np.float32),
    "sin": _REAL,
    "sinh": _REAL,
    "softplus": _REAL * 20,
    "softsign": _REAL,
    "sqrt": _POSITIVE,
    "square": _REAL,
    "tan": _UNIT,
    "tanh": _REAL,
}


@pytest.mark.parametrize("op_type", _UNARY)
def test_unary(op_type):
    def function(x):
        return getattr(mb, op_type)(x=x)

    inputs = {"x": _UNARY[op_type]}
    (expected,) = mil.infer(function, inputs)
    (actual,) = run(OPENVINO, function, inputs)
    assert_close(actual, expected)


@pytest.mark.parametrize("op_type", ["sign", "square", "abs"])
def test_unary_of_integers(op_type):
    def function(x):
        return getattr(mb, op_type)(x=x)

    (expected,) = mil.infer(function, {"x": _INTS})
    (actual,) = run(OPENVINO, function, {"x": _INTS})
    assert actual.dtype == np.int32
    assert_close(actual, expected, "int32")


@pytest.mark.parametrize("epsilon", [1e-4, 0.5])
@pytest.mark.parametrize("op_type", ["inverse", "log", "rsqrt"])
def test_epsilon(op_type, epsilon):
    def function(x):
        return getattr(mb, op_type)(x=x, epsilon=np.float32(epsilon))

    (expected,) = mil.infer(function, {"x": _POSITIVE})
    (actual,) = run(OPENVINO, function, {"x": _POSITIVE})
    assert_close(actual, expected)


_BINARY = [
    "add",
    "equal",
    "floor_div",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "not_equal",
    "sub",
]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("op_type", _BINARY)
def test_binary(op_type, dtype):
    def function(x, y):
        return getattr(mb, op_type)(x=x, y=y)

    # Every sign of either operand, exact multiples among them, and broadcasting on both sides.
    inputs = {
        "x": np.arange(-8, 8).reshape(16, 1).astype(dtype),
        "y": np.array([-5, -3, -2, -1, 1, 2, 3, 7]).astype(dtype),
    }
    (expected,) = mil.infer(function, inputs)
    (actual,) = run(OPENVINO, function, inputs)
    assert_close(actual, expected, "int32" if dtype is np.int32 else "fp32")


def test_pow():
    inputs = {"x": _POSITIVE, "y": _REAL}
    (actual,) = run(OPENVINO, lambda x, y: mb.pow(x=x, y=y), inputs)
    assert_close(actual, _POSITIVE**_REAL)


def test_real_div():
    inputs = {"x": _REAL, "y": _POSITIVE}
    (actual,) = run(OPENVINO, lambda x, y: mb.real_div(x=x, y=y), inputs)
    assert_close(actual, _REAL / _POSITIVE)


@pytest.mark.parametrize("op_type", ["logical_and", "logical_or", "logical_xor"])
def test_logical(op_type):
    def function(x, y):
        return getattr(mb, op_type)(x=x, y=y)

    inputs = {"x": np.array([0, 0, 1, 1], bool), "y": np.array([0, 1, 0, 1], bool)}
    (expected,) = mil.infer(function, inputs)
    (actual,) = run(OPENVINO, function, inputs)
    assert_close(actual, expected, "bool")


def test_logical_not():
    x = np.array([True, False])
    (actual,) = run(OPENVINO, lambda x: mb.logical_not(x=x), {"x": x})
    assert_close(actual, ~x, "bool")


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (np.array([-1.7, -0.2, 0.0, 0.9, 2.6], np.float32), "int32", [-1, 0, 0, 0, 2]),
        (np.array([-1.7, -0.2, 0.0, 0.9, 2.6], np.float32), "bool", [1, 1, 0, 1, 1]),
        (np.array([-3, 0, 5], np.int32), "fp32", [-3.0, 0.0, 5.0]),
        (np.array([-3, 0, 5], np.int32), "bool", [1, 0, 1]),
        (np.array([1.5, 100.9], np.float32), "int8", [1, 100]),
        (np.array([1.5, 200.9], np.float32), "uint8", [1, 200]),
        (np.array([1.5, 40000.0], np.float32), "uint16", [1, 40000]),
        (np.array([True, False]), "fp32", [1.0, 0.0]),
    ],
)
def test_cast(x, dtype, expected):
    (actual,) = run(OPENVINO, lambda x: mb.cast(x=x, dtype=dtype), {"x": x})
    assert_close(actual, np.array(expected))


def test_cast_to_fp16_does_not_round():
    x = np.array([1 + 2**-13], np.float32)
    (actual,) = run(
        OPENVINO, lambda x: mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32"), {"x": x}
    )
    assert actual == x


@pytest.mark.parametrize(
    "build",
    [
        lambda x: mb.clip(x=x, alpha=np.float32(-1), beta=np.float32(1.5)),
        lambda x: mb.threshold(x=x, alpha=np.float32(0.3)),
        lambda x: mb.elu(x=x, alpha=np.float32(0.7)),
        lambda x: mb.leaky_relu(x=x, alpha=np.float32(0.2)),
        lambda x: mb.linear_activation(x=x, alpha=np.float32(2), beta=np.float32(-3)),
        lambda x: mb.scaled_tanh(x=x, alpha=np.float32(2), beta=np.float32(0.5)),
        lambda x: mb.sigmoid_hard(x=x, alpha=np.float32(0.2), beta=np.float32(0.5)),
        lambda x: mb.thresholded_relu(x=x, alpha=np.float32(0.5)),
        lambda x: mb.softmax(x=x, axis=1),
        lambda x: mb.softmax(x=x),
        lambda x: mb.prelu(x=x, alpha=np.array([0.1, 0.1, 0.1], np.float32)),
        lambda x: mb.softplus_parametric(
            x=x,
            alpha=np.array([0.5, 1, 2], np.float32),
            beta=np.array([2, 1, 0.5], np.float32),
        ),
        lambda x: mb.gelu(x=x, mode="EXACT"),
        lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
        lambda x: mb.gelu(x=x, mode="SIGMOID_APPROXIMATION"),
    ],
)
def test_parametric(build):
    # coremltools computes these in place or on copies of its input: one array each.
    (expected,) = mil.infer(build, {"x": _REAL.copy()})
    (actual,) = run(OPENVINO, build, {"x": _REAL})
    assert_close(actual, expected)


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 2), (-2, 1)])
def test_clamped_relu(alpha, beta):
    (actual,) = run(
        OPENVINO,
        lambda x: mb.clamped_relu(x=x, alpha=np.float32(alpha), beta=np.float32(beta)),
        {"x": _REAL},
    )
    # coremltools' value inference bounds the two halves apart; this is the formula it documents.
    assert_close(actual, np.minimum(beta, np.where(_REAL >= 0, _REAL, alpha * _REAL)))


def test_silu():
    (actual,) = run(OPENVINO, lambda x: mb.silu(x=x), {"x": _REAL})
    assert_close(actual, torch.nn.functional.silu(torch.from_numpy(_REAL)).numpy())


def test_prelu_per_channel():
    x = _RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
    alpha = np.array([0.1, 0.5, -1], np.float32)
    (actual,) = run(OPENVINO, lambda x: mb.prelu(x=x, alpha=alpha), {"x": x})
    expected = torch.nn.functional.prelu(torch.from_numpy(x), torch.from_numpy(alpha))
    assert_close(actual, expected.numpy())


def test_select():
    condition = _INTS > 0
    inputs = {"cond": condition, "a": _REAL, "b": _POSITIVE}
    (actual,) = run(OPENVINO, lambda cond, a, b: mb.select(cond=cond, a=a, b=b), inputs)
    assert_close(actual, np.where(condition, _REAL, _POSITIVE))


_REDUCTIONS = [
    "reduce_l1_norm",
    "reduce_l2_norm",
    "reduce_log_sum",
    "reduce_log_sum_exp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reduce_sum_square",
]


@pytest.mark.parametrize(("axes", "keep_dims"), [([1], False), ([-1, 0], True), (None, False)])
@pytest.mark.parametrize("op_type", _REDUCTIONS)
def test_reduction(op_type, axes, keep_dims):
    keywords = {} if axes is None else {"axes": axes}

    def function(x):
        return getattr(mb, op_type)(x=x, keep_dims=keep_dims, **keywords)

    (expected,) = mil.infer(function, {"x": _POSITIVE})
    (actual,) = run(OPENVINO, function, {"x": _POSITIVE})
    assert_close(actual, expected)


@pytest.mark.parametrize("op_type", ["reduce_max", "reduce_min", "reduce_sum", "reduce_mean"])
def test_reduction_of_integers(op_type):
    def function(x):
        return getattr(mb, op_type)(x=x, axes=[1])

    (expected,) = mil.infer(function, {"x": _INTS})
    (actual,) = run(OPENVINO, function, {"x": _INTS})
    assert_close(actual, expected, "int32")


@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS17])
@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("op_type", ["reduce_argmax", "reduce_argmin"])
def test_argument_of_extremum(op_type, keep_dims, opset):
    def function(x):
        return getattr(mb, op_type)(x=x, axis=1, keep_dims=keep_dims)

    (expected,) = mil.infer(function, {"x": _REAL}, opset)
    (actual,) = run(OPENVINO, function, {"x": _REAL}, opset)
    assert_close(actual, expected, "int32")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_cumsum(exclusive, reverse):
    (actual,) = run(
        OPENVINO,
        lambda x: mb.cumsum(x=x, axis=-1, exclusive=exclusive, reverse=reverse),
        {"x": _REAL},
    )
    data = np.flip(_REAL, -1) if reverse else _REAL
    expected = np.cumsum(data, -1) - (data if exclusive else 0)
    assert_close(actual, np.flip(expected, -1) if reverse else expected)
