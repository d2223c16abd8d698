"""Activations.

Source: coremltools' MIL op reference, ``activation``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel, register_expressions

_GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "EXACT": F.gelu,
    "TANH_APPROXIMATION": lambda x: F.gelu(x, approximate="tanh"),
    "SIGMOID_APPROXIMATION": lambda x: x * torch.sigmoid(1.702 * x),
}


_ALPHA = {"alpha": float}
_ALPHA_BETA = {"alpha": float, "beta": float}

register_expressions(
    {
        "softsign": ({}, lambda x: x / (1 + x.abs())),
        "elu": (_ALPHA, lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x))),
        "leaky_relu": (_ALPHA, lambda x, alpha: _leaky_relu(x, alpha)),
        "clamped_relu": (
            _ALPHA_BETA,
            lambda x, alpha, beta: torch.clamp(_leaky_relu(x, alpha), max=beta),
        ),
        "linear_activation": (_ALPHA_BETA, lambda x, alpha, beta: alpha * x + beta),
        "scaled_tanh": (_ALPHA_BETA, lambda x, alpha, beta: alpha * torch.tanh(beta * x)),
        "sigmoid_hard": (_ALPHA_BETA, lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1)),
        # A factor per channel: [C], for [N, C, *spatial].
        "prelu": (
            {"alpha": Tensor},
            lambda x, alpha: torch.where(x > 0, x, _per_channel(alpha, x) * x),
        ),
        "softplus_parametric": (
            {"alpha": Tensor, "beta": Tensor},
            lambda x, alpha, beta: _per_channel(alpha, x) * F.softplus(_per_channel(beta, x) * x),
        ),
    },
    widen=True,
)
# torch computes these in fp32 and rounds once, also for fp16 tensors.
register_expressions(
    {
        "relu": ({}, lambda x: torch.relu(x)),
        "relu6": ({}, lambda x: F.relu6(x)),
        "sigmoid": ({}, lambda x: torch.sigmoid(x)),
        "silu": ({}, lambda x: F.silu(x)),
        "softplus": ({}, lambda x: F.softplus(x)),
        "thresholded_relu": (
            _ALPHA,
            lambda x, alpha: torch.where(x < alpha, torch.zeros_like(x), x),
        ),
        "softmax": ({"axis": int}, lambda x, axis=-1: torch.softmax(x, dim=axis)),
    }
)


def _leaky_relu(x: Tensor, slope: float) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@kernel("gelu", widen=True)
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """GELU, ``x * 0.5 * (1 + erf(x / sqrt(2)))``, exact or by its tanh or sigmoid approximation."""
    if mode not in _GELU:
        raise ValueError(f"gelu mode is {mode!r}, not one of {', '.join(_GELU)}")
    return _GELU[mode](x)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (x.dim() - 2))
