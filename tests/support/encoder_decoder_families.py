"""The tested and the refused encoder-decoder models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from coreml_delegate.llm.checkpoint import random_model
from coreml_delegate.patches.third_party import transformers

CONTEXT, SOURCE = 80, 40

_TOKENS = {
    "vocab_size": 97,
    "d_model": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_BART = {
    **_TOKENS,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
}
_T5 = {
    **_TOKENS,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    # So that 64 tokens have distances of every class.
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
}
_GATED = {
    **_T5,
    "num_decoder_layers": 3,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_WHISPER = {
    **_BART,
    "max_source_positions": 25,
    "max_target_positions": CONTEXT,
    "num_mel_bins": 16,
    "begin_suppress_tokens": None,
}
_MOONSHINE = {
    **{name: value for name, value in _TOKENS.items() if name != "d_model"},
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 3,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "pad_head_dim_to_multiple_of": 16,
    "max_position_embeddings": CONTEXT,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        model_type: As in ``config.json``.
        models: Models of the architecture.
        has: Its peculiarities.
        config: Keys of a tiny configuration.
        audio: Whether its source is a spectrogram.
        samples: Number of samples of its longest source; 0 if it takes no samples.
        quick: Whether ``make test`` runs it.
    """

    model_type: str
    models: str
    has: str
    config: Mapping[str, Any]
    audio: bool = False
    samples: int = 0
    quick: bool = False


FAMILIES: Mapping[str, Family] = {
    "whisper": Family(
        "whisper",
        "Whisper, Distil-Whisper",
        "a spectrogram, convolutions, learnt positions",
        _WHISPER,
        audio=True,
    ),
    "moonshine": Family(
        "moonshine",
        "Moonshine",
        "samples, convolutions, rotary positions",
        _MOONSHINE,
        samples=4500,
    ),
    "t5": Family("t5", "T5", "biases by distance, a head that is scaled", _T5, quick=True),
    "t5, gated": Family("t5", "T5 1.1, Flan-T5", "gated layers", _GATED),
    "mt5": Family("mt5", "mT5", "gated layers", _GATED),
    "umt5": Family("umt5", "UMT5", "biases by distance in each layer", _GATED),
    "bart": Family("bart", "BART", "learnt positions", _BART),
    "mbart": Family("mbart", "mBART", "learnt positions", _BART),
    "marian": Family("marian", "OPUS-MT", "sines", _BART),
    "pegasus": Family("pegasus", "Pegasus", "sines", _BART),
    "m2m_100": Family("m2m_100", "M2M-100, NLLB-200", "sines, positions that skip padding", _BART),
    "plbart": Family("plbart", "PLBART", "learnt positions", _BART),
    "blenderbot": Family("blenderbot", "Blenderbot", "learnt positions", _BART),
    "blenderbot-small": Family("blenderbot-small", "Blenderbot, small", "learnt positions", _BART),
}
"""By a name."""

REFUSED: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "mvp": (_BART, "does not compute with caches", "its module has its own attention"),
    "switch_transformers": (
        {**_T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        "mixtures of experts",
        "mixture of experts",
    ),
}
"""By ``model_type``: keys of a configuration, what the error says, and why in short."""


@torch.no_grad()
def tiny_model(model_type: str, config: Mapping[str, Any]) -> Any:
    """A model of transformers with eager attention, in fp32 and eval mode."""
    library = transformers()
    model = random_model(library.AutoConfig.for_model(model_type, **config), 0)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Norms and biases too: what is one or zero would hide that it is not used.
        noise = torch.randn(parameter.shape, generator=random)
        parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def tiny_source(name: str) -> torch.Tensor:
    """A spectrogram, or samples or tokens that are fewer than the encoder takes."""
    family, random = FAMILIES[name], torch.Generator().manual_seed(1)
    if family.audio:
        frames = 2 * family.config["max_source_positions"]
        return torch.randn(1, family.config["num_mel_bins"], frames, generator=random)
    if family.samples:
        return 0.2 * torch.randn(1, family.samples - 1300, generator=random)
    return torch.randint(4, 97, (1, SOURCE - 17), generator=random)
