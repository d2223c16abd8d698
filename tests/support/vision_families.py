"""The architectures that read images, as tiny models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from coreml_delegate.patches.third_party import transformers
from support.checkpoints import CONFIG, add_noise

SIDE, PATCH = 56, 14
IMAGE = 90
"""The token that stands for an image."""

_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_CLIP = {"model_type": "clip_vision_model", **_LAYERS}
_SIGLIP = {"model_type": "siglip_vision_model", **_LAYERS}
_INTERN = {
    **_LAYERS,
    "model_type": "internvl_vision",
    "image_size": [SIDE, SIDE],
    "patch_size": [PATCH, PATCH],
}
_GEMMA = {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One architecture.

    Attributes:
        models: Models of the architecture.
        has: Its tower and projector.
        vision: Configuration of its tower.
        positions: Number of positions that an image takes.
        changes: Further keys of its configuration.
        text: Changes of the language model's configuration.
        nested: Whether the images of a text are nested: [1, images, 3, H, W].
        model_type: Model type, if it differs from the family's name.
    """

    models: str
    has: str
    vision: Mapping[str, Any]
    positions: int
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    text: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    nested: bool = False
    model_type: str = ""


_SHUFFLED = {"scale_factor": 2, "tie_word_embeddings": True}
_QUARTER = (SIDE // PATCH // 2) ** 2
_ALL = (SIDE // PATCH) ** 2

FAMILIES: Mapping[str, VisionFamily] = {
    "llava": VisionFamily("LLaVA 1.5", "CLIP or SigLIP, two linear layers", _CLIP, _ALL),
    "smolvlm": VisionFamily(
        "SmolVLM 2",
        "SigLIP, pixels shuffled",
        _LAYERS,
        _QUARTER,
        _SHUFFLED,
        {"tie_word_embeddings": True},
        nested=True,
    ),
    "idefics3": VisionFamily(
        "Idefics 3, SmolVLM 1",
        "SigLIP, pixels shuffled",
        _LAYERS,
        _QUARTER,
        {"scale_factor": 2},
        nested=True,
    ),
    "vipllava": VisionFamily(
        "ViP-LLaVA",
        "CLIP, several of its layers",
        _CLIP,
        _ALL,
        {"vision_feature_layers": [-2, -1]},
    ),
    "aya_vision": VisionFamily(
        "Aya Vision",
        "SigLIP, pixels shuffled, gated",
        _SIGLIP,
        _QUARTER,
        {"downsample_factor": 2, "vision_feature_select_strategy": "full"},
        {"model_type": "cohere2", "sliding_window": 24},
    ),
    "cohere2_vision": VisionFamily(
        "Command A Vision",
        "SigLIP, pixels shuffled, gated",
        _SIGLIP,
        _QUARTER,
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
        {"model_type": "cohere2", "sliding_window": 24},
    ),
    "internvl": VisionFamily(
        "InternVL 3",
        "InternViT, pixels shuffled",
        _INTERN,
        _QUARTER,
        {"downsample_ratio": 0.5},
        {"model_type": "qwen2"},
    ),
}
"""By ``model_type``."""

VARIANTS: Mapping[str, VisionFamily] = {
    "llava with scaled embeddings": VisionFamily(
        "", "", _SIGLIP, _ALL, {"vision_feature_select_strategy": "full"}, _GEMMA, False, "llava"
    ),
    "llava with multipliers": VisionFamily(
        "",
        "",
        _SIGLIP,
        _ALL,
        {"vision_feature_select_strategy": "full"},
        {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
        False,
        "llava",
    ),
}
"""Families beside other language models, which treat embeddings in a way of their own."""


def configuration(name: str, *, layers: int = 2, **text: Any) -> dict[str, Any]:
    """A tiny configuration; ``text`` changes the language model's values."""
    family = (FAMILIES | VARIANTS)[name]
    return {
        "model_type": family.model_type or name,
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,  # an older name
        "vision_config": {**family.vision, "num_hidden_layers": layers},
        "text_config": {
            "model_type": "llama",
            **CONFIG,
            "max_position_embeddings": 96,
            **family.text,
            "num_hidden_layers": layers,
            **text,
        },
        **family.changes,
    }


def tiny_vision_model(name: str, **changes: Any) -> Any:
    """A model of transformers with eager attention, in fp32 and eval mode."""
    library = transformers()
    library.utils.logging.disable_progress_bar()
    values = configuration(name, **changes)
    config = library.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return add_noise(model)


def whole_text(name: str, tokens: list[int]) -> torch.Tensor:
    """Tokens [1, L] with one image token for each position of an image."""
    positions = (FAMILIES | VARIANTS)[name].positions
    repeated = ([token] * (positions if token == IMAGE else 1) for token in tokens)
    return torch.tensor([[token for part in repeated for token in part]])


@torch.no_grad()
def logits_of(model: Any, name: str, tokens: list[int], images: torch.Tensor) -> torch.Tensor:
    """The logits [L, V] of a text with images [images, 3, H, W], by the model itself."""
    nested = (FAMILIES | VARIANTS)[name].nested
    return model(
        input_ids=whole_text(name, tokens), pixel_values=images[None] if nested else images
    ).logits[0]
