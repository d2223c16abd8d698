"""Folders that transformers has saved: the logits of its own models, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import CONFIG, save
from support.tolerances import ATOL_RTOL_LOGITS

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import (
    end_tokens,
    load_decoder,
    most_context,
    random_decoder,
    read_config,
)

pytestmark = pytest.mark.xdist_group("checkpoints")


def load(folder: Path, context: int = 64):
    return load_decoder(folder, read_config(folder / "config.json"), context=context)


def configured(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "llama", **changes}))
    return read_config(path)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 12}),
    ],
)
def test_logits_equal_those_of_transformers(model_type, changes, tmp_path):
    model = save(tmp_path, model_type, **changes)
    tokens = torch.randint(
        CONFIG["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        actual = load(tmp_path)(tokens)
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_shards_are_found_by_the_index(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    save(whole, "qwen2")
    save(parts, "qwen2", shard="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(load(parts)(tokens), load(whole)(tokens), atol=0, rtol=0)
    next(parts.glob("*.safetensors")).unlink()
    with pytest.raises(OptionError, match=r"lacks weights: expected model-0000\d"):
        load(parts)


def test_half_precision_is_read_as_fp32(tmp_path):
    save(tmp_path, "llama", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in load(tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llamoid"}, "architecture that is not supported: got model_type 'llamoid'"),
        ({"model_type": "vit"}, "got model_type 'vit', expected a causal language model"),
        ({"quantization_config": {"bits": 4}}, "quantized in a format that is not supported"),
        ({"vocab_size": "97"}, "transformers cannot read .*config.json: got Strict"),
    ],
)
def test_unsupported_configurations_are_refused(changes, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        configured(tmp_path, **changes)


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    """Its embedding would be the head: the configuration ties the two."""
    model = save(tmp_path, "qwen3", tie_word_embeddings=True)
    read_config(tmp_path / "config.json")
    model.model.save_pretrained(tmp_path)
    message = r"no text: got architectures \['Qwen3Model'\], expected Qwen3ForCausalLM"
    with pytest.raises(OptionError, match=message):
        read_config(tmp_path / "config.json")


def test_a_configuration_that_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(OptionError, match="transformers cannot make the model"):
        random_decoder(configured(tmp_path, hidden_act="nothing"), 0, context=64)


def test_rotation_that_depends_on_the_length_needs_a_short_context(tmp_path):
    factors = [1.0 + index for index in range(4)]
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": factors,
    }
    config = configured(
        tmp_path,
        model_type="phi3",
        rope_parameters=scaling,
        original_max_position_embeddings=16,
    )
    assert random_decoder(config, 0, context=16).context == 16
    with pytest.raises(OptionError, match=r"depends on the length .* got a context of 17 tokens"):
        random_decoder(config, 0, context=17)


def test_weights_must_match_the_configuration(tmp_path):
    save(tmp_path, "llama")
    values = json.loads((tmp_path / "config.json").read_text())

    def claim(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        return load(tmp_path)

    with pytest.raises(
        OptionError, match=r"shape differs .* got \[\d+, \d+\] for model.layers.0.mlp.down_proj"
    ):
        claim(intermediate_size=64)
    with pytest.raises(OptionError, match=r"does not have: got model.layers.1.input_layernorm"):
        claim(num_hidden_layers=1)
    with pytest.raises(
        OptionError, match=r"lacks a weight: expected model.layers.2.input_layernorm"
    ):
        claim(num_hidden_layers=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a model configuration: got list"),
        (None, "no such model config"),
    ],
)
def test_invalid_configuration_files_are_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_config(path)


def test_end_tokens_of_instructed_models(tmp_path):
    config = configured(tmp_path)
    assert end_tokens(config, tmp_path) == end_tokens(config, None) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2], "top_p": 0.9}')
    assert end_tokens(config, tmp_path) == (2, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(OptionError, match="has end tokens that are not integers"):
        end_tokens(config, tmp_path)


def test_the_longest_context(tmp_path):
    assert most_context(configured(tmp_path)) == 64
    assert most_context(configured(tmp_path, model_type="gpt2", max_position_embeddings=32)) == 32
    assert most_context(configured(tmp_path, model_type="bloom")) == 64


def test_invalid_weight_files_are_refused(tmp_path):
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(OptionError, match="cannot read weights from"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(OptionError, match="is not a checkpoint index"):
        load(tmp_path)


def test_random_weights_depend_only_on_the_seed(tmp_path):
    config = configured(tmp_path)
    made = [random_decoder(config, seed, context=8) for seed in (0, 0, 1)]
    first, again, other = (dict(decoder.named_parameters()) for decoder in made)
    assert all(torch.equal(first[name], again[name]) for name in first)
    head = "model.lm_head.weight"
    assert not torch.equal(first[head], other[head])
    assert torch.equal(first["model.model.norm.weight"], torch.ones(32))
