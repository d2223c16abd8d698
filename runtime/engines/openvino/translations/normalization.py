"""Normalizations."""

from __future__ import annotations

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    dims,
    ints,
    normalize_axis,
    per_channel,
    rank,
    reshape,
    scalar,
    shape_of,
    static_dims,
    with_equal_sizes,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Ints, Result, Tensor


@translation("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Result:
    """``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, per channel of [N, C, *spatial]."""
    channels = static_dims(mean, (0,))
    if gamma is None:
        gamma = ops.constant(np.ones(channels, dtype=np.float32))
    if beta is None:
        beta = ops.constant(np.zeros(channels, dtype=np.float32))
    x, mean = _with_equal_shape(x, [1], mean)
    return ops.batch_norm_inference(x, gamma, beta, mean, variance, epsilon)


@translation("instance_norm")
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Result:
    """Normalization of ``x`` [N, C, *spatial] over the spatial axes, scaled per channel."""
    axes = rank(x)
    if gamma is not None:
        x, gamma = _with_equal_shape(x, [1], gamma)
    if beta is not None:
        x, beta = _with_equal_shape(x, [1], beta)
    result = ops.mvn(x, ints(list(range(2, axes))), True, epsilon, "inside_sqrt")
    if gamma is not None:
        result = ops.multiply(result, per_channel(gamma, axes))
    return result if beta is None else ops.add(result, per_channel(beta, axes))


@translation("layer_norm")
def layer_norm(
    x: Tensor,
    axes: Ints | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Result:
    """Normalization of ``x`` over ``axes``, along which ``gamma`` and ``beta`` scale and shift."""
    total = rank(x)
    over = sorted(normalize_axis(axis, total) for axis in (axes or range(total)))
    if gamma is not None:
        x, gamma = _with_equal_shape(x, over, gamma)
    if beta is not None:
        x, beta = _with_equal_shape(x, over, beta)
    result = ops.mvn(x, ints(over), True, epsilon, "inside_sqrt")
    if gamma is not None:
        result = ops.multiply(result, _broadcast_along(gamma, over, total))
    return result if beta is None else ops.add(result, _broadcast_along(beta, over, total))


def _with_equal_shape(x: Tensor, axes: list[int], parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return both values; computing them fails if ``x`` along ``axes`` has a different shape.

    Without this check, OpenVINO would broadcast a size of 1.
    """
    for dimension, axis in enumerate(axes):
        x, parameter = with_equal_sizes(x, axis, parameter, dimension)
    return x, parameter


def _broadcast_along(value: Tensor, axes: list[int], total: int) -> Result:
    """Return ``value`` reshaped to rank ``total``, with its dimensions at ``axes``."""
    sizes = dict(zip(axes, dims(value), strict=True))
    if axes == list(range(total - len(axes), total)):
        return value
    return reshape(value, [sizes.get(axis) or 1 for axis in range(total)])


@translation("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Result:
    """``x / sqrt(sum(x ** 2) + epsilon)``, the sum over the last three axes."""
    total = ops.reduce_sum(ops.multiply(x, x), ints((-3, -2, -1)), True)
    return ops.divide(x, ops.sqrt(ops.add(total, scalar(epsilon, x))))


@translation("local_response_norm")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Result:
    """``x / (k + alpha / size * sum(x**2)) ** beta``, summed over the ``size`` nearest channels."""
    # OpenVINO's LRN is wrong unless k is 1, so the mean over channels is an average pooling.
    flat = ops.reshape(ops.multiply(x, x), ints((0, 0, -1)), special_zero=True)
    mean = ops.avg_pool(
        ops.unsqueeze(flat, ints(1)),  # [N, 1, C, positions]
        [1, 1],
        [size // 2, 0],
        [(size - 1) // 2, 0],
        [size, 1],
        exclude_pad=False,
    )
    mean = ops.reshape(mean, shape_of(x), special_zero=False)
    base = ops.add(ops.multiply(mean, scalar(alpha, x)), scalar(k, x))
    return ops.multiply(x, ops.power(base, scalar(-beta, x)))
