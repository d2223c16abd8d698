"""The measured models: two convolutional networks, a transformer, a decoder, a perceptron.

All have seeded random weights; none is downloaded. The decoder is a small model of Llama's kind,
whose key and value caches are mutable buffers, which become Core ML states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from support.torchvision_models import build
from torch import nn
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the call that is timed.

    Attributes:
        name: As on the command line.
        title: What the table says of it.
        module: In eval mode, fp32.
        inputs: Of the timed call.
        history: Inputs of the calls that come before it, for a model with state.
    """

    name: str
    title: str
    module: nn.Module
    inputs: Tensors
    history: tuple[Tensors, ...] = ()

    @property
    def stateful(self) -> bool:
        """Whether a call changes what the next one sees."""
        return isinstance(self.module, Decoder)


class Attention(nn.Module):
    """Causal self-attention over a cache, with rotary position embedding."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """``x`` [1, L, D]; ``keys`` and ``values`` [1, H, S, D / H] are written at positions."""
        batch, length, dim = x.shape

        def split(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, length, self.heads, -1).transpose(1, 2)

        query = _rotated(split(self.query(x)), *rotation)
        keys[:, :, positions] = _rotated(split(self.key(x)), *rotation)
        values[:, :, positions] = split(self.value(x))
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(batch, length, dim))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of channels half a head apart, turned by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm and beside a shortcut."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.feed_norm = nn.RMSNorm(dim, eps=1e-5)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        """``x`` [1, L, D]; ``context`` is what attention takes besides."""
        x = x + self.attention(self.attention_norm(x), *context)
        y = self.feed_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tokens in, logits of the last position out; keys and values of earlier calls are kept."""

    def __init__(
        self,
        *,
        layers: int = 4,
        dim: int = 512,
        heads: int = 8,
        hidden: int = 1536,
        vocabulary: int = 4096,
        context: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        width = dim // heads
        rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for index in range(layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{index}", torch.zeros(1, heads, context, width))

    @property
    def caches(self) -> list[torch.Tensor]:
        """Keys and values of every layer in turn, each [1, H, S, D / H]."""
        return [
            getattr(self, f"{kind}_{index}")
            for index in range(len(self.layers))
            for kind in ("keys", "values")
        ]

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``tokens`` [1, L] from ``position`` [1] on; logits [1, vocabulary]."""
        return self.advance(tokens, position, self.caches)

    def advance(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: list[torch.Tensor]
    ) -> torch.Tensor:
        """``forward`` on caches given by the caller, which are written to."""
        positions = position + torch.arange(tokens.shape[1])
        rotation = self.cos[positions], self.sin[positions]
        mask = torch.arange(caches[0].shape[2])[None, :] <= positions[:, None]
        x = self.embedding(tokens)
        for layer, keys, values in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            x = layer(x, rotation, mask, positions, keys, values)
        return self.head(self.norm(x[:, -1]))


class ExplicitState(nn.Module):
    """A decoder whose caches are inputs and outputs, for frameworks without mutable buffers."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, *caches: torch.Tensor
    ) -> Tensors:
        """Logits, then the caches after the call."""
        after = [cache.clone() for cache in caches]
        logits = self.decoder.advance(tokens, position, after)
        return (logits, *after)


def perceptron() -> nn.Sequential:
    """Three layers, 256 to 512 to 512 to 64."""
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
    )


def _vision(name: str, title: str) -> Workload:
    module, image = build(name, 224)
    return Workload(name, f"{title}, 1x3x224x224", module, (image,))


def _decoder(name: str, title: str, length: int, earlier: int) -> Workload:
    torch.manual_seed(0)
    module = Decoder().eval()
    for norm in (m for m in module.modules() if isinstance(m, nn.RMSNorm)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)  # weights of one would be optimised away
    vocabulary = module.embedding.num_embeddings
    tokens = torch.randint(vocabulary, (1, earlier + length))
    history = tuple((tokens[:, i : i + 1], torch.tensor([i])) for i in range(earlier))
    return Workload(name, title, module, (tokens[:, earlier:], torch.tensor([earlier])), history)


def _mlp() -> Workload:
    torch.manual_seed(0)
    return Workload("mlp", "MLP of 3 layers, 1x256", perceptron().eval(), (torch.randn(1, 256),))


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "mobilenet_v2": lambda: _vision("mobilenet_v2", "MobileNetV2"),
    "resnet18": lambda: _vision("resnet18", "ResNet-18"),
    "vit_b_16": lambda: _vision("vit_b_16", "ViT-B/16"),
    "decoder_prefill": lambda: _decoder(
        "decoder_prefill", "decoder of 4 layers, 128 tokens", length=128, earlier=0
    ),
    "decoder_step": lambda: _decoder(
        "decoder_step", "decoder of 4 layers, one token after 32", length=1, earlier=32
    ),
    "mlp": _mlp,
}
"""Builders by name, in the order of the tables."""
