"""Normalization.

Source: coremltools' MIL op reference, ``normalization``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel


@kernel("batch_norm", widen=True)
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, per channel of [N, C, *spatial]."""
    return F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)


@kernel("instance_norm", widen=True)
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Normalization of ``x`` [N, C, *spatial] over the spatial axes, scaled per channel."""
    return _normalize(x, range(2, x.dim()), (1,), gamma, beta, epsilon)


@kernel("layer_norm", widen=True)
def layer_norm(
    x: Tensor,
    axes: Ints | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Normalization of ``x`` over ``axes``, along which ``gamma`` and ``beta`` scale and shift."""
    over = sorted(range(x.dim()) if axes is None else (axis % x.dim() for axis in axes))
    return _normalize(x, over, over, gamma, beta, epsilon)


@kernel("l2_norm", widen=True)
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x ** 2) + epsilon)``, the sum over the last three axes."""
    squares = torch.sum(x * x, dim=(-3, -2, -1), keepdim=True)
    return x / torch.sqrt(squares + epsilon)


@kernel("local_response_norm", widen=True)
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """``x / (k + alpha / size * sum(x**2)) ** beta``, summed over the ``size`` nearest channels."""
    return F.local_response_norm(x, size, alpha, beta, k)


def _normalize(
    x: Tensor,
    axes: Sequence[int],
    scaled_axes: Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Normalize over ``axes``; ``gamma`` and ``beta`` scale and shift along ``scaled_axes``."""
    variance, mean = torch.var_mean(x, dim=list(axes), correction=0, keepdim=True)
    result = (x - mean) * torch.rsqrt(variance + epsilon)
    affine_shape = [size if axis in scaled_axes else 1 for axis, size in enumerate(x.shape)]
    if gamma is not None:
        result = result * gamma.reshape(affine_shape)
    return result if beta is None else result + beta.reshape(affine_shape)
