"""The patterns that the quantizer finds in exported graphs, and their annotations."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from support.quantization import annotated, config, exported, prepare_pt2e, quantized
from torch import nn
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from coreml_delegate.ops.constants import attribute_constants
from coreml_delegate.ops.quantization import DATA_ARGUMENTS
from coreml_delegate.quantizer import CoreMLQuantizer
from coreml_delegate.quantizer.annotate import mark_of
from coreml_delegate.quantizer.patterns import BY_OP
from coreml_delegate.quantizer.qspec import annotation_of


def x(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


class Call(nn.Module):
    """A function of inputs and of layers by name."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, made in layers.items():
            setattr(self, name, made)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _sequence(*layers):
    return nn.Sequential(*layers).eval()


IMAGE = (x(1, 4, 6, 6),)
ROWS = (x(2, 4),)

# Node names and the patterns that they are part of.
FOUND = {
    "conv1d": (nn.Conv1d(4, 3, 3), (x(1, 4, 6),), {"conv1d": "conv"}),
    "conv2d": (nn.Conv2d(4, 3, 3), IMAGE, {"conv2d": "conv"}),
    "conv3d": (nn.Conv3d(4, 3, 3), (x(1, 4, 4, 4, 4),), {"conv3d": "conv"}),
    "conv-padding": (nn.Conv2d(4, 3, 3, padding="same"), IMAGE, {"conv2d": "conv"}),
    "conv_transpose1d": (
        nn.ConvTranspose1d(4, 3, 3),
        (x(1, 4, 6),),
        {"conv_transpose1d": "conv_transpose"},
    ),
    "conv_transpose2d": (
        _sequence(nn.ConvTranspose2d(4, 3, 3), nn.ReLU()),
        IMAGE,
        {"conv_transpose2d": "conv_transpose-act", "relu": "conv_transpose-act"},
    ),
    "conv_transpose3d": (
        nn.ConvTranspose3d(4, 3, 3),
        (x(1, 4, 4, 4, 4),),
        {"conv_transpose3d": "conv_transpose"},
    ),
    "conv-bn-act": (
        _sequence(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU6(inplace=True)),
        IMAGE,
        {"conv2d": "conv-bn-act", "batch_norm": "conv-bn-act", "hardtanh_": "conv-bn-act"},
    ),
    "conv-bn": (
        _sequence(nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3)),
        (x(1, 4, 6),),
        {"conv1d": "conv-bn", "batch_norm": "conv-bn"},
    ),
    "linear-act": (
        _sequence(nn.Linear(4, 3), nn.GELU()),
        ROWS,
        {"linear": "linear-act", "gelu": "linear-act"},
    ),
    "linear-bn-act": (
        _sequence(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.SiLU()),
        ROWS,
        {"linear": "linear-bn-act", "batch_norm": "linear-bn-act", "silu": "linear-bn-act"},
    ),
    "embedding": (
        nn.Embedding(5, 4),
        (torch.tensor([[0, 3]]),),
        {"embedding": "embedding"},
    ),
    "matmul": (Call(lambda _, a, b: a @ b), (x(2, 3), x(3, 4)), {"matmul": "matmul"}),
    "bmm-act": (
        Call(lambda _, a, b: torch.bmm(a, b).relu()),
        (x(2, 3, 4), x(2, 4, 3)),
        {"bmm": "matmul-act", "relu": "matmul-act"},
    ),
    "mm": (Call(lambda _, a, b: torch.mm(a, b)), (x(2, 3), x(3, 4)), {"mm": "matmul"}),
    "add-act": (
        Call(lambda _, a, b: (a + b).relu_()),
        (*ROWS, *ROWS),
        {"add": "add-act", "relu_": "add-act"},
    ),
    "add-number": (Call(lambda _, a: a + 1), ROWS, {"add": "add"}),
    "add-in-place": (
        Call(lambda m, a: operator.iadd(m.linear(a), a), linear=nn.Linear(4, 4)),
        ROWS,
        {"linear": "linear", "add_": "add"},
    ),
    "mul": (Call(lambda _, a, b: a * b), (*ROWS, *ROWS), {"mul": "mul"}),
    "cat": (Call(lambda _, a, b: torch.cat([a, b])), (*ROWS, *ROWS), {"cat": "cat"}),
    "stack": (Call(lambda _, a, b: torch.stack([a, b])), (*ROWS, *ROWS), {"stack": "cat"}),
    "avg_pool": (nn.AvgPool2d(2), IMAGE, {"avg_pool2d": "average_pool"}),
    "adaptive": (nn.AdaptiveAvgPool1d(2), (x(1, 4, 6),), {"adaptive_avg_pool1d": "average_pool"}),
    "mean": (Call(lambda _, a: a.mean((2, 3))), IMAGE, {"mean": "average_pool"}),
    "softmax": (nn.Softmax(-1), ROWS, {"softmax": "softmax"}),
    "sigmoid-alone": (nn.Sigmoid(), ROWS, {"sigmoid": "activation"}),
    "max_pool": (
        _sequence(nn.Conv2d(4, 3, 3), nn.MaxPool2d(2), nn.Flatten()),
        IMAGE,
        {"conv2d": "conv", "max_pool2d": "move", "flatten": "move"},
    ),
    "activation": (
        _sequence(nn.AvgPool2d(2), nn.ReLU()),
        IMAGE,
        {"avg_pool2d": "average_pool", "relu": "activation"},
    ),
    "pad": (
        Call(lambda m, a: F.pad(m.conv(a), (1, 1)), conv=nn.Conv2d(4, 3, 3)),
        IMAGE,
        {"conv2d": "conv", "pad": "pad"},
    ),
    "attention": (
        Call(lambda _, q, k, v: torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v),
        (x(1, 3, 4),) * 3,
        {"matmul": "matmul", "softmax": "softmax", "matmul_1": "matmul"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_patterns_are_found(name):
    module, inputs, expected = FOUND[name]
    quantizer, graph = annotated(module, inputs)
    found = {n.name: n.pattern for n in quantizer.report.quantized}
    assert found == expected
    for node in graph.graph.nodes:
        if node.name in expected:
            mark = mark_of(node)
            assert mark is not None
            assert mark.pattern == expected[node.name]


# Node names and why they are not quantized.
LEFT = {
    "integers": (Call(lambda _, a: (a + a).float()), (torch.arange(4),), {"to": "no pattern for"}),
    "half": (
        nn.Linear(4, 3, dtype=torch.float16),
        (x(2, 4).half(),),
        {"linear": "'input_1' is float16, only float32 is quantized"},
    ),
    "computed weight": (
        Call(lambda _, a, w: F.linear(a, w)),
        (x(2, 4), x(3, 4)),
        {"linear": "its weight is computed, not a parameter"},
    ),
    "moved float": (
        Call(lambda _, a: a.reshape(4, 2)),
        ROWS,
        {"reshape": "is not quantized"},
    ),
    "activation of a float": (nn.GELU(), ROWS, {"gelu": "is not quantized"}),
    "padded with a number": (
        Call(lambda m, a: F.pad(m.linear(a), (1, 1), value=9.0), linear=nn.Linear(4, 3)),
        ROWS,
        {"pad": "it pads with 9.0"},
    ),
    "windows": (
        Call(
            lambda m, a: (
                m.conv(a).reshape(1, 2, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(4, 4, 2)
            ),
            conv=nn.Conv2d(4, 2, 3),
        ),
        IMAGE,
        {
            "reshape": "'reshape' has rank 6, Core ML takes 5",
            "permute": "'reshape' has rank 6",
            "reshape_1": "'permute' has rank 6",
        },
    ),
    "norm alone": (nn.LayerNorm(4), ROWS, {"layer_norm": "no pattern for aten.layer_norm.default"}),
}


@pytest.mark.parametrize("name", LEFT)
def test_calls_left_in_float_have_a_reason(name):
    module, inputs, expected = LEFT[name]
    report = annotated(module, inputs)[0].report
    for node, reason in expected.items():
        record = report.node(node)
        assert not record.quantized
        assert record.reason is not None
        assert reason in record.reason


def _specs(module, inputs, settings=None):
    """Return the annotation of the node called ``name``."""
    _, graph = annotated(module, inputs, settings)
    return {n.name: (n, annotation_of(n)) for n in graph.graph.nodes}


def test_a_used_result_is_not_fused():
    module = Call(lambda m, a: (lambda y: y.relu() + y)(m.linear(a)), linear=nn.Linear(4, 4))
    found = {n.name: n.pattern for n in annotated(module, ROWS)[0].report.nodes}
    assert found == {"linear": "linear", "relu": "activation", "add": "add"}


def test_a_tensor_is_quantized_once():
    specs = _specs(_sequence(nn.Linear(4, 4), nn.Linear(4, 3)), ROWS)
    first, _ = specs["linear"]
    _, second = specs["linear_1"]
    assert second.input_qspec_map[first] == SharedQuantizationSpec(first)


@pytest.mark.parametrize(
    ("module", "inputs", "axis"),
    [
        (nn.Conv2d(4, 3, 3), IMAGE, 0),
        (nn.ConvTranspose2d(4, 3, 3), IMAGE, 1),
        (nn.Linear(4, 3), ROWS, 0),
        (nn.Embedding(5, 4), (torch.tensor([1]),), 0),
    ],
)
def test_channels_of_weights(module, inputs, axis):
    (spec,) = (
        spec
        for _, annotation in _specs(module, inputs).values()
        if annotation is not None
        for node, spec in annotation.input_qspec_map.items()
        if node.name == "weight"
    )
    assert spec.ch_axis == axis
    prepared = prepare_pt2e(
        torch.export.export(module, inputs).module(), annotated(module, inputs)[0]
    )
    prepared(*inputs)
    channels = {
        m.ch_axis: len(m.scale) for m in prepared.modules() if getattr(m, "is_per_channel", 0)
    }
    assert channels == {axis: dict(module.named_parameters())["weight"].shape[axis]}


def test_symmetric_weights_have_a_symmetric_integer_range():
    _, annotation = _specs(nn.Linear(4, 3), ROWS)["linear"]
    spec = list(annotation.input_qspec_map.values())[1]
    assert (spec.quant_min, spec.quant_max) == (-127, 127)


@pytest.mark.parametrize(
    ("last", "scheme"),
    [
        (nn.ReLU(), torch.per_tensor_affine),
        (nn.ReLU6(), torch.per_tensor_affine),
        (nn.Hardtanh(0.0, 2.0), torch.per_tensor_affine),
        (nn.Hardtanh(-1.0, 2.0), torch.per_tensor_symmetric),
        (nn.GELU(), torch.per_tensor_symmetric),
        (nn.Sequential(nn.ReLU(), nn.AvgPool1d(2)), torch.per_tensor_affine),
        (nn.Sequential(nn.GELU(), nn.AvgPool1d(2)), torch.per_tensor_symmetric),
    ],
)
def test_tensors_without_negative_values_use_all_integers(last, scheme):
    quantizer, graph = annotated(_sequence(nn.Linear(4, 4), last), ROWS)
    name = quantizer.report.nodes[-1].name
    (node,) = (n for n in graph.graph.nodes if n.name == name)
    annotation = annotation_of(node)
    assert annotation is not None
    assert isinstance(annotation.output_qspec, QuantizationSpec)
    assert annotation.output_qspec.qscheme == scheme


@pytest.mark.parametrize(
    ("function", "scale", "zero_point"),
    [
        (torch.sigmoid, 1 / 256, 0),
        (F.hardsigmoid, 1 / 256, 0),
        (torch.tanh, 2 / 256, 128),
        (lambda t: torch.softmax(t, -1), 1 / 256, 0),
    ],
)
def test_fixed_ranges(function, scale, zero_point):
    module = Call(lambda m, a: function(m.linear(a)), linear=nn.Linear(4, 4))
    specs = _specs(module, ROWS)
    (fixed,) = (
        a.output_qspec
        for _, a in specs.values()
        if a is not None and isinstance(a.output_qspec, FixedQParamsQuantizationSpec)
    )
    assert fixed.scale == scale
    assert fixed.zero_point == zero_point


def test_ops_that_move_data_have_the_range_of_their_input():
    specs = _specs(_sequence(nn.Conv2d(4, 3, 3), nn.MaxPool2d(2)), IMAGE)
    conv, _ = specs["conv2d"]
    _, pooled = specs["max_pool2d"]
    assert pooled.input_qspec_map == {conv: SharedQuantizationSpec(conv)}
    assert isinstance(pooled.output_qspec, DerivedQuantizationSpec)
    assert pooled.output_qspec.derived_from == [conv]


def test_parts_of_a_split_have_the_range_of_the_whole():
    module = Call(lambda m, a: torch.cat(m.conv(a).chunk(2, 1)[::-1]), conv=nn.Conv2d(4, 4, 3))
    _, converted = quantized(module, IMAGE, config())
    grids = {
        node.args[1:3]
        for node in converted.graph.nodes
        if "quantized_decomposed.quantize_per_tensor" in str(node.target)
        and node.args[0].name in ("conv2d", "getitem", "getitem_1")
    }
    assert len(grids) == 1


def test_scalars_are_left_as_they_are():
    module = Call(lambda m, a: a * m.scale)
    module.scale = nn.Parameter(torch.tensor(0.5))
    _, annotation = _specs(module, ROWS)["mul"]
    assert [n.name for n, spec in annotation.input_qspec_map.items() if spec is None] == ["scale"]


def test_only_weights_are_quantized_if_activations_stay_in_float():
    module = _sequence(nn.Embedding(5, 4), nn.Linear(4, 3), nn.ReLU())
    report = annotated(module, (torch.tensor([1]),), config(activation_dtype=torch.float32))[
        0
    ].report
    assert {n.name: (n.weight is not None, n.output) for n in report.quantized} == {
        "embedding": (True, None),
        "linear": (True, None),
        "relu": (False, None),
    }


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("activation", [torch.float32, torch.quint8])
def test_tied_weights_are_quantized_alike(activation):
    inputs = (torch.tensor([[0, 4, 2]]),)
    module = Tied().eval()
    _, converted = quantized(module, inputs, config(activation_dtype=activation))
    torch.testing.assert_close(converted(*inputs), module(*inputs), atol=0.1, rtol=0.05)


def test_a_layer_may_be_called_twice():
    module = Call(lambda m, a: m.linear(m.linear(a)), linear=nn.Linear(4, 4)).eval()
    _, converted = quantized(module, ROWS, config())
    torch.testing.assert_close(converted(*ROWS), module(*ROWS), atol=0.05, rtol=0.05)


def test_annotations_of_another_quantizer_are_kept():
    graph = exported(_sequence(nn.Linear(4, 4), nn.Linear(4, 3)), ROWS)
    (first,) = (n for n in graph.graph.nodes if n.name == "linear")
    foreign = QuantizationAnnotation(_annotated=True)
    first.meta[Q_ANNOTATION_KEY] = foreign
    quantizer = CoreMLQuantizer(config())
    quantizer.annotate(graph)
    assert first.meta[Q_ANNOTATION_KEY] is foreign
    assert quantizer.report.node("linear").reason == "another quantizer annotated it"
    assert quantizer.report.node("linear_1").quantized


def test_the_table_names_operators_that_exist():
    for name in BY_OP:
        _, op, overload = name.split(".")
        assert overload in getattr(torch.ops.aten, op).overloads()


def test_weights_and_data_of_the_table_are_arguments():
    for name, quantization in BY_OP.items():
        _, op, overload = name.split(".")
        schema = getattr(getattr(torch.ops.aten, op), overload)._schema
        arguments = {a.name for a in schema.arguments}
        assert quantization.lower_bound in {None, 0.0, *arguments}
        for pattern in quantization.patterns:
            assert pattern.weight is None or pattern.weight in arguments - set(pattern.data)
            assert pattern.data == DATA_ARGUMENTS or arguments.issuperset(pattern.data)


MATRIX = nn.Parameter(torch.rand(4, 3))
STACK = nn.Parameter(torch.rand(2, 4, 3))
PRODUCTS = {
    "addmm": (lambda m, a: torch.addmm(a[0, :3], a, m.matrix).relu(), ROWS, "linear-act"),
    "mm": (lambda m, a: torch.mm(a, m.matrix), ROWS, "linear"),
    "matmul": (lambda m, a: a @ m.matrix, (x(2, 5, 4),), "linear"),
    "of a transposed matrix": (lambda m, a: a @ m.matrix.T.clone().T, ROWS, "linear"),
    "of a matrix in front": (lambda m, a: m.matrix @ a, (x(3, 5),), "matmul"),
    "of several matrices": (lambda m, a: a @ m.stack, (x(2, 5, 4),), "matmul"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_a_matrix_of_parameters(name):
    function, inputs, pattern = PRODUCTS[name]
    module = Call(function)
    module.matrix, module.stack = MATRIX, STACK
    report = annotated(module, inputs)[0].report
    (record,) = (n for n in report.quantized if n.name in ("addmm", "mm", "matmul"))
    assert record.pattern == pattern
    of_columns = "int8 symmetric per channel of axis 1"
    assert record.weight == (of_columns if pattern.startswith("linear") else None)
    assert len(record.inputs) == (1 if pattern.startswith("linear") else 2)


def test_columns_that_are_computed():
    module = Call(lambda _, a: torch.addmm(a[0], a, a))
    record = annotated(module, (x(4, 4),))[0].report.node("addmm")
    assert record.reason == "its weight is computed, not a parameter"


def test_constants_of_a_deep_graph():
    graph = torch.fx.Graph()
    known, given = graph.get_attr("weight"), graph.placeholder("x")
    first = known
    for _ in range(3000):
        known = graph.call_function(torch.ops.aten.tanh.default, (known,))
        given = graph.call_function(torch.ops.aten.tanh.default, (given,))
    found = attribute_constants(graph)
    assert len(found) == 3001
    assert {first, known} <= found
    assert given not in found
