"""The architectures that read images, as tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
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
_GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GEMMA = {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}


_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 32,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


def _plain(vision: Mapping[str, Any], images: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """Inputs of a model for images [images, 3, H, W] and tokens [1, L] with their positions."""
    del vision, tokens
    return {"pixel_values": images}


def _nested(
    vision: Mapping[str, Any], images: torch.Tensor, tokens: torch.Tensor
) -> dict[str, Any]:
    del vision, tokens
    return {"pixel_values": images[None]}


def _typed(vision: Mapping[str, Any], images: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    del vision
    return {"pixel_values": images, "token_type_ids": (tokens == IMAGE).long()}


def _patches(
    vision: Mapping[str, Any], images: torch.Tensor, tokens: torch.Tensor
) -> dict[str, Any]:
    processor = transformers().Qwen2VLImageProcessorPil()
    cut = [processor.patchify(image.numpy(), vision["patch_size"], 2, 2) for image in images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([patches for patches, *_ in cut])),
        "image_grid_thw": torch.tensor([[1, *grid] for _, *grid in cut]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }


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
        inputs: What the model takes as images, and beside them; see ``_plain``.
        model_type: Model type, if it differs from the family's name.
        size: Height and width of an image.
        chooses_size: Whether the size is not in the configuration.
        chunk: Rows of a call in tests.
    """

    models: str
    has: str
    vision: Mapping[str, Any]
    positions: int
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    text: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inputs: Callable[[Mapping[str, Any], torch.Tensor, torch.Tensor], dict[str, Any]] = _plain
    model_type: str = ""
    size: tuple[int, int] = (SIDE, SIDE)
    chooses_size: bool = False
    chunk: int = 8


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
        inputs=_nested,
    ),
    "idefics3": VisionFamily(
        "Idefics 3, SmolVLM 1",
        "SigLIP, pixels shuffled",
        _LAYERS,
        _QUARTER,
        {"scale_factor": 2},
        inputs=_nested,
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
    "gemma3": VisionFamily(
        "Gemma 3 4B to 27B",
        "SigLIP, averaged; attention in both directions within an image",
        _SIGLIP,
        _ALL,
        {"mm_tokens_per_image": _ALL},
        _GEMMA3,
        _typed,
        chunk=_ALL + 3,
    ),
    "qwen2_vl": VisionFamily(
        "Qwen 2 VL",
        "its own, for any size; positions of three dimensions",
        {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 32},
        6,
        _QWEN_TOKENS,
        {"model_type": "qwen2_vl_text", "rope_parameters": _ROTARY},
        _patches,
        size=(2 * 28, 3 * 28),
        chooses_size=True,
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen 2.5 VL",
        "its own, with windows, for any size; positions of three dimensions",
        {**_QWEN_TOWER, "window_size": 56, "fullatt_block_indexes": [1]},
        12,
        _QWEN_TOKENS,
        {"model_type": "qwen2_5_vl_text", "rope_parameters": _ROTARY},
        _patches,
        size=(4 * 28, 3 * 28),
        chooses_size=True,
    ),
    "qwen3_vl": VisionFamily(
        "Qwen 3 VL",
        "its own, for any size; positions of three dimensions, features for several layers",
        {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        6,
        _QWEN_TOKENS,
        {
            "model_type": "qwen3_vl_text",
            "head_dim": 8,
            "rope_parameters": {**_ROTARY, "mrope_interleaved": True},
        },
        _patches,
        size=(2 * 28, 3 * 28),
        chooses_size=True,
    ),
    "qwen3_5": VisionFamily(
        "Qwen 3.5",
        "its own, for any size; positions of three dimensions",
        {**_QWEN_TOWER, "num_position_embeddings": 16},
        6,
        _QWEN_TOKENS,
        {
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                **_ROTARY,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
            },
        },
        _patches,
        size=(3 * 28, 2 * 28),
        chooses_size=True,
    ),
}
"""By ``model_type``."""

VARIANTS: Mapping[str, VisionFamily] = {
    "llava with scaled embeddings": VisionFamily(
        "",
        "",
        _SIGLIP,
        _ALL,
        {"vision_feature_select_strategy": "full"},
        _GEMMA,
        model_type="llava",
    ),
    "llava with multipliers": VisionFamily(
        "",
        "",
        _SIGLIP,
        _ALL,
        {"vision_feature_select_strategy": "full"},
        {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
        model_type="llava",
    ),
    "gemma3 with a window shorter than an image": VisionFamily(
        "",
        "",
        _SIGLIP,
        _ALL,
        {"mm_tokens_per_image": _ALL},
        {**_GEMMA3, "sliding_window": 10},
        _typed,
        "gemma3",
        chunk=_ALL,
    ),
    "qwen2_5_vl with equal windows": VisionFamily(
        "",
        "",
        {**_QWEN_TOWER, "window_size": 56, "fullatt_block_indexes": [1]},
        8,
        _QWEN_TOKENS,
        {"model_type": "qwen2_5_vl_text", "rope_parameters": _ROTARY},
        _patches,
        "qwen2_5_vl",
        size=(2 * 28, 4 * 28),
        chooses_size=True,
        chunk=5,
    ),
}
"""Families beside other language models, which treat embeddings in a way of their own, or of other
sizes."""


def configuration(name: str, *, layers: int = 2, **text: Any) -> dict[str, Any]:
    """A tiny configuration; ``text`` changes the language model's values."""
    family = (FAMILIES | VARIANTS)[name]
    return {
        "model_type": family.model_type or name,
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,  # an older name
        "vision_config": {**family.vision}
        if family.chooses_size
        else {**family.vision, "num_hidden_layers": layers},
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
    add_noise(model)
    with torch.no_grad():
        # Generated, it would need a further image.
        model.get_output_embeddings().weight[IMAGE] *= 0.01
    return model


def whole_text(name: str, tokens: list[int], positions: int | None = None) -> torch.Tensor:
    """Tokens [1, L] with one image token for each position of an image."""
    positions = positions or (FAMILIES | VARIANTS)[name].positions
    repeated = ([token] * (positions if token == IMAGE else 1) for token in tokens)
    return torch.tensor([[token for part in repeated for token in part]])


@torch.no_grad()
def logits_of(model: Any, name: str, tokens: list[int], images: torch.Tensor) -> torch.Tensor:
    """The logits [L, V] of a text with images [images, 3, H, W], by the model itself."""
    family, text = (FAMILIES | VARIANTS)[name], whole_text(name, tokens)
    return model(input_ids=text, **family.inputs(family.vision, images, text)).logits[0]
