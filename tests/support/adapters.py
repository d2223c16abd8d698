"""LoRA adapters with random matrices, as peft saves them, and models with merged weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

PREFIX = "base_model.model."

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A [r, inputs] and B [outputs, r], by module."""


def targets(model: Any, ends: Sequence[str]) -> dict[str, Any]:
    """Modules of a model whose names end with a suffix."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ends and hasattr(module, "weight")
    }


def matrices(
    model: Any, ends: Sequence[str], rank: int = 4, seed: int = 1, size: float = 0.2
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Random matrices for the modules with a suffix; an embedding has tokens as inputs."""
    random = torch.Generator().manual_seed(seed)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in targets(model, ends).items():
        outputs, inputs = module.weight.shape
        if not isinstance(module, nn.Linear):  # GPT-2's layers have inputs in front, too
            outputs, inputs = inputs, outputs
        pairs[name] = (
            size * torch.randn(rank, inputs, generator=random),
            size * torch.randn(outputs, rank, generator=random),
        )
    return pairs


def save_adapter(
    folder: Path,
    model: Any,
    pairs: Matrices,
    magnitudes: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> Path:
    """Save matrices as peft does; ``options`` go to ``adapter_config.json``."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (down, up) in pairs.items():
        embedding = isinstance(model.get_submodule(name), nn.Embedding)
        parts = (
            ("lora_embedding_A", "lora_embedding_B")
            if embedding
            else ("lora_A.weight", "lora_B.weight")
        )
        tensors |= {
            f"{PREFIX}{name}.{part}": tensor for part, tensor in zip(parts, (down, up), strict=True)
        }
    for name, magnitude in (magnitudes or {}).items():
        tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    first = next(iter(pairs.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21.2",
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "r": first[0].shape[0],
        "lora_alpha": 8,
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        **options,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def merged(
    model: Any,
    pairs: Matrices,
    scale: float | Mapping[str, float],
    magnitudes: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """A copy of a transformers model with merged weights, added in fp64 and rounded."""
    changed = copy.deepcopy(model)
    for name, (down, up) in pairs.items():
        module = changed.get_submodule(name)
        factor = scale if isinstance(scale, float) else scale[name]
        turned = not isinstance(module, nn.Linear)  # [inputs, outputs]
        product = factor * (up.double() @ down.double())
        weight = module.weight.double() + (product.t() if turned else product)
        if magnitudes is not None:
            along = 0 if turned else 1
            lengths = weight.norm(dim=along, keepdim=True)
            magnitude = magnitudes[name].double()
            weight = weight / lengths * (magnitude[None] if turned else magnitude[:, None])
        # A parameter of its own, because that of a tied head stays.
        module.weight = nn.Parameter(weight.float(), requires_grad=False)
    return changed
