"""Checkpoints of transformers give the logits of its own models, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import CONFIG, save
from support.tolerances import ATOL_RTOL_LOGITS

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import end_tokens, load_decoder, random_decoder
from coreml_delegate.llm.config import Config
from coreml_delegate.llm.families import FAMILIES, family_of, read_settings

pytestmark = pytest.mark.xdist_group("checkpoints")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "llama": {},
    "llama, tied, long context": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama, biases, linear scaling": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"sliding_window": 64},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "phi3, partly rotated": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
}


def load(folder: Path):
    config = Config.load(folder / "config.json")
    family = family_of(config)
    return load_decoder(folder, read_settings(config, family, None), family, positions=64)


def settings(**changes):
    config = Config({**CONFIG, "model_type": "llama", **changes}, "here")
    return read_settings(config, family_of(config), None)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    model = save(tmp_path, name.split(",")[0], **VARIANTS[name])
    tokens = torch.randint(
        CONFIG["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        expected = model(tokens).logits
        actual = load(tmp_path)(tokens)
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_every_family_is_compared():
    assert {name.split(",")[0] for name in VARIANTS} == set(FAMILIES)


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


def test_old_configurations_give_the_same_settings():
    """Rotary embedding by ``rope_theta`` and ``rope_scaling``, as before transformers 5."""
    scaling = {**LLAMA3}
    theta = scaling.pop("rope_theta")
    new = settings(rope_parameters=LLAMA3)
    assert new.rotary.long_context is not None
    assert settings(rope_theta=theta, rope_scaling=scaling) == new
    assert settings(rope_theta=theta, rope_scaling=None).rotary.theta == theta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture that is not supported: got model_type 'mamba'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'rope_type' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, 'got "yarn", expected default'),
        ({"rope_parameters": {"rope_type": "default", "mscale": 2}}, "'mscale' is not supported"),
        ({"num_local_experts": 8}, "here: 'num_local_experts' is not supported: got 8"),
        ({"hidden_act": "relu"}, "'hidden_act' is not supported: got \"relu\", expected silu"),
        ({"hidden_size": None}, "here lacks 'hidden_size'"),
        ({"vocab_size": "97"}, "'vocab_size' is not supported: got \"97\", expected an integer"),
        ({"pretraining_tp": 2}, "'pretraining_tp' is not supported: got 2, expected 1"),
        ({"num_key_value_heads": 3}, "expected a divisor of 4 heads"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is not supported"),
        ({"model_type": "phi", "qk_layernorm": True}, "'qk_layernorm' is not supported"),
        (
            {"model_type": "mistral", "sliding_window": 32},
            "sliding windows are not supported: got sliding_window 32 for a context of 64 tokens",
        ),
        (
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True},
            "sliding windows are not supported",
        ),
    ],
)
def test_unsupported_configurations_are_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        settings(**changes)


def test_a_window_wider_than_the_context_is_accepted():
    config = Config({**CONFIG, "model_type": "mistral", "sliding_window": 32}, "here")
    assert read_settings(config, family_of(config), 32).max_context == 64
    assert settings(model_type="qwen2", sliding_window=32, use_sliding_window=False).qkv_bias


def test_weights_must_match_the_configuration(tmp_path):
    save(tmp_path, "llama")
    values = json.loads((tmp_path / "config.json").read_text())

    def claim(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        return load(tmp_path)

    with pytest.raises(
        OptionError, match=r"shape differs .* got \[48, 32\] for layers.0.feed.gate"
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
        Config.load(path)


def test_end_tokens_of_instructed_models(tmp_path):
    assert end_tokens(tmp_path, settings()) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2], "top_p": 0.9}')
    assert end_tokens(tmp_path, settings()) == (2, 3)


def test_invalid_weight_files_are_refused(tmp_path):
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(OptionError, match="cannot read weights from"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(OptionError, match="is not a checkpoint index"):
        load(tmp_path)


def test_random_weights_depend_only_on_the_seed():
    made = [random_decoder(settings(), seed, positions=8) for seed in (0, 0, 1)]
    first, again, other = (dict(decoder.named_parameters()) for decoder in made)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(32))
