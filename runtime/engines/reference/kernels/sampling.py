"""Random values.

A seed of -1 selects torch's global generator; with any other seed every call returns the same
values, by torch's generator. Implementations of MIL agree only on the distribution.

Source: coremltools' MIL op reference, ``random``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel

_UNSEEDED = -1


def _generator(seed: int) -> torch.Generator | None:
    return None if seed == _UNSEEDED else torch.Generator().manual_seed(seed)


@kernel("random_bernoulli")
def random_bernoulli(shape: Ints, prob: float = 0.5, seed: int = _UNSEEDED) -> Tensor:
    """1 with probability ``prob``, else 0."""
    return (torch.rand(shape, generator=_generator(seed)) < prob).float()


@kernel("random_normal")
def random_normal(
    shape: Ints, mean: float = 0.0, stddev: float = 1.0, seed: int = _UNSEEDED
) -> Tensor:
    """Values normally distributed around ``mean``."""
    return torch.randn(shape, generator=_generator(seed)) * stddev + mean


@kernel("random_uniform")
def random_uniform(
    shape: Ints, low: float = 0.0, high: float = 1.0, seed: int = _UNSEEDED
) -> Tensor:
    """Values uniformly distributed over [low, high)."""
    return torch.rand(shape, generator=_generator(seed)) * (high - low) + low


@kernel("random_categorical", widen=True)
def random_categorical(
    x: Tensor, mode: str = "logits", size: int = 1, seed: int = _UNSEEDED
) -> Tensor:
    """``size`` draws with replacement per distribution along the last dimension of ``x``."""
    if mode not in ("logits", "probs"):
        raise ValueError(f"random_categorical mode is {mode!r}, not logits or probs")
    probabilities = torch.softmax(x, dim=-1) if mode == "logits" else x
    rows = probabilities.reshape(-1, x.shape[-1])
    classes = torch.multinomial(rows, size, replacement=True, generator=_generator(seed))
    return classes.reshape(*x.shape[:-1], size).float()
