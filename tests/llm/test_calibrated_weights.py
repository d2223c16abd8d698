"""Linear layers whose weights are chosen with a calibration text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llm.test_families import CHUNK, CONTEXT, PROMPT, model
from support.checkpoints import CONFIG
from support.lowering import fp32_specs
from support.tolerances import logits_bounds

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.llm.calibrated_weights import METHODS, calibrate_weights
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, linear_layers, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.quantization.weight_inventory import weights_of
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.delegates import partitions_of
from coreml_delegate.scripts.quantization_options import CALIBRATED
from coreml_delegate.targets import Opset

GROUP = 16
TEXT = torch.randint(
    CONFIG["vocab_size"], (400,), generator=torch.Generator().manual_seed(3)
).tolist()


def decoder(name: str = "llama") -> Decoder:
    return Decoder(model(name), context=CONTEXT)


def inputs_of(made: Decoder, layer: Any) -> np.ndarray[Any, Any]:
    """Return the inputs of a layer at each token of the text, in fp64: [tokens, inputs]."""
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for start in range(0, len(TEXT), CONTEXT):
            made(torch.tensor([TEXT[start : start + CONTEXT]]))
    handle.remove()
    return np.concatenate([x.reshape(-1, x.shape[-1]).double().numpy() for x in seen])


def rounded(weight: np.ndarray[Any, Any], group: int) -> np.ndarray[Any, Any]:
    """The nearest of 16 equal steps, with a scale per group of inputs."""
    groups = weight.reshape(len(weight), -1, group)
    scale = 2 * np.abs(groups).max(-1, keepdims=True) / 15
    return (np.clip(np.round(groups / scale), -8, 7) * scale).reshape(weight.shape)


def test_the_command_has_the_modes():
    assert tuple(METHODS) == CALIBRATED


def test_gptq_keeps_the_results_of_layers_better_than_rounding():
    made = decoder()
    layers = linear_layers(made)
    # The first block reads the same values before and after.
    names = [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v")]
    x = inputs_of(made, layers[names[0]])
    before = {name: layers[name].weight.detach().double().numpy() for name in names}
    calibrate_weights(made, "gptq-4", TEXT, group=GROUP)
    for name, weight in before.items():
        compressed = layers[name].weight.detach().double().numpy()
        lost = np.square(x @ (compressed - weight).T).sum()
        assert lost < 0.8 * np.square(x @ (rounded(weight, GROUP) - weight).T).sum()
        steps = compressed.reshape(len(weight), -1, GROUP)
        assert max(len(np.unique(group)) for row in steps for group in row) <= 16


def test_skm_has_16_values_for_a_group_of_outputs():
    made = decoder()
    calibrate_weights(made, "skm-4", TEXT, group=GROUP)
    for layer in linear_layers(made).values():
        rows = layer.weight.detach().reshape(-1, GROUP, layer.in_features)
        assert max(len(torch.unique(group)) for group in rows) <= 16
        assert not layer.weight.requires_grad
        assert layer.weight.grad is None


@pytest.mark.parametrize("mode", ["gptq-4", pytest.param("skm-4", marks=pytest.mark.slow)])
@torch.no_grad()
def test_programs_store_and_compute_with_the_weights(mode):
    made = decoder()
    calibrate_weights(made, mode, TEXT, group=GROUP)
    expected = made(torch.tensor([PROMPT]))[0, -1]
    layout = Layout(CONFIG["vocab_size"], CONTEXT, CHUNK, CacheKind.BUFFER, standard=True)
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs)
    manager = lower(export_methods(made, layout), layout, partitioner)
    atol, rtol = logits_bounds(expected)
    for engine in ("openvino", "reference"):
        actual = Generator.load(manager.buffer, engine=engine).feed(PROMPT)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    program = PteProgram.open(manager.buffer)
    (partition,) = partitions_of(program, program.method("forward"))
    stored = [weight.stored_as for weight in weights_of(read_blob(partition.blob)[0])]
    assert stored.count("uint4") == len(linear_layers(made))


@pytest.mark.parametrize(
    ("name", "mode", "tokens", "group", "error", "message"),
    [
        ("llama", "gptq-3", TEXT, GROUP, OptionError, "gptq-4 or skm-4"),
        ("llama", "gptq-4", TEXT, 24, OptionError, "do not divide model.layers.0.self_attn.q_proj"),
        ("llama", "skm-4", TEXT, 24, OptionError, "do not divide model.layers.0.self_attn.q_proj"),
        ("llama", "gptq-4", TEXT[:15], GROUP, InputError, "got 15 tokens, expected 16 or more"),
        ("llama", "gptq-4", [*TEXT, 5000], GROUP, OptionError, "got token 5000"),
        ("mixtral", "gptq-4", TEXT, GROUP, OptionError, "does not calibrate experts"),
    ],
)
def test_bad_input_is_refused_before_weights_change(name, mode, tokens, group, error, message):
    made = decoder(name)
    before = {key: value.clone() for key, value in made.state_dict().items()}
    with pytest.raises(error, match=message):
        calibrate_weights(made, mode, tokens, group=group)
    after = made.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
