"""Models that read images and are exported without them, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coreml_delegate.patches.third_party import transformers
from support.checkpoints import CONFIG, add_noise
from support.vision_families import IMAGE, PATCH, SIDE, configuration

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
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": 32,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


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
    "gemma3": _beside_a_tower(
        "siglip_vision_model", "gemma3_text", {"head_dim": 8}, mm_tokens_per_image=4
    ),
    "mistral3": _beside_a_tower("pixtral", "mistral", {"sliding_window": None}),
    "llava_next": _beside_a_tower("clip_vision_model", "llama"),
    "llava_onevision": _beside_a_tower("siglip_vision_model", "qwen2"),
    "qwen2_vl": {
        "vision_config": {**_QWEN_TOWER, "embed_dim": 32},
        "text_config": {**_TEXT, "rope_parameters": _ROTARY},
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "vision_config": _QWEN_TOWER,
        "text_config": {**_TEXT, "rope_parameters": _ROTARY},
        **_QWEN_TOKENS,
    },
    "glm4v": {
        "vision_config": {**_QWEN_TOWER, "image_size": SIDE},
        "text_config": {**_TEXT, "rope_parameters": _ROTARY},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "vision_config": {
            **_QWEN_TOWER,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "rope_parameters": {**_ROTARY, "mrope_interleaved": True},
        },
        **_QWEN_TOKENS,
    },
    "qwen3_5": {
        "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16},
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        **_QWEN_TOKENS,
    },
    **{name: configuration(name) for name in ("llava", "smolvlm")},
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
