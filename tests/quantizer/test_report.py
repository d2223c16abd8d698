"""The quantizer's report: which calls are quantized and how, and why others are not."""

from __future__ import annotations

import json

import pytest
import torch
from support.quantization import annotated, config
from torch import nn

from coreml_delegate.errors import ProgramError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.act = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        y = self.pool(self.act(self.conv(x)))
        left, right = y.chunk(2, 1)
        return torch.sigmoid(left * right), self.norm(y)


@pytest.fixture(scope="module")
def report():
    return annotated(Net(), (torch.rand(1, 1, 8, 8),))[0].report


def test_records_describe_each_call(report):
    conv, act, pool = (report.node(name) for name in ("conv2d", "relu", "max_pool2d"))
    assert conv.op == "aten.conv2d.default"
    assert conv.module == "conv"
    assert conv.pattern == act.pattern == "conv-act"
    assert conv.config == "global_config"
    assert conv.weight == "int8 symmetric per channel of axis 0"
    assert conv.inputs == {"x": "uint8 symmetric per tensor"}
    assert (conv.output, conv.fused_into, act.fused_into) == (None, None, "conv2d")
    assert act.output == "uint8 affine per tensor"
    assert pool.output == "as relu"
    assert report.node("chunk").output == "as max_pool2d"
    assert report.node("sigmoid").output == "uint8 fixed, scale 0.00390625, zero point 0"
    norm = report.node("layer_norm")
    assert not norm.quantized
    assert norm.reason == "no pattern for aten.layer_norm.default"


def test_summaries(report):
    assert report.patterns == {"move": 2, "conv-act": 1, "mul-act": 1}
    assert [n.name for n in report.unquantized] == ["layer_norm"]
    assert len(report.quantized) + len(report.unquantized) == len(report.nodes)


def test_an_unknown_node_is_an_error(report):
    with pytest.raises(ProgramError, match="no such node in the report: got 'nothing'"):
        report.node("nothing")


def test_json(report):
    found = json.loads(report.to_json())
    assert found["schema_version"] == 1
    assert found["summary"] == {
        "nodes": 7,
        "quantized": 6,
        "patterns": {"move": 2, "conv-act": 1, "mul-act": 1},
    }
    assert found["nodes"][0]["name"] == "conv2d"
    assert found["nodes"][-1]["quantized"] is False


def test_table(report):
    lines = str(report).splitlines()
    assert lines[0] == "6 of 7 operations quantized"
    assert lines[1] == "  2 move, 1 conv-act, 1 mul-act"
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[2:]}
    assert rows["conv2d"] == (
        "conv2d conv-act conv x uint8 symmetric per tensor; "
        "weight int8 symmetric per channel of axis 0"
    )
    assert rows["relu"] == "relu conv-act act result uint8 affine per tensor"
    assert rows["max_pool2d"] == "max_pool2d move pool result as relu"
    assert rows["layer_norm"] == "layer_norm - norm no pattern for aten.layer_norm.default"


def test_bits_of_weights():
    quantizer, _ = annotated(nn.Linear(4, 3), (torch.rand(2, 4),), config(weight_dtype="qint4"))
    assert quantizer.report.node("linear").weight == "4-bit int8 symmetric per channel of axis 0"


def test_an_empty_graph():
    quantizer, _ = annotated(nn.Identity(), (torch.rand(2),))
    assert quantizer.report.to_table() == "0 of 0 operations quantized"
