"""GGUF files of tiny Llamas, with the names and the order of rows that llama.cpp writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from coreml_delegate.patches.third_party import transformers

_SCALES = {"Q2_K": (80, 84), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
"""Where a block of 256 weights has its scales in fp16."""


def write_gguf(path: Path, model: Any, kind: str) -> None:
    """Write a Llama whose matrices have blocks of one kind.

    ``gguf`` quantizes to the simple kinds; the blocks of the others are random.
    """
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        for part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part[0] == "q" else config.num_key_value_heads
            values = _halves_as_pairs(values, heads) if part in name else values
        stored, raw = values, None
        if values.ndim > 1:
            raw = gguf.GGMLQuantizationType[kind]
            stored = (
                _random_blocks(values.shape, kind) if kind in _SCALES else _quantize(values, raw)
            )
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantize(values: Any, raw: Any) -> Any:
    return gguf.quantize(np.ascontiguousarray(values), raw)


def _halves_as_pairs(weight: Any, heads: int) -> Any:
    """The rows of each head, whose halves llama.cpp rotates as pairs of neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _random_blocks(shape: tuple[int, ...], kind: str) -> Any:
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(0)
    blocks = random.integers(256, size=(shape[0], shape[1] // elements, size), dtype=np.uint8)
    first, last = _SCALES[kind]
    scales = random.uniform(1e-4, 2e-4, (*blocks.shape[:2], (last - first) // 2))
    blocks[..., first:last] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, and one merge."""
    transformers()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "He"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["H e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


TOKENS = 260
"""Size of the vocabulary."""
