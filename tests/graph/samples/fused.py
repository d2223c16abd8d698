"""Samples of whole layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from graph.samples.sample import Sample
from support.graph_samples import by_jax

_FLOATS = ("float32", "float16", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_RANDOM = np.random.default_rng(0)
_EXTREMES = np.array(
    [[1000.0, 1000.5, 999], [-np.inf, 0, 1], [-np.inf, -np.inf, -np.inf], [np.nan, 0, 1]],
    np.float32,
)
_HALF = (2e-3, 4e-3)


def _numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return _RANDOM.standard_normal(shape).astype(dtype)


def _in_float64(function: Callable[..., Any], dtype: str, *arrays: np.ndarray) -> Any:
    return np.asarray(function(*(array.astype(np.float64) for array in arrays))).astype(dtype)


def _softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _calling(operation: str, *arguments: Any) -> Callable[..., Any]:
    return lambda b, x: getattr(b, operation)(x, *arguments)


def _activated(activation: str) -> Callable[..., Any]:
    return lambda b, x: b.dense(x, b.constant(_WEIGHT), None, activation)


def _each(operation: str, function: Callable[..., Any], *shape: int) -> list[Sample]:
    """One sample per element type of an operation of one operand."""
    return [
        Sample(
            operation,
            "each",
            _calling(operation),
            (x,),
            _in_float64(function, dtype, x),
            _HALF if dtype == "float16" else None,
        )
        for dtype in _FLOATS
        for x in (_numbers(*shape, dtype=dtype),)
    ]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2


_GELU_OF_JAX = functools.partial(jax.nn.gelu, approximate=False)


def _normalized(x: np.ndarray, axes: Any = -1, epsilon: float = 1e-5) -> np.ndarray:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon)


def _by_mean_square(x: np.ndarray, axes: Any = -1, epsilon: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon)


_SIX = (1, 2, 1, 2, 2, 3)
_X, _SCALE, _OFFSET = _numbers(2, 3, 4), _numbers(4), _numbers(4)
_CORNER_SCALE = _numbers(2, 4)
_POINTS = np.array([-np.inf, np.inf, -0.0, 0, 1e30, -1e30, 1, -1, 3, -3], np.float32)

_ACTIVATIONS = [
    *_each("softmax", _softmax, 3, 4),
    *_each("log_softmax", lambda x: np.log(_softmax(x)), 3, 4),
    *_each("gelu", _gelu, 3, 4),
    *_each("relu", lambda x: np.maximum(x, 0), 3, 4),
    *_each("silu", lambda x: x * _sigmoid(x), 3, 4),
    *(
        Sample(
            operation,
            f"axis {axis}, extremes",
            _calling(operation, axis),
            (_EXTREMES,),
            by_jax(getattr(jax.nn, operation), _EXTREMES, axis=axis),
        )
        for operation in ("softmax", "log_softmax")
        for axis in (0, 1)
    ),
    *(
        Sample(
            operation,
            "more dimensions than Core ML has",
            _calling(operation, 3),
            (x,),
            by_jax(getattr(jax.nn, operation), x, axis=3),
        )
        for operation in ("softmax", "log_softmax")
        for x in (_numbers(*_SIX),)
    ),
    *(
        Sample(
            operation,
            "extremes",
            _calling(operation),
            (points,),
            by_jax(function, points),
        )
        # The exact gelu of infinity is NaN where torch and OpenVINO have AVX-512.
        for operation, function, points in (
            ("gelu", _GELU_OF_JAX, _POINTS[2:]),
            ("relu", jax.nn.relu, _POINTS),
            ("silu", jax.nn.silu, _POINTS),
        )
    ),
    Sample(
        "gelu",
        "by tanh",
        lambda b, x: b.gelu(x, "tanh"),
        (_POINTS,),
        by_jax(jax.nn.gelu, _POINTS, approximate=True),
    ),
    *(
        Sample(operation, "rank 0", _calling(operation), (x,), by_jax(function, x))
        for operation, function in (
            ("gelu", _GELU_OF_JAX),
            ("relu", jax.nn.relu),
            ("silu", jax.nn.silu),
        )
        for x in (np.array(1.5, np.float32),)
    ),
]

_NORMS = [
    *_each("layer_norm", _normalized, 2, 5),
    *_each("rms_norm", _by_mean_square, 2, 5),
    Sample(
        "layer_norm",
        "constant parameters",
        lambda b, x: b.layer_norm(x, -1, b.constant(_SCALE), b.constant(_OFFSET), 1e-3),
        (_X,),
        _normalized(_X, epsilon=1e-3) * _SCALE + _OFFSET,
    ),
    Sample(
        "layer_norm",
        "constant offset",
        lambda b, x: b.layer_norm(x, offset=b.constant(_OFFSET)),
        (_X,),
        _normalized(_X) + _OFFSET,
    ),
    Sample(
        "layer_norm",
        "computed parameters",
        lambda b, x, scale, offset: b.layer_norm(x, -1, scale, offset),
        (_X, _SCALE, _OFFSET),
        _normalized(_X) * _SCALE + _OFFSET,
    ),
    Sample(
        "layer_norm",
        "computed scale, constant offset, axes apart",
        lambda b, x, scale: b.layer_norm(x, (2, 0), scale, b.constant(_CORNER_SCALE)),
        (_X, _CORNER_SCALE),
        _normalized(_X, (0, 2)) * _CORNER_SCALE[:, None] + _CORNER_SCALE[:, None],
    ),
    Sample(
        "rms_norm",
        "scale of two axes, squares beyond float16",
        lambda b, x: b.rms_norm(x, (1, 2), b.constant(np.ones((3, 4), np.float16) * 2)),
        ((_X * 1000).astype(np.float16),),
        (2 * _by_mean_square(_X * 1000, (1, 2))).astype(np.float16),
        _HALF,
    ),
    Sample(
        "rms_norm",
        "scale",
        lambda b, x, scale: b.rms_norm(x, -1, scale),
        (_X, _SCALE),
        _by_mean_square(_X) * _SCALE,
    ),
]

_WEIGHT, _BIAS = _numbers(5, 4), _numbers(5)


def _dense(dtype: str, *shape: int) -> list[Sample]:
    x, weight, bias = (a.astype(dtype) for a in (_numbers(*shape, 4), _WEIGHT, _BIAS))
    tolerance = (2e-2, 1e-2) if dtype == "float16" else None
    wide = x.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)
    expected = wide.astype(dtype)
    parts = tuple(np.split(expected, [3, 4], axis=-1))
    samples = [
        Sample(
            "dense",
            f"constant weight, {shape}",
            lambda b, x: b.dense(x, b.constant(weight), b.constant(bias)),
            (x,),
            expected,
            tolerance,
        ),
        Sample(
            "dense",
            f"computed weight, {shape}",
            lambda b, x, w, o: b.dense(x, w, o, "relu"),
            (x, weight, bias),
            np.maximum(expected, 0),
            tolerance,
        ),
        Sample(
            "qkv_projection",
            f"constant weight, {shape}",
            lambda b, x: b.qkv_projection(x, b.constant(weight), b.constant(bias), 3, 1),
            (x,),
            parts,
            tolerance,
        ),
        Sample(
            "qkv_projection",
            f"computed weight, {shape}",
            lambda b, x, w, o: b.qkv_projection(x, w, o, 3, 1),
            (x, weight, bias),
            parts,
            tolerance,
        ),
    ]
    return samples if len(shape) < 5 else samples[:2]


_DENSE = [
    *(sample for dtype in _FLOATS for sample in _dense(dtype, 3)),
    *(
        sample
        for shape in ((), (2, 3), (1, 2, 3), (2, 1, 1, 2), (1, 2, 1, 1, 2))
        for sample in _dense("float32", *shape)
    ),
    *(
        Sample(
            "dense",
            activation,
            _activated(activation),
            (_X,),
            by_jax(function, _X @ _WEIGHT.T),
        )
        for activation, function in (
            ("gelu", _GELU_OF_JAX),
            ("gelu_tanh", jax.nn.gelu),
            ("silu", jax.nn.silu),
            ("tanh", jnp.tanh),
        )
    ),
]


def _attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> np.ndarray:
    q, k, v = (array.astype(np.float64) for array in (query, key, value))
    scores = q @ np.swapaxes(k, -1, -2) * (scale or 1 / np.sqrt(q.shape[-1]))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return (_softmax(scores) @ v).astype(query.dtype)


def _attend(case: str, *arrays: np.ndarray, **keywords: Any) -> Sample:
    return Sample(
        "scaled_dot_product_attention",
        case,
        lambda b, *values: b.scaled_dot_product_attention(*values, **keywords),
        arrays,
        _attention(*arrays, **keywords),
        _HALF if arrays[0].dtype == np.float16 else None,
    )


_QKV = _numbers(2, 3, 5, 4), _numbers(2, 3, 7, 4), _numbers(2, 3, 7, 6)
_FLAGS = np.eye(5, 7, dtype=bool) | (_RANDOM.random((5, 7)) < 0.6)

_ATTENTION = [
    *(_attend("plain", *(a.astype(dtype) for a in _QKV)) for dtype in _FLOATS),
    _attend("rank 2", *(a[0, 0] for a in _QKV)),
    _attend("scale", *_QKV, scale=0.3),
    _attend("causal", *_QKV, is_causal=True),
    _attend("flags", *_QKV, _FLAGS),
    _attend("flags, causal, rank 2", *(a[0, 0] for a in _QKV), _FLAGS, is_causal=True),
    _attend("added", *_QKV, _numbers(1, 3, 5, 7)),
    _attend("added to each column", *_QKV, _numbers(3, 5, 1)),
    _attend("flag", *_QKV, np.ones(1, bool)),
    _attend("added to each row, causal", *_QKV, _numbers(1, 7), is_causal=True),
]

_INT8 = _RANDOM.integers(-128, 128, (6, 4)).astype(np.int8)
_UINT8 = _RANDOM.integers(0, 256, (6, 4)).astype(np.uint8)
_INT4 = _RANDOM.integers(-8, 8, (6, 4)).astype(np.int8)
_SCALES = (_RANDOM.random(6) / 64).astype(np.float32)
_BLOCKS = (_RANDOM.random((6, 2)) / 8).astype(np.float32)
_ZEROS = _RANDOM.integers(0, 5, 6).astype(np.int8)


def _dequantized(weight: np.ndarray, scales: np.ndarray, zeros: Any = 0) -> np.ndarray:
    scales = scales.reshape(6, -1)
    shifted = weight.astype(np.float64) - np.asarray(zeros, np.float64).reshape(-1, 1)
    return (shifted * np.repeat(scales, 4 // scales.shape[1], axis=1)).astype(np.float32)


def _rows(weight: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return weight[np.clip(indices.astype(np.int64), 0, 5)]


_QUANTIZED = [
    *(
        Sample(
            "quantized_dense",
            "8 bits, zero points, bias",
            lambda b, x: b.quantized_dense(
                x, _INT8, _SCALES, _ZEROS, b.constant(np.ones(6, x.dtype.numpy), x.dtype)
            ),
            (x,),
            (x.astype(np.float64) @ _dequantized(_INT8, _SCALES, _ZEROS).T + 1).astype(dtype),
            (3e-2, 1e-2) if dtype == "float16" else None,
        )
        for dtype in _FLOATS
        for x in (_numbers(3, 4, dtype=dtype),)
    ),
    Sample(
        "quantized_dense",
        "4 bits, blocks, activation",
        lambda b, x: b.quantized_dense(x, _INT4, _BLOCKS, activation="relu", bits=4),
        (_X,),
        np.maximum(_X @ _dequantized(_INT4, _BLOCKS).T, 0),
    ),
    Sample(
        "quantized_dense",
        "unsigned constant, one scale",
        lambda b, x: b.quantized_dense(x, b.constant(_UINT8), 0.01, 128),
        (_X,),
        _X @ _dequantized(_UINT8, np.full(6, 0.01, np.float32), 128).T,
    ),
    *(
        Sample(
            "quantized_embedding",
            "indices out of range",
            lambda b, x: b.quantized_embedding(_INT8, _SCALES, x, _ZEROS),
            (x,),
            _rows(_dequantized(_INT8, _SCALES, _ZEROS), x),
        )
        for dtype in _INTEGERS
        for x in (np.array([[0, 5], [120, 3]]).astype(dtype),)
    ),
    Sample(
        "quantized_embedding",
        "4 bits, float16, rank 0",
        lambda b, x: b.quantized_embedding(_INT4, _BLOCKS, x, dtype="float16", bits=4),
        (np.array(-3, np.int32),),
        _dequantized(_INT4, _BLOCKS)[0].astype(np.float16),
    ),
    Sample(
        "quantized_embedding",
        "the largest index",
        lambda b, x: b.quantized_embedding(_INT8, _SCALES, x),
        (np.array([2**32 - 1], np.uint32),),
        _dequantized(_INT8, _SCALES)[5:],
    ),
    Sample(
        "quantized_embedding",
        "more dimensions than Core ML has",
        lambda b, x: b.quantized_embedding(_INT8, _SCALES, x),
        (np.array([1, 2]).reshape(1, 2, 1, 1, 1),),
        _dequantized(_INT8, _SCALES)[[1, 2]].reshape(1, 2, 1, 1, 1, 4),
    ),
]

SAMPLES = [*_ACTIVATIONS, *_NORMS, *_DENSE, *_ATTENTION, *_QUANTIZED]
