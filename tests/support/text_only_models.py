"""Models that read images and are exported without them, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coreml_delegate.patches.third_party import transformers
from support.checkpoints import CONFIG, add_noise
from support.vision_families import (
    IMAGE,
    PATCH,
    QWEN_TOKENS,
    QWEN_TOWER,
    ROTARY,
    SIDE,
    configuration,
)

CONTEXT = 96

_TEXT = {**CONFIG, "max_position_embeddings": CONTEXT}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,  # which no group of weights divides
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def _beside_a_tower(
    tower: str, text: str, changes: Mapping[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    return {
        "vision_config": {**_TOWER, "model_type": tower},
        "text_config": {**_TEXT, "model_type": text, **(changes or {})},
        "image_token_index": IMAGE,
        **keys,
    }


CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "mistral3": _beside_a_tower("pixtral", "mistral", {"sliding_window": None}),
    "llava_next": _beside_a_tower("clip_vision_model", "llama"),
    "llava_onevision": _beside_a_tower("siglip_vision_model", "qwen2"),
    "glm4v": {
        "vision_config": {**QWEN_TOWER, "image_size": SIDE},
        "text_config": {**_TEXT, "rope_parameters": ROTARY},
        **QWEN_TOKENS,
    },
    **{
        name: configuration(name)
        for name in (
            "llava",
            "smolvlm",
            "gemma3",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_5",
            "lfm2_vl",
        )
    },
}
"""Configurations by ``model_type``, also of models whose images are supported."""


def tiny_text_only_model(name: str, **text: Any) -> Any:
    """The whole model of transformers, with its tower, in fp32 and eval mode."""
    library = transformers()
    library.utils.logging.disable_progress_bar()
    values = dict(CONFIGURATIONS[name])
    values["text_config"] = {**values["text_config"], **text}
    values.pop("model_type", None)
    config = library.AutoConfig.for_model(name, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return add_noise(model)
