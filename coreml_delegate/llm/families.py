"""The model families of ``transformers`` that the decoder implements: one record per family.

A record says how a ``config.json`` becomes settings and where a checkpoint keeps each weight. Keys
of a configuration that no record knows are refused, because an ignored key may change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.config import Config
from coreml_delegate.llm.decoder import (
    Activation,
    DecoderSettings,
    LongContext,
    Norm,
    Rotary,
)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

# Modules of our layer to those of a checkpoint, as most families name them.
_ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
}
_QUERY_KEY_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
_GATED = {"feed.gate": "mlp.gate_proj", "feed.up": "mlp.up_proj", "feed.down": "mlp.down_proj"}
_NORMS = {"attention_norm": "input_layernorm", "feed_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Stacked:
    """A module whose weight a checkpoint stacks with others along the outputs.

    Attributes:
        name: Name of the stacked weight in the checkpoint.
        parts: Names of all its parts in our layer, in order.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Attributes:
        layer: Modules of our layer, each with its name in the checkpoint's layer.
        final_norm: Name of the checkpoint's norm behind the last layer.
        fixed: Settings that all models of the family have in common.
        flags: Settings that a boolean key decides: the key and its default, by setting.
        required: Keys that must have this value if they are present.
        norm_eps: Key of the epsilon of the norms.
        activation: Keys of the activation; the first that is present counts.
        window: Returns the sliding window of a configuration in tokens, or None.
        norm_offset: Added to the stored weights of norms.
        scaled_embedding: Whether embeddings are multiplied by the root of the width.
        defaults: Defaults that differ from Llama's, by key.
    """

    layer: Mapping[str, str | Stacked]
    final_norm: str = "model.norm"
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=lambda: MappingProxyType({}))
    required: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    norm_eps: str = "rms_norm_eps"
    activation: tuple[str, ...] = ("hidden_act",)
    window: Callable[[Config], int | None] = lambda _: None
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def _window(config: Config) -> int | None:
    return config.integer("sliding_window", None)


def _optional_window(config: Config) -> int | None:
    config.integer("max_window_layers", 0)
    window = config.integer("sliding_window", None)
    return window if config.flag("use_sliding_window", default=False) else None


_LAYER = {**_ATTENTION, **_GATED, **_NORMS}
_QKV = tuple(f"attention.{kind}" for kind in ("query", "key", "value"))
_PLAIN_BIAS = {
    "qkv_bias": ("attention_bias", False),
    "out_bias": ("attention_bias", False),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        layer=_LAYER,
        flags={**_PLAIN_BIAS, "feed_bias": ("mlp_bias", False)},
        required={"pretraining_tp": 1},
    ),
    "mistral": Family(layer=_LAYER, window=_window, defaults={"num_key_value_heads": 8}),
    "qwen2": Family(layer=_LAYER, fixed={"qkv_bias": True}, window=_optional_window),
    "qwen3": Family(
        layer={**_LAYER, **_QUERY_KEY_NORMS},
        fixed={"query_key_norm": True},
        flags=_PLAIN_BIAS,
        window=_optional_window,
        defaults={"head_dim": 128},
    ),
    "gemma": Family(
        layer=_LAYER,
        flags=_PLAIN_BIAS,
        required={"use_bidirectional_attention": False},
        activation=("hidden_activation", "hidden_act"),
        norm_offset=1.0,
        scaled_embedding=True,
        defaults={"head_dim": 256, "tie_word_embeddings": True},
    ),
    "phi": Family(
        layer={
            **_ATTENTION,
            "attention.out": "self_attn.dense",
            "feed.up": "mlp.fc1",
            "feed.down": "mlp.fc2",
            "attention_norm": "input_layernorm",
        },
        final_norm="model.final_layernorm",
        fixed={
            "norm": Norm.LAYER,
            "gated": False,
            "parallel": True,
            "qkv_bias": True,
            "out_bias": True,
            "feed_bias": True,
            "head_bias": True,
        },
        required={"qk_layernorm": False},
        norm_eps="layer_norm_eps",
        defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "phi3": Family(
        layer={
            **{name: Stacked("self_attn.qkv_proj", _QKV) for name in _QKV},
            **{
                name: Stacked("mlp.gate_up_proj", ("feed.gate", "feed.up"))
                for name in ("feed.gate", "feed.up")
            },
            "attention.out": "self_attn.o_proj",
            "feed.down": "mlp.down_proj",
            **_NORMS,
        },
        window=_window,
        # Only the rotary scaling that is refused uses it.
        required={"original_max_position_embeddings": None},
    ),
}
"""Families by ``model_type``."""


def family_of(config: Config) -> Family:
    """Return the family of a configuration.

    Raises:
        OptionError: The ``model_type`` is not supported.
    """
    kind = config.text("model_type")
    if kind not in FAMILIES:
        raise OptionError(
            f"{config.where} has an architecture that is not supported",
            got=f"model_type {kind!r}",
            expected=", ".join(FAMILIES),
        )
    return FAMILIES[kind]


def read_settings(config: Config, family: Family, context: int | None) -> DecoderSettings:
    """Return the decoder settings of a configuration.

    Args:
        config: Configuration of the model; every key must be known.
        family: Its family.
        context: Largest context to export, in tokens; None for the model's own maximum.

    Raises:
        OptionError: A key is missing or malformed, or the decoder does not implement its value.
    """
    config = config.with_defaults({"hidden_act": "silu", "rms_norm_eps": 1e-6, **family.defaults})
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", dim // heads)
    max_context = config.integer("max_position_embeddings", 2048)
    varying: dict[str, Any] = {
        setting: config.flag(key, default=default)
        for setting, (key, default) in family.flags.items()
    }
    settings = DecoderSettings(
        vocabulary=config.integer("vocab_size"),
        dim=dim,
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=config.integer("intermediate_size"),
        max_context=max_context,
        norm_eps=config.number(family.norm_eps),
        rotary=_rotary(config, head_dim, max_context),
        activation=_activation(config, family),
        embedding_scale=dim**0.5 if family.scaled_embedding else 1.0,
        tied=config.flag("tie_word_embeddings", default=False),
        bos=config.integer("bos_token_id", None),
        eos=config.integers("eos_token_id"),
        **family.fixed,
        **varying,
    )
    if heads % kv_heads:
        raise config.refused("num_key_value_heads", f"a divisor of {heads} heads")
    _check_window(config, family.window(config), min(context or max_context, max_context))
    for key, value in family.required.items():
        config.require(key, value)
    config.refuse_unread()
    return settings


def _activation(config: Config, family: Family) -> Activation:
    key = next((key for key in family.activation if config.has(key)), family.activation[-1])
    for other in family.activation:
        config.ignore(other)
    name = config.text(key)
    if name not in _ACTIVATIONS:
        raise config.refused(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _check_window(config: Config, window: int | None, context: int) -> None:
    """Refuse a window narrower than the context; a wider one has no effect."""
    config.ignore("layer_types")  # they say which layers have the window
    if window is not None and window < context:
        raise OptionError(
            f"{config.where}: sliding windows are not supported",
            got=f"sliding_window {window} for a context of {context} tokens",
            remedy=f"Export a context of at most {window} tokens, where the window has no effect",
        )


def _rotary(config: Config, head_dim: int, max_context: int) -> Rotary:
    """Read either form of the keys: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``."""
    scaling = config.part("rope_parameters") or config.part("rope_scaling")
    for key in ("rope_parameters", "rope_scaling"):
        config.ignore(key)
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary = Rotary(theta, int(head_dim * share))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    scaling.ignore("type")
    if kind == "linear":
        rotary = Rotary(theta, rotary.channels, linear_factor=scaling.number("factor"))
    elif kind == "llama3":
        long = LongContext(
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            scaling.integer("original_max_position_embeddings", max_context),
        )
        rotary = Rotary(theta, rotary.channels, long_context=long)
    elif kind != "default":
        raise scaling.refused("rope_type", "default, linear, llama3", got=kind)
    if rotary.channels % 2 or not rotary.channels:
        raise config.refused("partial_rotary_factor", "an even number of rotated channels")
    scaling.refuse_unread()
    return rotary
