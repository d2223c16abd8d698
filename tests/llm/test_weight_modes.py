"""Weights of a decoder in few bits: a mode for all layers, and modes by path."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from llm.test_families import CHUNK, CONTEXT, PROMPT, model
from support.checkpoints import CONFIG
from support.lowering import fp32_specs
from support.tolerances import logits_bounds
from torch import nn

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower, quantize_weights
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.quantization import QuantizationAssignment, mode_of
from coreml_delegate.targets import Opset

RULES = QuantizationAssignment(
    mode_of("int4-channel"),
    {
        "model.layers.*.self_attn": mode_of("codebook-4-group8"),
        "model.layers.0.self_attn.q_proj": None,
        "model.layers.1.mlp.down_proj": mode_of("int8-group16"),
    },
)
"""A Llama of two blocks has 7 layers with palettes, 6 with integers and 1 in float."""


def decoder() -> Decoder:
    return Decoder(model("llama"), context=CONTEXT)


def kinds(made: Decoder) -> Counter[str]:
    """Classes of the weights of the blocks' linear layers."""
    return Counter(
        type(module.weight.data).__name__
        for module in made.model.model.modules()
        if isinstance(module, nn.Linear)
    )


def test_rules_choose_the_mode_of_each_layer():
    made = decoder()
    quantize_weights(made, linear=RULES)
    assert kinds(made) == {
        "CodebookQuantizedTensor": 7,
        "IntxUnpackedToInt8Tensor": 6,
        "Tensor": 1,
    }
    attention, feed_forward = made.model.model.layers[1].self_attn, made.model.model.layers[1].mlp
    values: Any = attention.v_proj.weight
    assert values.codebook.shape[:3] == (values.shape[0] // 8, 1, 16)
    assert feed_forward.down_proj.weight.block_size == (1, 16)
    assert feed_forward.up_proj.weight.block_size == (1, feed_forward.up_proj.in_features)


@torch.no_grad()
def check_program(made: Decoder) -> None:
    """Lower a decoder; compare its logits on both engines with those of PyTorch."""
    expected = made(torch.tensor([PROMPT]))[0, -1]
    layout = Layout(CONFIG["vocab_size"], CONTEXT, CHUNK, CacheKind.BUFFER, standard=True)
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs)
    program = lower(export_methods(made, layout), layout, partitioner).buffer
    atol, rtol = logits_bounds(expected)
    for engine in ("openvino", "reference"):
        actual = Generator.load(program, engine=engine).feed(PROMPT)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_lowered_programs_compute_with_the_quantized_weights():
    made = decoder()
    quantize_weights(made, linear=RULES, embedding=mode_of("codebook-6"))
    check_program(made)


@pytest.mark.parametrize(
    ("linear", "embedding", "message"),
    [
        ("codebook-4-group24", None, "model.layers.0.self_attn.q_proj: .* no multiple of 24"),
        ("int4-group24", None, r"do not divide every layer: .* no multiple of 24.*; and 9 more"),
        (None, "int4-group24", "the embedding: 32 columns are no multiple of 24"),
    ],
)
def test_layers_that_groups_do_not_divide_are_named(linear, embedding, message):
    made = decoder()
    modes = [None if name is None else mode_of(name) for name in (linear, embedding)]
    layers = None if modes[0] is None else QuantizationAssignment(modes[0])
    with pytest.raises(OptionError, match=message):
        quantize_weights(made, linear=layers, embedding=modes[1])
    assert kinds(made) == {"Tensor": 14}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.layers.*.mlp.down_pro", "perhaps model.layers.1.mlp.down_proj"),
        ("model.embed_tokens", "--embedding-quantize is for embeddings"),
    ],
)
def test_rules_without_a_layer_are_refused(path, message):
    rules = QuantizationAssignment(mode_of("int4-channel"), {path: mode_of("int8-channel")})
    with pytest.raises(OptionError, match=message):
        quantize_weights(decoder(), linear=rules)
