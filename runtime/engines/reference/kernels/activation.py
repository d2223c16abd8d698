"""Activations.

Source: coremltools' MIL op reference, ``activation``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel

_Unary = Callable[[Tensor], Tensor]

# torch computes these in fp32 and rounds once, also for fp16 tensors.
_PLAIN: dict[str, _Unary] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
}

_GELU: dict[str, _Unary] = {
    "EXACT": F.gelu,
    "TANH_APPROXIMATION": lambda x: F.gelu(x, approximate="tanh"),
    "SIGMOID_APPROXIMATION": lambda x: x * torch.sigmoid(1.702 * x),
}


def _plain(function: _Unary) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        return function(x)

    return run


for _name, _function in _PLAIN.items():
    kernel(_name)(_plain(_function))


@kernel("softsign", widen=True)
def softsign(x: Tensor) -> Tensor:
    """``x / (1 + |x|)``."""
    return x / (1 + x.abs())


@kernel("gelu", widen=True)
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """GELU, ``x * 0.5 * (1 + erf(x / sqrt(2)))``, exact or by its tanh or sigmoid approximation."""
    if mode not in _GELU:
        raise ValueError(f"gelu mode is {mode!r}, not one of {', '.join(_GELU)}")
    return _GELU[mode](x)


@kernel("elu", widen=True)
def elu(x: Tensor, alpha: float) -> Tensor:
    """``x`` where positive, else ``alpha * (e**x - 1)``."""
    return torch.where(x > 0, x, alpha * torch.expm1(x))


@kernel("leaky_relu", widen=True)
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    """``x`` where not negative, else ``alpha * x``."""
    return torch.where(x < 0, alpha * x, x)


@kernel("thresholded_relu")
def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    """``x`` where at least ``alpha``, else 0."""
    return torch.where(x < alpha, torch.zeros_like(x), x)


@kernel("clamped_relu", widen=True)
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Leaky ReLU of slope ``alpha``, bounded above by ``beta``."""
    return torch.clamp(torch.where(x < 0, alpha * x, x), max=beta)


@kernel("linear_activation", widen=True)
def linear_activation(x: Tensor, alpha: float, beta: float) -> Tensor:
    """``alpha * x + beta``."""
    return alpha * x + beta


@kernel("scaled_tanh", widen=True)
def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    """``alpha * tanh(beta * x)``."""
    return alpha * torch.tanh(beta * x)


@kernel("sigmoid_hard", widen=True)
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Tensor:
    """``alpha * x + beta`` bounded to [0, 1]."""
    return torch.clamp(alpha * x + beta, 0, 1)


@kernel("prelu", widen=True)
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    """Leaky ReLU with a slope per channel; ``x``: [N, C, *spatial], ``alpha``: [C]."""
    return torch.where(x > 0, x, _per_channel(alpha, x) * x)


@kernel("softplus_parametric", widen=True)
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """``alpha * log(1 + e**(beta * x))``; ``alpha`` and ``beta``: [C], ``x``: [N, C, *spatial]."""
    return _per_channel(alpha, x) * F.softplus(_per_channel(beta, x) * x)


@kernel("softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x), axis)``."""
    return torch.softmax(x, dim=axis)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (x.dim() - 2))
