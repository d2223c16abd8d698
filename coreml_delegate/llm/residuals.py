"""T5 in fp16: the sums that its layers add to are kept smaller by a factor.

The sums of T5 have been seen above 65504, the largest fp16 number, and its modules clamp them.
Every layer reads them through a norm that does not depend on their size, so a factor of all terms
changes nothing but the epsilon of the norms, which gets it as well. The factor is a power of two:
fp32 numbers are exact.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from coreml_delegate.llm.norms import RMSNorm
from coreml_delegate.llm.stored_weights import StoredWeight

FACTOR = 1 / 16
"""The root of the epsilon 1e-6 times this is still a normal fp16 number."""


class ScaledEmbedding(nn.Module):
    """An embedding, times a factor.

    Args:
        embedding: The embedding, whose weight others may share.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [..., width] of ``tokens`` [...]."""
        return self.embedding(tokens) * FACTOR


def scale_residuals(model: Any) -> None:
    """Scale what the layers of T5 add up; other models are left as they are.

    Args:
        model: An encoder-decoder model whose norms are ``RMSNorm``; changed.
    """
    for stack in (model.get_encoder(), model.get_decoder()):
        if not all(hasattr(stack, name) for name in ("block", "embed_tokens", "final_layer_norm")):
            return
        stack.embed_tokens = ScaledEmbedding(stack.embed_tokens)
        for module in stack.modules():
            if isinstance(module, RMSNorm):
                module.eps *= FACTOR**2
            if (linear := _last_factor(module)) is not None:
                linear.weight = nn.Parameter(_scaled(linear.weight), requires_grad=False)


def _last_factor(module: Any) -> Any:
    """Return the linear layer whose weight is a factor of what a layer adds, or None.

    Of a gated layer it is the one that is not in the activation, whose product may be as large.
    """
    if hasattr(module, "wo"):
        return getattr(module, "wi_1", module.wo)
    return module.o if all(hasattr(module, name) for name in "qkvo") else None


def _scaled(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, StoredWeight):
        return StoredWeight(partial(_read_scaled, weight), weight.shape)
    return weight * FACTOR


def _read_scaled(weight: StoredWeight) -> torch.Tensor:
    return weight.read() * FACTOR
