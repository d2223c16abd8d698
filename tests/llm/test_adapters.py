"""LoRA adapters: what merged weights of transformers compute, and one clear error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import PREFIX, matrices, merged, save_adapter
from support.checkpoints import tiny_model
from support.llm_families import FAMILIES
from support.tolerances import ATOL_RTOL, logits_bounds
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.adapters import AdapterFile, Config, Update, read_adapters
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.low_rank import LowRankLinear, attached, fit_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TIED = {"tie_word_embeddings": True}
TOKENS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))


def decoder_of(kind: str, **changes: Any) -> tuple[Decoder, Any]:
    """A decoder, and the model of transformers that it is made of."""
    changes = {**FAMILIES[kind].changes, **changes}
    return Decoder(tiny_model(kind, **changes), context=64), tiny_model(kind, **changes)


def logits_with(decoder: Decoder, folder: Path) -> torch.Tensor:
    adapter = fit_adapter(decoder, AdapterFile.read("some", folder))
    with torch.no_grad(), attached(decoder, adapter):
        return decoder(TOKENS)


def close(actual: torch.Tensor, model: Any) -> None:
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
    atol, rtol = logits_bounds(expected)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("kind", "ends", "changes"),
    [
        ("llama", ("q_proj", "v_proj"), {}),
        ("llama", LINEAR, {}),
        ("llama", ("q_proj", "lm_head"), TIED),
        ("llama", ("embed_tokens",), TIED),
        ("gemma3_text", ("embed_tokens", "o_proj"), {}),  # whose embeddings have a factor
        ("gpt2", ("c_attn", "c_fc"), {}),
        ("gpt2", ("wte",), {}),
        ("phi3", ("qkv_proj", "gate_up_proj"), {}),
        ("gpt_neox", ("query_key_value", "dense"), {}),
        ("minicpm3", ("kv_b_proj", "q_a_proj"), {}),
        ("bloom", ("query_key_value",), {}),
    ],
)
def test_logits_equal_those_of_merged_weights(kind, ends, changes, tmp_path):
    decoder, model = decoder_of(kind, **changes)
    given = matrices(model, ends)
    with torch.no_grad():
        before = decoder(TOKENS)
    close(logits_with(decoder, save_adapter(tmp_path, model, given)), merged(model, given, 2.0))
    with torch.no_grad():
        assert torch.equal(decoder(TOKENS), before)
        difference = merged(model, given, 2.0)(TOKENS, use_cache=False).logits - before
    assert difference.abs().max() > 0.1 * before.abs().max()


@pytest.mark.parametrize(
    ("kind", "ends"), [("llama", LINEAR), ("qwen2", ATTENTION), ("gpt2", ("c_attn", "c_fc"))]
)
def test_dora_scales_the_rows_of_the_weight(kind, ends, tmp_path):
    decoder, model = decoder_of(kind)
    given = matrices(model, ends)
    random = torch.Generator().manual_seed(2)
    magnitudes = {
        name: torch.rand(up.shape[0], generator=random) for name, (_, up) in given.items()
    }
    folder = save_adapter(tmp_path, model, given, magnitudes, use_dora=True)
    close(logits_with(decoder, folder), merged(model, given, 2.0, magnitudes))


def test_ranks_and_factors_of_single_modules(tmp_path):
    decoder, model = decoder_of("llama")
    small, large = (matrices(model, (end,), rank) for end, rank in (("q_proj", 4), ("v_proj", 9)))
    options = {
        "target_modules": r".*self_attn\.[qv]_proj",
        "rank_pattern": {r"v_pro.": 9},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 16, "v_proj": 6.0},
        "use_rslora": True,
        "fan_in_fan_out": True,
    }
    folder = save_adapter(tmp_path, model, {**small, **large}, **options)
    scale = {name: 6 / 9**0.5 for name in large} | {name: 8 / 4**0.5 for name in small}
    scale["model.layers.0.self_attn.q_proj"] = 16 / 4**0.5
    close(logits_with(decoder, folder), merged(model, {**small, **large}, scale))
    adapter = fit_adapter(decoder, AdapterFile.read("some", folder))
    assert adapter.ranks == (4, 9)
    assert adapter.elements == sum(a.numel() + b.numel() for a, b in {**small, **large}.values())


def config(tmp_path: Path, **options: Any) -> Config:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **options}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    return Config.read(tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {"layers.0.q_proj", "layers.1.q_proj"}),
        ({"target_modules": ["layers.1.q_proj", "xv_proj"]}, {"layers.1.q_proj"}),
        ({"target_modules": r"layers\.\d\.[kv]_proj"}, {"layers.0.v_proj", "layers.1.v_proj"}),
        ({"target_modules": "q_proj"}, set()),
        ({"layers_to_transform": 1}, {"model.layers.1.q_proj"}),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, {"model.layers.0.q_proj"}),
        ({"layers_to_transform": [0], "layers_pattern": ["blocks"]}, set()),
        ({"exclude_modules": ["layers.0.q_proj"]}, {"layers.1.q_proj"}),
        ({"exclude_modules": r".*0\.q_proj"}, {"layers.1.q_proj"}),
    ],
)
def test_which_modules_change(options, changed, tmp_path):
    made = config(tmp_path, **options)
    prefix = "model." if "layers_to_transform" in options else ""
    names = [f"{prefix}layers.{layer}.{name}_proj" for layer in (0, 1) for name in "qv"]
    assert {name for name in names if made.is_target(name)} == changed


def test_all_linear_leaves_the_head(tmp_path):
    decoder, model = decoder_of("llama")
    given = matrices(model, LINEAR)
    folder = save_adapter(tmp_path, model, given, target_modules="all-linear")
    assert AdapterFile.read("some", folder).updates(decoder.model).keys() == given.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "of a kind that is not supported: got peft_type 'IA3', expected 'L"),
        ({"bias": "lora_only"}, r"not supported: got bias \"lora_only\", expected 'none'\. Merge"),
        ({"modules_to_save": ["lm_head"]}, r"got modules_to_save .* cannot share the base model"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, 'got init_lora_weights "loftq", expected True, False'),
        ({"trainable_token_indices": [3]}, r"got trainable_token_indices \[3\]"),
        ({"layer_replication": [[0, 2]]}, "option that is not supported: got layer_replication"),
        ({"use_qalora": True}, "option that is not supported: got use_qalora true"),
        ({"some_future_option": 1}, "option that is not supported: got some_future_option 1"),
        ({"r": 0}, "malformed option: got r 0, expected an integer of at least 1"),
        ({"r": "8"}, 'malformed option: got r "8"'),
        ({"lora_alpha": None}, "malformed option: got lora_alpha null, expected a number"),
        ({"rank_pattern": {"q_proj": -1}}, "malformed option: got rank_pattern"),
        ({"rank_pattern": {"q(": 1}}, "malformed option: got rank_pattern"),
        ({"target_modules": None}, "got target_modules null, expected a list of names, or a patt"),
        ({"target_modules": "q_proj("}, "malformed option: got target_modules"),
        ({"use_dora": "yes"}, 'got use_dora "yes", expected true or false'),
        ({"layers_to_transform": [-1]}, "malformed option: got layers_to_transform"),
        ({"layers_to_transform": 1, "layers_pattern": ["(?i)h"]}, "malformed .*layers_pattern"),
        ({"layers_to_transform": 1, "target_modules": ".*q_proj"}, "expected one of them"),
    ],
)
def test_options_that_are_not_supported_are_refused(options, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "none", "lora_dropout": 0.1, "inference_mode": True, "megatron_core": "m"},
        {"init_lora_weights": "gaussian", "loftq_config": {}, "modules_to_save": []},
        {
            "auto_mapping": {"a": "b"},
            "revision": None,
            "task_type": "CAUSAL_LM",
            "use_bdlora": None,
        },
    ],
)
def test_options_of_training_are_ignored(options, tmp_path):
    assert config(tmp_path, **options) == config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[]", "is not the configuration of an adapter: got list")],
)
def test_invalid_configurations_are_refused(content, message, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(OptionError, match=message):
        Config.read(tmp_path / "adapter_config.json")


def saved(folder: Path, **options: Any) -> tuple[Decoder, Path]:
    decoder, model = decoder_of("llama")
    return decoder, save_adapter(folder, model, matrices(model, ("q_proj",)), **options)


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of the first layer, by the rest of their names; None removes one."""
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        stored[name] = tensor  # type: ignore[assignment]
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path)


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_A.weight": None}, f"lacks a matrix .* expected {Q}.lora_A.weight"),
        (
            {f"{Q}.lora_A.weight": torch.ones(4, 40)},
            r"does not fit the model: got \[4, 40\] for .*q_proj.lora_A.weight, expected \[4, 32\]",
        ),
        (
            {f"{Q}.lora_B.weight": torch.ones(32, 5)},
            r"got \[32, 5\] for .*q_proj.lora_B.weight, expected \[32, 4\]",
        ),
        (
            {f"{Q.replace('0', '7')}.lora_A.weight": torch.ones(4, 32)},
            "of modules that the adapter does not change: got .*layers.7.self_attn",
        ),
        ({f"{Q}.lora_B.bias": torch.ones(32)}, "does not change.*: got .*lora_B.bias"),
        (
            {f"{Q}.lora_magnitude_vector": torch.ones(32), "other": torch.ones(1)},
            "does not change.* and 1 more",
        ),
        ({f"{Q}.lora_A.weight": torch.full((4, 32), float("nan"))}, "not finite floats: got .*A"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}, "not finite"),
        (
            {f"{PREFIX}lm_head.base_layer.weight": torch.ones(97, 32)},
            "has another weight for lm_head than the base model",
        ),
        (
            {f"{PREFIX}model.norm.weight": torch.ones(32)},
            "of modules that the adapter does not change: got .*model.norm.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message, tmp_path):
    decoder, folder = saved(tmp_path)
    changed(folder, **tensors)
    with pytest.raises(OptionError, match=message):
        AdapterFile.read("some", folder).updates(decoder.model)


def test_copies_of_the_base_model_are_passed_over(tmp_path):
    """peft saves them if an adapter changes embedding or head."""
    decoder, folder = saved(tmp_path)
    weights = {
        f"{PREFIX}lm_head.base_layer.weight": decoder.head.weight.data.clone(),
        f"{PREFIX}model.embed_tokens.weight": decoder.embedding.weight.data.clone(),
    }
    changed(folder, **weights)
    assert len(AdapterFile.read("some", folder).updates(decoder.model)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["c_attn"]}, r"changes no module of the model: got .*'c_attn'"),
        ({"target_modules": ["mlp", "q_proj"]}, "kind that is not supported: got LlamaMLP at mod"),
        (
            {"target_modules": ["embed_tokens"], "use_dora": True},
            "got Embedding at model.embed_tokens with use_dora, expected linear layers",
        ),
        ({"r": 2}, r"got \[4, 32\] for .*, expected \[2, 32\]"),
        ({"use_dora": True}, "lacks a matrix .*lora_magnitude_vector"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lacks a matrix .*v_proj.lora_A.weight"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(options, message, tmp_path):
    decoder, folder = saved(tmp_path, **options)
    with pytest.raises(OptionError, match=message):
        AdapterFile.read("some", folder).updates(decoder.model)


def test_folders_and_names(tmp_path):
    _, folder = saved(tmp_path / "some")
    assert [file.name for file in read_adapters([("a", folder), ("b_2", folder)])] == ["a", "b_2"]
    with pytest.raises(OptionError, match=r"two adapters have the same name: got 'a'\. Name them"):
        read_adapters([("a", folder), ("a", folder)])
    for name in ("", "a-b", "ü", "a.b"):
        with pytest.raises(OptionError, match="cannot be part of a method's name"):
            read_adapters([(name, folder)])
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OptionError, match="cannot read an adapter from"):
        read_adapters([("a", folder)])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"not an adapter .* expected a file adapter_model"):
        read_adapters([("a", folder)])
    with pytest.raises(OptionError, match=r"nowhere is not an adapter .* adapter_config.json"):
        read_adapters([("a", tmp_path / "nowhere")])


def test_a_module_that_uses_its_weight_otherwise_is_refused(tmp_path):
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Doubled
    folder = save_adapter(tmp_path, model, matrices(model, ("q_proj",)))
    decoder = Decoder(model, context=64)
    with pytest.raises(LoweringError, match=r"computes something else with adapter 'some': got"):
        fit_adapter(decoder, AdapterFile.read("some", folder))
    assert not any(isinstance(module, LowRankLinear) for module in decoder.modules())


def branch(decoder: Decoder, file: AdapterFile) -> LowRankLinear:
    adapter = fit_adapter(decoder, file)
    module = adapter.modules[Q.removeprefix(PREFIX)]
    assert isinstance(module, LowRankLinear)
    return module


@pytest.mark.parametrize("factor", [2.0**18, 2.0**-18])
def test_matrices_of_different_sizes_fit_fp16(factor, tmp_path):
    """A times B counts; A or B alone may overflow or vanish."""
    decoder, folder = saved(tmp_path)
    file = AdapterFile.read("some", folder)
    expected = branch(decoder, file)
    scaled = {
        key: tensor * (factor if "lora_A" in key[1] else 1 / factor)
        for key, tensor in file.tensors.items()
    }
    actual = branch(decoder, dataclasses.replace(file, tensors=scaled))
    assert torch.equal(actual.down, expected.down)
    assert torch.equal(actual.up, expected.up)
    down, up = (scaled[Q.removeprefix(PREFIX), f"lora_{part}.weight"] for part in "AB")
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    exact = actual.base(x) + 2 * (x @ down.t() @ up.t())
    atol, rtol = ATOL_RTOL["fp16"]
    halved = nn.functional.linear(
        nn.functional.linear(x.half(), actual.down.half()), actual.up.half()
    )
    torch.testing.assert_close(actual.base(x) + halved, exact, atol=atol, rtol=2 * rtol)
    plain = x.half() @ down.half().t() @ up.half().t()
    assert not torch.allclose((2 * plain).float(), exact - actual.base(x), atol=atol, rtol=rtol)


def test_ranks_without_values_stay_zero(tmp_path):
    """B is zero in an adapter that is not trained."""
    decoder, folder = saved(tmp_path)
    changed(folder, **{f"{Q}.lora_B.weight": torch.zeros(32, 4)})
    made = branch(decoder, AdapterFile.read("some", folder))
    assert torch.equal(made.up, torch.zeros(32, 4))
    assert made.down.isfinite().all()


def test_half_precision_is_read_as_fp32(tmp_path):
    decoder, folder = saved(tmp_path)
    stored = load_file(folder / "adapter_model.safetensors")
    halved = {name: tensor.bfloat16() for name, tensor in stored.items()}
    save_file(halved, folder / "adapter_model.safetensors")
    updates = AdapterFile.read("some", folder).updates(decoder.model)
    assert all(isinstance(update, Update) for update in updates.values())
    assert {update.down.dtype for update in updates.values()} == {torch.float32}
