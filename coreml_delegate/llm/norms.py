"""Norms that cannot overflow in fp16, as replacements for norms of ``transformers``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from coreml_delegate.errors import LoweringError

_WIDTH = 64  # of probes for norms without a weight
_MAGNITUDES = (1e-3, 1.0, 30.0)
_TOLERANCE = 1e-4


class RMSNorm(nn.Module):
    """RMS norm y = w * x / sqrt(mean(x^2) + eps) (arXiv:1910.07467) without overflow in fp16.

    The largest fp16 number is 65504, so the square of an activation of 256 overflows. With
    d = max(max|x|, sqrt(eps)) the same y is w * (x/d) / sqrt(mean((x/d)^2) + eps/d^2), where no
    intermediate value is above 1. On devices that is faster than an fp32 island, which the neural
    engine does not run.

    Args:
        weight: [..., width], or None.
        eps: Added to the mean square.
    """

    def __init__(self, weight: torch.Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` [..., width]."""
        root = self.eps**0.5
        divisor = x.abs().amax(-1, keepdim=True).clamp(min=root)
        x = x / divisor
        eps = (root / divisor).square()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed if self.weight is None else normed * self.weight


class GatedRMSNorm(nn.Module):
    """``RMSNorm`` of groups of channels, with a gate: norm(x) * silu(z) or norm(x * silu(z)).

    Args:
        weight: [width].
        eps: Added to the mean square.
        groups: Number of groups, each normalized separately.
        gate_first: Whether the gate multiplies the input of the norm, or its result.
    """

    def __init__(self, weight: torch.Tensor, eps: float, groups: int, *, gate_first: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(weight.reshape(groups, -1), eps)
        self.groups = groups
        self.gate_first = gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` with ``gate``, both [..., width]."""
        factor = functional.silu(gate)
        x = x * factor if self.gate_first else x
        normed = self.norm(x.unflatten(-1, (self.groups, -1))).flatten(-2)
        return normed if self.gate_first else normed * factor


class LayerNorm(nn.Module):
    """Layer norm as one Core ML operation: y = w * (x - mean(x)) / sqrt(var(x) + eps).

    Args:
        weight: [..., width], or None.
        eps: Added to the variance.
    """

    def __init__(self, weight: torch.Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` [..., width]."""
        normed = functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        return normed if self.weight is None else normed * self.weight


def make_norms_safe(model: nn.Module) -> None:
    """Replace the norms of a model by equivalents that are safe in fp16.

    A norm is recognised by its results for a probe, because models implement norms differently.

    Raises:
        LoweringError: A norm computes another function.
    """
    for parent, name, norm in list(_unsafe_norms(model)):
        setattr(parent, name, _safe_norm(norm))


def _unsafe_norms(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, module in parent.named_children():
            if "Norm" in type(module).__name__ and not _is_safe(module):
                yield parent, name, module


def _is_safe(norm: nn.Module) -> bool:
    """Whether a norm becomes Core ML's layer norm: it has a shape and is not ``nn.RMSNorm``."""
    return hasattr(norm, "normalized_shape") and not isinstance(norm, nn.RMSNorm)


@torch.no_grad()
def _safe_norm(norm: nn.Module) -> nn.Module:
    weight = _weight(norm)
    epsilons = (getattr(norm, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in epsilons if isinstance(value, float)), torch.finfo().eps)
    shape = getattr(norm, "normalized_shape", (_WIDTH,)) if weight is None else weight.shape
    probe = _probe(shape, seed=0)
    gate = [_probe(shape, seed=1)] if "gate" in inspect.signature(norm.forward).parameters else []
    expected = norm(probe, *gate)
    for candidate in (
        _gated_candidates(norm, weight, eps) if gate else _plain_candidates(weight, eps)
    ):
        if torch.allclose(candidate(probe, *gate), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return candidate
    raise LoweringError(
        f"{type(norm).__name__} is a norm whose form for float16 is not known",
        remedy="Export with --precision float32",
    )


def _weight(norm: nn.Module) -> torch.Tensor | None:
    """Return the weight of a norm; None for a norm without a weight that affects the result."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    if "gate" in inspect.signature(norm.forward).parameters:
        return weight
    probe = _probe(weight.shape, seed=0)
    other = functional_call(norm, {"weight": weight + 1}, (probe,))
    return None if torch.equal(norm(probe), other) else weight


def _probe(shape: Any, *, seed: int) -> torch.Tensor:
    """Return activations [magnitudes, 2, *shape]."""
    generator = torch.Generator().manual_seed(seed)
    probe = torch.randn(len(_MAGNITUDES), 2, *shape, generator=generator)
    return probe * torch.tensor(_MAGNITUDES).view(-1, *[1] * (probe.dim() - 1))


def _plain_candidates(weight: torch.Tensor | None, eps: float) -> Iterator[nn.Module]:
    for kind in (RMSNorm, LayerNorm):
        for effective in (None,) if weight is None else (weight, 1 + weight):
            yield kind(effective, eps)


def _gated_candidates(norm: Any, weight: torch.Tensor | None, eps: float) -> Iterator[nn.Module]:
    if weight is None:
        return
    width = weight.shape[0]
    size: int = getattr(norm, "group_size", width // getattr(norm, "n_groups", 1))
    for gate_first in (True, False):
        yield GatedRMSNorm(weight, eps, width // size, gate_first=gate_first)
