"""The decoder in torch: settings, layers and rotary embedding.

All shapes are static once the number of tokens is. Layers do not store keys and values of earlier
tokens: they pass their own to a ``Memory`` and attend to the keys and values it returns.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

Segment = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [B, kv_heads, S, head_dim] of S tokens."""

MASKED = -3e4
"""Score of a hidden token: softmax makes it zero in fp32 and fp16, and unlike infinity every kernel
takes it."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines, each [L, 1, R] for L positions and R rotated channels."""


class Norm(enum.Enum):
    """Kind of normalisation."""

    RMS = "rms"
    LAYER = "layer"


class Activation(enum.Enum):
    """Non-linearity of the feed-forward network."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class LongContext:
    """Rotary frequencies scaled to a longer context, as in Llama 3.1.

    Wavelengths beyond ``original_context / low`` grow by ``factor``, those below
    ``original_context / high`` stay, and those between are interpolated.

    Attributes:
        factor: How much longer the context is.
        low: Rotations within the original context below which a frequency is scaled in full.
        high: Rotations above which it is kept.
        original_context: Tokens the model was trained for at first.
    """

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding of queries and keys.

    Attributes:
        theta: Base of the frequencies.
        channels: Channels of each head that are rotated, the first ones; an even number.
        linear_factor: Positions are divided by it.
        long_context: Further scaling of the frequencies.
    """

    theta: float
    channels: int
    linear_factor: float = 1.0
    long_context: LongContext | None = None


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Architecture of a decoder of Llama's kind and its variants.

    Attributes:
        vocabulary: Number of tokens V.
        dim: Width D of the residual stream.
        layers: Number of layers.
        heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer; divides ``heads``.
        head_dim: Width of a head.
        hidden: Inner width of the feed-forward network.
        max_context: Tokens the model was made for.
        norm_eps: Added to the mean square.
        rotary: Position embedding.
        norm: Kind of the norms.
        activation: Of the feed-forward network.
        gated: Whether the activation of one projection gates another.
        parallel: Whether attention and feed-forward network have the same input, one norm before.
        query_key_norm: Whether each head's queries and keys are normalised.
        qkv_bias: Whether the query, key and value projections have biases.
        out_bias: Whether the attention's output projection has one.
        feed_bias: Whether the feed-forward projections have them.
        head_bias: Whether the projection to logits has one.
        embedding_scale: Factor of the token embeddings.
        tied: Whether logits are computed with the embedding's weight.
        bos: Token that begins a text, or None.
        eos: Tokens that end one.
    """

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    max_context: int
    norm_eps: float
    rotary: Rotary
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SILU
    gated: bool = True
    parallel: bool = False
    query_key_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    feed_bias: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


class Memory(Protocol):
    """Stores keys and values while a call passes through the layers."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """Take the call's own keys and values; return all segments to attend to, in order."""
        ...


class NoMemory:
    """No stored tokens: every token is in the call, as in training."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """See ``Memory``."""
        del layer
        return ((keys, values),)


class RMSNorm(nn.Module):
    """Root-mean-square norm, optionally safe from overflow in fp16.

    The largest fp16 number is 65504, so the square of an activation of 256 overflows. The safe form
    first divides by the largest magnitude, or by the root of ``eps`` if that is larger: the divisor
    cancels out, and no intermediate value is above 1. On devices that beats an island of fp32,
    which the neural engine does not run.
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
    """Causal self-attention with grouped queries."""

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
        """Reshape [B, L, heads, head_dim] to [B, kv_heads, group * L, head_dim].

        Keys and values then need not be repeated for each head of a group.
        """
        batch, length = query.shape[:2]
        grouped = query.view(batch, length, self.kv_heads, -1, self.head_dim)
        return grouped.permute(0, 2, 3, 1, 4).reshape(batch, self.kv_heads, -1, self.head_dim)


def _attend(query: torch.Tensor, segments: Sequence[Segment], mask: torch.Tensor) -> torch.Tensor:
    """Attend to separate segments, so that no cache is copied to join them."""
    scores = torch.cat([query @ keys.transpose(-1, -2) for keys, _ in segments], dim=-1)
    shares = torch.softmax(scores + mask, dim=-1)
    parts = shares.split([keys.shape[2] for keys, _ in segments], dim=-1)
    attended = parts[0] @ segments[0][1]
    for part, (_, values) in zip(parts[1:], segments[1:], strict=True):
        attended = attended + part @ values
    return attended


class FeedForward(nn.Module):
    """Feed-forward network of two linear layers, or three if gated."""

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
    """Attention and a feed-forward network with residual connections."""

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
    """Language model from tokens to logits.

    Args:
        settings: Architecture.
        positions: Rows of the position tables: one more than the largest position ever passed.
        safe_norms: Use norms that cannot overflow in fp16; each costs a few operations more.
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
        with torch.device("cpu"):  # checkpoints do not have them, so they are computed now
            cos, sin = rotary_tables(settings.rotary, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.settings.heads // self.settings.kv_heads

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """Return the output of the last layer.

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
        """Return logits [..., V], given the output of the last layer [..., D]."""
        return self.head(self.norm(hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, L, V] of all tokens of whole texts [B, L]."""
        length = tokens.shape[1]
        positions = torch.arange(length)
        mask = torch.full((length, length), MASKED).triu(1)
        return self.logits(self.hidden(tokens, positions, mask, NoMemory()))


def _norm(settings: DecoderSettings, width: int, *, safe: bool) -> nn.Module:
    if settings.norm is Norm.LAYER:
        return nn.LayerNorm(width, eps=settings.norm_eps)
    return RMSNorm(width, settings.norm_eps, safe=safe)


def rotary_tables(rotary: Rotary, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of all positions.

    They are tables in fp32, because a position times a frequency does not fit fp16.

    Args:
        rotary: Settings.
        positions: Number of rows.

    Returns:
        Two tensors [positions, R], fp32. The sines of the first half of the channels are negated,
        so that the rotation is two products and a sum.
    """
    frequencies = _frequencies(rotary) / rotary.linear_factor
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate pairs of channels, half the rotated width apart, by the angles of their positions.

    Args:
        x: Queries or keys [B, L, H, head_dim].
        rotation: Cosines and sines of the L positions.
    """
    cos, sin = rotation
    channels = cos.shape[-1]
    first, second, rest = x.split((channels // 2, channels // 2, x.shape[-1] - channels), dim=-1)
    turned = torch.cat((first, second), dim=-1) * cos + torch.cat((second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _frequencies(rotary: Rotary) -> torch.Tensor:
    """Return radians per position, [R / 2]."""
    exponents = torch.arange(0, rotary.channels, 2, dtype=torch.float32) / rotary.channels
    frequencies = 1.0 / (rotary.theta**exponents)
    if rotary.long_context is None:
        return frequencies
    return _scale_frequencies(frequencies, rotary.long_context)


def _scale_frequencies(frequencies: torch.Tensor, long: LongContext) -> torch.Tensor:
    """Scale frequencies for a longer context.

    Source: the ``llama3`` rope type of the configurations of Llama 3.1 and later.
    """
    rotations = long.original_context * frequencies / (2 * math.pi)
    kept = ((rotations - long.low) / (long.high - long.low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / long.factor)
