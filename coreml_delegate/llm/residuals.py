"""The residual stream of T5 is scaled down for fp16.

T5's residual stream exceeds 65504, the largest fp16 number, and its modules clamp it. Every layer
reads it through an RMS norm, which is scale-invariant except for its epsilon: with the factor f of
all terms and f^2 of epsilon the result is the same. f is a power of two, so it is exact in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from coreml_delegate.llm.stored_weights import StoredWeight

FACTOR = 1 / 16
"""sqrt(1e-6) times this, the root of the scaled epsilon, is still a normal fp16 number."""


class ScaledEmbedding(nn.Module):
    """An embedding times ``FACTOR``.

    Args:
        embedding: The embedding; its weight may be shared.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [..., width] of ``tokens`` [...]."""
        return self.embedding(tokens) * FACTOR


def scale_residuals(model: Any) -> None:
    """Scale the residual stream of T5; other models are not changed.

    Args:
        model: An encoder-decoder model; changed.
    """
    for stack in (model.get_encoder(), model.get_decoder()):
        if not all(hasattr(stack, name) for name in ("block", "embed_tokens", "final_layer_norm")):
            return
        stack.embed_tokens = ScaledEmbedding(stack.embed_tokens)
        for module in stack.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= FACTOR**2
            if (linear := _branch_layer(module)) is not None:
                linear.weight = nn.Parameter(_scaled_weight(linear.weight), requires_grad=False)


def _branch_layer(module: Any) -> Any:
    """Return the linear layer that scales with a module's residual branch, or None.

    For a gated layer wo(gelu(wi_0 x) * wi_1 x) it is wi_1, because the product may overflow too.
    """
    if hasattr(module, "wo"):
        return getattr(module, "wi_1", module.wo)
    return module.o if all(hasattr(module, name) for name in "qkvo") else None


def _scaled_weight(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, StoredWeight):
        return StoredWeight(partial(_read_scaled, weight), weight.shape)
    return weight * FACTOR


def _read_scaled(weight: StoredWeight) -> torch.Tensor:
    return weight.read() * FACTOR
