"""What determines a decoder, apart from its weights."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Norm(enum.Enum):
    """How activations are normalised."""

    RMS = "rms"
    LAYER = "layer"


class Activation(enum.Enum):
    """Non-linearity of the feed-forward network."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class LongContext:
    """Rotary frequencies stretched to a longer context, as Llama 3.1 does.

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
