"""Tiny checkpoints of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coreml_delegate.scripts.inputs.vision import import_torchvision

CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def import_transformers() -> Any:
    """The module transformers."""
    import_torchvision()  # which transformers imports, and cannot by itself beside a CPU torch
    import transformers

    return transformers


def save(
    folder: Path,
    model_type: str,
    *,
    shard: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Save a model of transformers; returns it, in fp32 and eval mode."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(model_type, **{**CONFIG, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: what is one or zero would hide that it is not used.
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.float()
