"""A decoder in torch whose every shape is static once the number of tokens is.

Keys and values of earlier tokens are no business of the layers: they hand what they compute to a
``Memory`` and attend to what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.scripts.llm.rotary import Rotation, rotate, tables
from coreml_delegate.scripts.llm.settings import Activation, DecoderSettings, Norm

Segment = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [B, kv_heads, S, head_dim] of S tokens."""

MASKED = -3e4
"""Score of a token that must not be seen: its share is zero in fp32 and fp16 alike, and unlike
infinity it is a number to every kernel."""

_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


class Memory(Protocol):
    """Where keys and values are kept while a call passes through the layers."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """Take the call's own keys and values; return all that may be attended to, in order."""
        ...


class NoMemory:
    """Every token is in the call: training, and the logits of a whole text."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """See ``Memory``."""
        del layer
        return ((keys, values),)


class RMSNorm(nn.Module):
    """Root-mean-square norm, optionally safe from overflow in fp16.

    fp16 ends at 65504, so that the square of an activation of 256 overflows. The safe form first
    divides by the largest magnitude, or by the root of ``eps`` if that is larger: the result is the
    same whatever the divisor, and no intermediate value is above 1. On devices that beats an island
    of fp32, which the neural engine does not run.
    """

    def __init__(self, width: int, eps: float, *, safe: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.safe = safe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., width]."""
        eps: float | torch.Tensor = self.eps
        if self.safe:
            root = self.eps**0.5
            divisor = x.abs().amax(-1, keepdim=True).clamp(min=root)
            x = x / divisor
            eps = (root / divisor).square()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention of grouped queries."""

    def __init__(self, settings: DecoderSettings, *, safe_norms: bool) -> None:
        super().__init__()
        self.kv_heads = settings.kv_heads
        self.head_dim = settings.head_dim
        self.scale = settings.head_dim**-0.5
        queries, keys = settings.heads * self.head_dim, self.kv_heads * self.head_dim
        self.query = nn.Linear(settings.dim, queries, bias=settings.qkv_bias)
        self.key = nn.Linear(settings.dim, keys, bias=settings.qkv_bias)
        self.value = nn.Linear(settings.dim, keys, bias=settings.qkv_bias)
        self.out = nn.Linear(queries, settings.dim, bias=settings.out_bias)
        if settings.query_key_norm:
            self.query_norm = _norm(settings, self.head_dim, safe=safe_norms)
            self.key_norm = _norm(settings, self.head_dim, safe=safe_norms)
        else:
            self.query_norm = self.key_norm = nn.Identity()

    def forward(
        self, x: torch.Tensor, layer: int, rotation: Rotation, mask: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """``x`` [B, L, D]; ``mask`` [L * heads / kv_heads, S], added to the scores."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        query = rotate(self.query_norm(self.query(x).view(heads)), rotation)
        key = rotate(self.key_norm(self.key(x).view(heads)), rotation)
        segments = memory.extend(
            layer, key.transpose(1, 2), self.value(x).view(heads).transpose(1, 2)
        )
        attended = _attend(self._grouped(query) * self.scale, segments, mask)
        groups = (batch, self.kv_heads, -1, length, self.head_dim)
        return self.out(attended.view(groups).permute(0, 3, 1, 2, 4).reshape(batch, length, -1))

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """[B, L, heads, head_dim] as [B, kv_heads, group * L, head_dim].

        Keys and values are thus multiplied as they are, not repeated for each head of a group.
        """
        batch, length = query.shape[:2]
        grouped = query.view(batch, length, self.kv_heads, -1, self.head_dim)
        return grouped.permute(0, 2, 3, 1, 4).reshape(batch, self.kv_heads, -1, self.head_dim)


def _attend(query: torch.Tensor, segments: Sequence[Segment], mask: torch.Tensor) -> torch.Tensor:
    """Attention over segments that lie apart, so that no cache is copied to join them."""
    scores = torch.cat([query @ keys.transpose(-1, -2) for keys, _ in segments], dim=-1)
    shares = torch.softmax(scores + mask, dim=-1)
    parts = shares.split([keys.shape[2] for keys, _ in segments], dim=-1)
    attended = parts[0] @ segments[0][1]
    for part, (_, values) in zip(parts[1:], segments[1:], strict=True):
        attended = attended + part @ values
    return attended


class FeedForward(nn.Module):
    """Two or, gated, three linear layers."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[settings.activation]
        width = (settings.dim, settings.hidden)
        self.gate = nn.Linear(*width, bias=settings.feed_bias) if settings.gated else None
        self.up = nn.Linear(*width, bias=settings.feed_bias)
        self.down = nn.Linear(*width[::-1], bias=settings.feed_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, L, D]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and a feed-forward network, beside shortcuts."""

    def __init__(self, settings: DecoderSettings, *, safe_norms: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(settings, settings.dim, safe=safe_norms)
        self.attention = Attention(settings, safe_norms=safe_norms)
        self.feed_norm = (
            None if settings.parallel else _norm(settings, settings.dim, safe=safe_norms)
        )
        self.feed = FeedForward(settings)

    def forward(
        self, x: torch.Tensor, index: int, rotation: Rotation, mask: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """See ``Attention``."""
        normed = self.attention_norm(x)
        attended = self.attention(normed, index, rotation, mask, memory)
        if self.feed_norm is None:
            return x + attended + self.feed(normed)
        x = x + attended
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """Tokens in, logits out.

    Args:
        settings: Architecture.
        positions: Rows of the position tables: one more than the largest position ever passed.
        safe_norms: Norms that cannot overflow in fp16, at the price of a few operations each.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, settings: DecoderSettings, *, positions: int, safe_norms: bool = False
    ) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocabulary, settings.dim)
        self.layers = nn.ModuleList(
            Layer(settings, safe_norms=safe_norms) for _ in range(settings.layers)
        )
        self.norm = _norm(settings, settings.dim, safe=safe_norms)
        self.head = nn.Linear(settings.dim, settings.vocabulary, bias=settings.head_bias)
        if settings.tied:
            self.head.weight = self.embedding.weight
        with torch.device("cpu"):  # not part of any checkpoint, so never left to be filled
            cos, sin = tables(settings.rotary, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.settings.heads // self.settings.kv_heads

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """What the last layer makes of tokens.

        Args:
            tokens: [B, L], integers.
            positions: [L], integers.
            mask: [L, S], 0 where a token may see another, else ``MASKED``.
            memory: Keys and values.

        Returns:
            [B, L, D].
        """
        rotation = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        mask = torch.cat([mask] * self.group) if self.group > 1 else mask
        x = self.embedding(tokens)
        if self.settings.embedding_scale != 1.0:
            x = x * self.settings.embedding_scale
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotation, mask, memory)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., V]."""
        return self.head(self.norm(hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every token of whole texts: [B, L] to [B, L, V]."""
        length = tokens.shape[1]
        positions = torch.arange(length)
        mask = torch.full((length, length), MASKED).triu(1)
        return self.logits(self.hidden(tokens, positions, mask, NoMemory()))


def _norm(settings: DecoderSettings, width: int, *, safe: bool) -> nn.Module:
    if settings.norm is Norm.LAYER:
        return nn.LayerNorm(width, eps=settings.norm_eps)
    return RMSNorm(width, settings.norm_eps, safe=safe)
