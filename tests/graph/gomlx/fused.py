"""Cases of layers that are one operation: softmax, normalization, dense, attention, quantized."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from graph.gomlx.activations import ACTIVATIONS, POINTS
from graph.gomlx.case import Case, called, case, counted, f32, flags

_CLOSE = (1e-6, 0.0)


def _total(b: Any, x: Any) -> Any:
    return b.reduce_sum(b.softmax(x, -1), (-1,))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(float(number)) for number in x.ravel()]).reshape(x.shape)


def _normalized(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    variance = x.var(-1, keepdims=True)
    return ((x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5)).astype(np.float32)


_GELU_POINTS = f32([-2, -1, -0.5, 0, 0.5, 1, 2])
_CUBIC = np.sqrt(2 / np.pi) * (_GELU_POINTS + 0.044715 * _GELU_POINTS**3)
_EIGHT = counted(np.float32, 2, 4, first=1)
_THREE = f32([1, 2, 3])

_NORMALIZED = [
    case(
        "FusedOps/FusedSoftmax/1D",
        called("softmax", 0),
        [f32([1, 2, 3, 4])],
        f32([0.0320586, 0.0871443, 0.2368828, 0.6439143]),
        tolerance=_CLOSE,
    ),
    case(
        "FusedOps/FusedSoftmax/2D",
        _total,
        [counted(np.float32, 2, 3, first=1)],
        f32([1, 1]),
        tolerance=_CLOSE,
    ),
    case(
        "FusedOps/FusedSoftmax/NegativeAxis",
        lambda b, x: b.subtract(b.softmax(x, -2), b.softmax(x, 0)),
        [counted(np.float32, 2, 3, first=1)],
        np.zeros((2, 3), np.float32),
        about="which counts from the end",
    ),
    case(
        "FusedOps/FusedSoftmax/Stability",
        _total,
        [f32([1000, 1001, 1002])],
        f32(1),
        tolerance=_CLOSE,
    ),
    case(
        "FusedOps/FusedGelu",
        "gelu",
        [_GELU_POINTS],
        f32([-0.04550028, -0.15865526, -0.15426877, 0, 0.34573123, 0.84134474, 1.9544997]),
        tolerance=_CLOSE,
    ),
    case(
        "FusedOps/FusedGelu/Approximate",
        called("gelu", "tanh"),
        [_GELU_POINTS],
        (0.5 * _GELU_POINTS * (1 + np.tanh(_CUBIC))).astype(np.float32),
        tolerance=_CLOSE,
    ),
    case(
        "FusedOps/FusedLayerNorm/Simple", called("layer_norm", (1,)), [_EIGHT], _normalized(_EIGHT)
    ),
    case(
        "FusedOps/FusedLayerNorm/WithGammaBeta",
        lambda b, x, scale, offset: b.layer_norm(x, (0,), scale, offset),
        [_THREE, f32([2, 2, 2]), f32([1, 1, 1])],
        2 * _normalized(_THREE) + 1,
    ),
]


def _dense(b: Any, x: Any, weight: Any, bias: Any = None, **keywords: Any) -> Any:
    """Return a dense layer of a weight as GoMLX has it: a row for each input."""
    return b.dense(x, b.transpose(weight, (1, 0)), bias, **keywords)


_X = counted(np.float32, 2, 3, first=1)
_WEIGHT = f32([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]])
_RISING = counted(np.float32, 3, 2, first=1)
_BIAS = f32([10, 20])

_DENSE = [
    case(
        "FusedOps/FusedDense/None",
        _dense,
        [_X, _WEIGHT, f32([10, 20, 30, 40])],
        f32([[11, 22, 33, 46], [14, 25, 36, 55]]),
    ),
    case(
        "FusedOps/FusedDense/Relu",
        lambda b, x, weight, bias: _dense(b, x, weight, bias, activation="relu"),
        [f32([[1, -1]]), f32([[1, 1], [0, -1]]), f32([-1, -1])],
        f32([[0, 1]]),
    ),
    case("DenseLayouts/InputOutputs", _dense, [_X, _RISING, _BIAS], f32([[32, 48], [59, 84]])),
    case(
        "DenseLayouts/OutputsInput",
        "dense",
        [_X, _RISING.T, _BIAS],
        f32([[32, 48], [59, 84]]),
    ),
    case("DenseLayouts/NoBias", _dense, [_X, _RISING], f32([[22, 28], [49, 64]])),
]


def _activated(test: str) -> Case:
    """Return an activation of a dense layer that changes nothing."""
    function, wanted, absolute = ACTIVATIONS[test]
    count = len(POINTS)
    return case(
        f"DenseActivations/{test}",
        lambda b, x, weight, bias: function(b, _dense(b, x, weight, bias)),
        [f32([POINTS]), np.eye(count, dtype=np.float32), np.zeros(count, np.float32)],
        f32([wanted]),
        tolerance=(max(absolute, 1e-6), 0.0),
    )


_FUNCTIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "gelu": lambda x: x / 2 * (1 + _erf(x / np.sqrt(2))),
}


def _typed(dtype: str, test: str, x: Any, weight: Any, bias: Any, about: str = "") -> list[Case]:
    """Return a dense layer of an element type with each activation that it can have."""
    sums = np.array(x, np.float64) @ np.array(weight, np.float64) + np.array(bias, np.float64)

    def made(activation: str | None) -> Any:
        return lambda b, *values: _dense(b, *values, activation=activation)

    return [
        case(
            f"{test}/{activation}",
            made(activation),
            [np.array(array, dtype) for array in (x, weight, bias)],
            function(sums).astype(dtype),
            about=about,
        )
        for activation, function in _FUNCTIONS.items()
    ]


_HALVES = ([[1, -2]], [[2, 1], [-1, 2]], [-2, 1])


def _attended(
    test: str, shape: tuple[int, ...], width: int, about: str = "", dtype: str = "float32"
) -> Case:
    """Return a causal attention of two equal keys: the second query takes the mean of values.

    Axes are batch, heads, positions and features, or positions before heads.
    """
    heads_first = shape[2] == 2

    def build(b: Any, *values: Any) -> Any:
        if heads_first:
            return b.scaled_dot_product_attention(*values, scale=1.0, is_causal=True)
        turned = (b.transpose(value, (0, 2, 1, 3)) for value in values)
        result = b.scaled_dot_product_attention(*turned, scale=1.0, is_causal=True)
        return b.transpose(result, (0, 2, 1, 3))

    def wide(first: float, second: float) -> np.ndarray:
        return np.repeat([first, second], width).reshape(*shape, width).astype(dtype)

    return case(
        f"FusedOps/FusedScaledDotProductAttention/{test}",
        build,
        [wide(1, 1), wide(1, 1), wide(10, 20)],
        wide(10, 15),
        about=about,
        tolerance=_CLOSE if dtype == "float32" else None,
    )


def _projected(b: Any, x: Any, weight: Any, *biases: Any) -> Any:
    return b.qkv_projection(x, b.transpose(weight, (1, 0)), b.concatenate(biases, 0), 2, 1)


_ATTENTION = [
    _attended("BHSD_Causal", (1, 1, 2), 1),
    _attended("BHSD_Causal_BF16", (1, 1, 2), 8, "with float16", "float16"),
    _attended("BSHD_Causal", (1, 2, 1), 1),
    _attended("BSHD_Causal_BF16", (1, 2, 1), 8, "with float16", "float16"),
    case(
        "FusedOps/FusedScaledDotProductAttention/WithBooleanMask",
        called("scaled_dot_product_attention", scale=1.0),
        [f32([[[[1]]]]), f32([[[[1], [1]]]]), f32([[[[10], [20]]]]), flags([[True, False]])],
        f32([[[[10]]]]),
        tolerance=_CLOSE,
    ),
    _attended("QuantizedMatmuls", (1, 1, 2), 1, "whose products are not quantized"),
    case(
        "FusedOps/FusedAttentionQKVProjection",
        _projected,
        [f32([[1, 2, 3]]), _WEIGHT, f32([10, 20]), f32([100]), f32([1000])],
        f32([[11, 22]]),
        f32([[103]]),
        f32([[1006]]),
    ),
]


def _quantized(weight: Any, scales: Any, **keywords: Any) -> Any:
    """Return a quantized dense layer of a weight with a row for each input, as GoMLX has it."""
    rows = np.array(weight, np.int8).T

    def build(b: Any, x: Any, bias: Any = None) -> Any:
        return b.quantized_dense(x, rows, f32(scales), bias=bias, **keywords)

    return build


# NF4: the 16 numbers that the indices stand for.
_NF4 = f32(
    [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.09105004,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ]
)


def _of_indices(b: Any, x: Any) -> Any:
    indices = b.constant(np.array([[15, 0], [7, 15]], np.uint8))
    return _dense(b, x, b.take(b.constant(_NF4), indices, 0))


_UNIT = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
_CYCLE = [[-1, 1, 0], [0, -1, 1], [1, 0, -1], [0, 0, 0]]
_FOURS = counted(np.float32, 2, 4, first=1)
_QUANTIZED = [
    case(
        "QuantizedDense_Int8/with_bias",
        _quantized(_UNIT, [1, 1, 1]),
        [_FOURS, f32([10, 20, 30])],
        f32([[15, 26, 37], [23, 34, 45]]),
    ),
    case(
        "QuantizedDense_Int8/no_bias",
        _quantized(_UNIT, np.ones((3, 4))),
        [_FOURS],
        f32([[5, 6, 7], [13, 14, 15]]),
        about="scales of blocks",
    ),
    case(
        "QuantizedDense_Int8/relu",
        _quantized(_CYCLE, [1, 1, 1], activation="relu"),
        [_FOURS[:1]],
        f32([[2, 0, 0]]),
    ),
    case(
        "QuantizedDense_Int4",
        _quantized([[1, -2], [0, 2]], [0.5, 0.5], bits=4),
        [f32([[2, 3]])],
        f32([[1, 1]]),
    ),
    case(
        "FusedQuantizedDense",
        _quantized([[10, 20], [30, 40]], [0.1], zero_points=np.zeros(1)),
        [f32([[1, 2]])],
        f32([[7, 10]]),
    ),
    case(
        "QuantizedDense_NF4",
        _of_indices,
        [f32([[1, 1]])],
        f32([[1, 0]]),
        about="as a table of numbers",
    ),
]

CASES = [
    *_NORMALIZED,
    *_DENSE,
    *map(_activated, ACTIVATIONS),
    *_typed(
        "float64",
        "DenseFloat64",
        [[0, -1, 2, -3, 4]],
        np.eye(5),
        np.zeros(5),
    ),
    *_typed("float16", "DenseBFloat16", *_HALVES, about="with float16"),
    *_typed("float16", "DenseFloat16", *_HALVES),
    *_ATTENTION,
    *_QUANTIZED,
]
