"""Layers that get more bits, so that a text keeps its perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from llm.test_families import CONTEXT, model
from llm.test_standard_layout import prompt
from support.tolerances import PERPLEXITY_FP32

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.bit_budget import assign_bits
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.evaluation import perplexity
from coreml_delegate.llm.export import linear_layers, quantize_weights
from coreml_delegate.quantization import QuantizationAssignment, mode_of

TEXT = prompt(2 * CONTEXT)
INT4, INT8 = mode_of("int4-group16"), mode_of("int8-channel")


@torch.no_grad()
def decoder() -> Decoder:
    """A model with three layers that 4 bits round most: each group has one large weight."""
    made = Decoder(model("llama"), context=CONTEXT)
    random = torch.Generator().manual_seed(0)
    for number, layer in enumerate(linear_layers(made).values()):
        weight = torch.randn(layer.weight.shape, generator=random) / layer.in_features**0.5
        if number % 5 == 1:
            weight[:, ::16] *= 12
        layer.weight = torch.nn.Parameter(2 * weight, requires_grad=False)
    return made


@torch.no_grad()
def measured(rules: QuantizationAssignment | None, tokens: Sequence[int] = TEXT) -> float:
    """The perplexity with quantized weights, in windows of the context."""
    made = decoder()
    quantize_weights(made, linear=rules)
    predict = lambda text, count: [made(torch.tensor([list(text)]))[0, -count:]]  # noqa: E731
    return perplexity(predict, tokens, context=CONTEXT)


def test_as_few_layers_as_suffice_get_more_bits():
    float_value, lowest = measured(None), measured(QuantizationAssignment(INT4))
    assert lowest != pytest.approx(float_value, rel=0.01)
    highest = measured(QuantizationAssignment(INT8))
    budget = max(highest, math.sqrt(highest * lowest))
    made = decoder()
    before = {path: layer.weight.clone() for path, layer in linear_layers(made).items()}
    result = assign_bits(made, TEXT, budget, INT4)
    for path, layer in linear_layers(made).items():
        assert torch.equal(layer.weight, before[path])
    assert result.in_float == pytest.approx(float_value, rel=PERPLEXITY_FP32)
    assert result.quantized <= budget
    assert measured(result.assignment) == pytest.approx(result.quantized, rel=PERPLEXITY_FP32)
    finer = sorted(result.assignment.modules, key=lambda path: -result.losses[path])
    assert 0 < len(finer) < len(before)
    assert set(result.assignment.modules.values()) == {INT8}
    assert finer == sorted(result.losses, key=lambda path: -result.losses[path])[: len(finer)]
    fewer = QuantizationAssignment(INT4, dict.fromkeys(finer[:-1], INT8))
    assert measured(fewer) > budget


def test_a_budget_that_few_bits_keep_changes_nothing():
    result = assign_bits(decoder(), TEXT, math.inf, INT4)
    assert result.assignment == QuantizationAssignment(INT4)


def test_budgets_out_of_reach_are_refused():
    with pytest.raises(OptionError, match=r"int8-channel do not keep the perplexity: got "):
        assign_bits(decoder(), TEXT, 1.0, INT4)
    with pytest.raises(OptionError, match="needs a mode with a finer one: got int8-channel"):
        assign_bits(decoder(), TEXT, 100.0, INT8)
