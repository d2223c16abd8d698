"""``validate`` refuses annotations of any quantizer that torchao or Core ML cannot use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.quantization import config, exported
from torch import nn
from torchao.quantization.pt2e.observer import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from coreml_delegate.errors import LoweringError, ProgramError, UnsupportedOperatorError
from coreml_delegate.quantizer import CoreMLQuantizer

X = (torch.linspace(-1, 1, 8).reshape(2, 4),)
UINT8 = QuantizationSpec(torch.uint8, MinMaxObserver, qscheme=torch.per_tensor_affine)
CHANNELS = QuantizationSpec(
    torch.int8, PerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.cumsum(self.linear(x) + x, 1)
        return y * y, (x > 0).int() + 1


@pytest.fixture
def graph():
    return exported(Model().eval(), X)


def _nodes(graph):
    return {node.name: node for node in graph.graph.nodes}


def _annotate(node, inputs=None, output=None):
    node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs or {}, output)


def test_our_annotations_are_valid(graph):
    quantizer = CoreMLQuantizer(config())
    quantizer.validate(quantizer.annotate(graph))


def test_a_graph_without_annotations_is_valid(graph):
    CoreMLQuantizer(config()).validate(graph)


# name -> (what is annotated and how, what is said)
UNSOUND = {
    "integers": (lambda n: _annotate(n["add_1"], output=UINT8), "it is int32, not float32"),
    "circle": (
        lambda n: (
            _annotate(n["linear"], output=SharedQuantizationSpec(n["add"])),
            _annotate(n["add"], output=SharedQuantizationSpec(n["linear"])),
        ),
        "its quantization is shared in a circle: linear -> add",
    ),
    "circle through an edge": (
        lambda n: _annotate(
            n["add"],
            {n["linear"]: SharedQuantizationSpec(n["add"])},
            SharedQuantizationSpec((n["linear"], n["add"])),
        ),
        r"in a circle: \(linear, add\) -> add",
    ),
    "circle of derived": (
        lambda n: _annotate(
            n["add"], output=DerivedQuantizationSpec([n["add"]], tuple, torch.uint8, 0, 255)
        ),
        "in a circle: add",
    ),
    "nothing to share": (
        lambda n: _annotate(n["add"], {n["linear"]: SharedQuantizationSpec(n["linear"])}),
        "linear into add: it shares the quantization of linear, which has none",
    ),
    "not an input": (
        lambda n: _annotate(n["add"], {n["mul"]: UINT8}),
        "mul into add: add does not take it",
    ),
    "16 bits": (
        lambda n: _annotate(n["add"], output=dataclasses.replace(UINT8, dtype=torch.int16)),
        "the result of add: Core ML quantizes to int8 and uint8, not int16",
    ),
    "dynamic": (
        lambda n: _annotate(n["add"], output=dataclasses.replace(UINT8, is_dynamic=True)),
        "Core ML has no dynamic quantization",
    ),
    "beyond the type": (
        lambda n: _annotate(
            n["linear"], {n["linear_weight"]: dataclasses.replace(UINT8, quant_min=-1, quant_max=9)}
        ),
        r"\(-1, 9\) is beyond uint8",
    ),
    "narrow activation": (
        lambda n: _annotate(
            n["add"], output=dataclasses.replace(UINT8, quant_min=0, quant_max=127)
        ),
        "an activation has the range 0 to 255, not 0 to 127",
    ),
    "channels of an activation": (
        lambda n: _annotate(n["add"], output=CHANNELS),
        "an activation is quantized per channel",
    ),
    "no such axis": (
        lambda n: _annotate(
            n["linear"], {n["linear_weight"]: dataclasses.replace(CHANNELS, ch_axis=2)}
        ),
        "linear_weight into linear: axis 2 of a tensor of rank 2",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_invalid_annotations_are_refused(graph, name):
    annotate, message = UNSOUND[name]
    annotate(_nodes(graph))
    with pytest.raises(LoweringError, match=message):
        CoreMLQuantizer(config()).validate(graph)


@pytest.mark.parametrize("name", ["cumsum", "x"])
def test_operators_that_core_ml_does_not_quantize_are_refused(graph, name):
    _annotate(_nodes(graph)[name], output=UINT8)
    with pytest.raises(UnsupportedOperatorError, match=f"quantized: got {name}"):
        CoreMLQuantizer(config()).validate(graph)


def test_all_problems_are_counted_and_the_first_are_listed(graph):
    dynamic = dataclasses.replace(UINT8, is_dynamic=True, dtype=torch.int16)
    for name in ("linear", "add", "mul"):
        _annotate(_nodes(graph)[name], output=dynamic)
    with pytest.raises(LoweringError, match=r"6 annotations .*; and 1 more"):
        CoreMLQuantizer(config()).validate(graph)


class _Dynamic(Quantizer):
    def annotate(self, model):
        for node in model.graph.nodes:
            if node.name == "linear":
                _annotate(node, output=dataclasses.replace(UINT8, is_dynamic=True))
        return model

    def validate(self, model):
        pass


def test_another_quantizers_mistake_is_found(graph):
    quantizer = CoreMLQuantizer(config())
    ComposableQuantizer([_Dynamic(), quantizer]).annotate(graph)
    with pytest.raises(LoweringError, match="no dynamic quantization"):
        quantizer.validate(graph)


def test_no_report_before_a_model_is_prepared():
    with pytest.raises(ProgramError, match="no report yet"):
        _ = CoreMLQuantizer(config()).report
