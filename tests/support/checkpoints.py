"""Tiny checkpoints of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coreml_delegate.patches.third_party import transformers

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


def save(
    folder: Path,
    model_type: str,
    *,
    shard: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Save a model of transformers; returns it, in fp32 and eval mode."""
    model = tiny_model(model_type, **changes)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.float()


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A model of transformers with eager attention, in fp32 and eval mode."""
    library = transformers()
    library.utils.logging.disable_progress_bar()
    config = library.AutoConfig.for_model(model_type, **{**CONFIG, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return add_noise(model)


@torch.no_grad()
def add_noise(model: Any) -> Any:
    """Give all parameters random values; returns the model, in eval mode."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Norms and biases too: what is one or zero would hide that it is not used.
        noise = torch.randn(parameter.shape, generator=random)
        parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.eval().requires_grad_(False)
