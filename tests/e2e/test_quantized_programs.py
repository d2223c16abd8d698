"""Quantized models, from PyTorch to the running program."""

from __future__ import annotations

import copy

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.digits import BATCH, accuracy, all_images, digits, predictions, train, trained
from support.lowering import PRECISIONS, reasons
from support.partitioned import delegate_functions
from support.quantization import (
    LinearQuantizerConfig,
    config,
    convert_pt2e,
    exported,
    layer,
    prepare_pt2e,
    prepare_qat_pt2e,
    quantized,
)
from support.tolerances import QUANTIZED_STEPS, SQNR_FP32, SQNR_INT8, flips_allowed, sqnr_db
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, CoreMLQuantizer, runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset

ct = coremltools()
ENGINES = ("openvino", "reference")
WEIGHTS_ONLY = {"activation_dtype": torch.float32}


def _lowered(model, inputs, precision=Precision.FLOAT32, target=Opset.iOS17):
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(
            compute_precision=precision, minimum_deployment_target=target
        )
    )
    edge = to_edge_transform_and_lower(
        torch.export.export(model, inputs), partitioner=[partitioner]
    )
    assert reasons(partitioner.report) == {}
    assert len(partitioner.report.partitions) == 1
    return edge


def _run(edge, engine, inputs):
    program = runtime.load_program(edge.to_executorch().buffer, engine=engine)
    return program.run("forward", list(inputs))


def _digits_model(model):
    """The trained digits network, quantized with calibration on training images."""
    batches = [(batch,) for batch in digits().train.split(BATCH)[:6]]
    return quantized(copy.deepcopy(trained()), batches[0], config(**model), batches)


@pytest.fixture(scope="module", params=["static", "weights"])
def digits_model(request):
    settings = {} if request.param == "static" else WEIGHTS_ONLY
    return _digits_model(settings)


@pytest.mark.share(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_digits_are_recognized_as_by_the_quantized_model(digits_model, precision):
    quantizer, model = digits_model
    assert not [n for n in quantizer.report.unquantized if "leaves activations" not in n.reason]
    images = all_images()
    eager, expected = predictions(trained(), images), predictions(model, images)
    assert accuracy(eager) > 0.95, "the comparison means something"
    assert accuracy(expected) > accuracy(eager) - 0.01
    edge = _lowered(model, (digits().test[:BATCH],), precision)
    pte = edge.to_executorch().buffer
    for engine in ENGINES:
        program = runtime.load_program(pte, engine=engine)
        actual = predictions(lambda batch, run=program.run: run("forward", [batch])[0], images)
        assert int((actual != expected).sum()) <= flips_allowed(len(expected))


def test_weights_are_stored_as_integers_and_static_ops_quantized(digits_model):
    quantizer, model = digits_model
    (main,) = delegate_functions(_lowered(model, (digits().test[:BATCH],)))
    ops = [op.type for op in main.block.ops]
    assert ops.count("constexpr_affine_dequantize") == 3
    is_static = quantizer.report.node("conv2d").inputs != {}
    assert ("quantize" in ops) == is_static


def test_4_bit_weights_are_stored_in_4_bits():
    quantizer = CoreMLQuantizer(config(weight_dtype="qint4", **WEIGHTS_ONLY))
    prepared = prepare_pt2e(exported(nn.Linear(64, 64).eval(), (torch.rand(1, 64),)), quantizer)
    prepared(torch.rand(1, 64))
    model = convert_pt2e(prepared)
    inputs = (torch.rand(1, 64),)
    sizes = {}
    for target in (Opset.iOS17, Opset.iOS18):
        edge = _lowered(model, inputs, target=target)
        (actual,) = _run(edge, "reference", inputs)
        assert sqnr_db(model(*inputs).detach().numpy(), actual.numpy()) > SQNR_FP32
        sizes[target] = len(edge.to_executorch().buffer)
    # The weight has 4096 elements.
    assert sizes[Opset.iOS17] - sizes[Opset.iOS18] > 1500


def _trained_quantized(norms, epochs):
    """The digits network after quantization-aware training, and its quantizer."""
    data = digits()
    quantizer = CoreMLQuantizer(config(milestones=[0, 4, 24, 16]))
    model = copy.deepcopy(trained(norms=norms)).train()
    prepared = prepare_qat_pt2e(exported(model, (data.test[:BATCH],)), quantizer)
    schedule = quantizer.schedule(prepared)
    train(prepared, epochs, size=BATCH, rate=1e-4, before_step=schedule.step)
    assert schedule.steps > 24
    return move_exported_model_to_eval(prepared)


@pytest.mark.parametrize(
    "norms",
    [
        pytest.param(False, id="plain", marks=pytest.mark.slow),
        # torchao exports a hundred patterns to fold norms: 20 s.
        pytest.param(True, id="norms", marks=pytest.mark.slow),
    ],
)
def test_quantization_aware_training(norms):
    prepared = _trained_quantized(norms, epochs=2)
    images = all_images()
    eager = predictions(trained(norms=norms), images)
    simulated = predictions(prepared, images)
    assert accuracy(simulated) > accuracy(eager) - 0.01
    model = convert_pt2e(prepared)
    targets = {str(n.target) for n in model.graph.nodes}
    assert "aten.batch_norm.default" not in targets
    expected = predictions(model, images)
    assert int((simulated != expected).sum()) <= flips_allowed(len(expected))
    # In fp16 the scales are rounded as well: what that costs depends on the training's last digits.
    edge = _lowered(model, (digits().test[:BATCH],), Precision.FLOAT32)
    program = runtime.load_program(edge.to_executorch().buffer)
    actual = predictions(lambda batch: program.run("forward", [batch])[0], images)
    assert int((actual != expected).sum()) <= flips_allowed(len(expected))


class Attention(nn.Module):
    """One head of attention over tokens, written out, with a transposed convolution behind."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.up = nn.ConvTranspose1d(8, 4, 2, stride=2)

    def forward(self, tokens):
        x = self.tokens(tokens)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        mixed = torch.softmax(scores * 0.35, -1) @ self.value(x)
        gated = torch.tanh(self.norm(x + mixed)) * torch.sigmoid(mixed)
        left, right = self.up(gated.transpose(1, 2)).chunk(2, 1)
        joined = torch.cat([nn.functional.gelu(left), nn.functional.pad(right, (1, 1))], 2)
        return nn.functional.avg_pool1d(joined, 2).flatten(1)


class Columns(nn.Module):
    """Products by matrices whose columns give the outputs, as GPT-2 has them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(s) / 3) for s in ((6, 8), (8, 5)))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.first).relu() @ self.second


SETTINGS = {
    "default": {},
    "affine": {
        "quantization_scheme": "affine",
        "activation_observer": "min_max",
        "weight_observer": "min_max",
    },
    "unsigned, per tensor": {"weight_dtype": torch.quint8, "weight_per_channel": False},
    "activations alone": {"weight_dtype": torch.float32},
    "weights alone": WEIGHTS_ONLY,
}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


CASES = [
    pytest.param(Attention(), (torch.arange(10).reshape(2, 5),), {}, id="attention"),
    pytest.param(Columns(), (torch.rand(4, 6),), {}, id="columns"),
    pytest.param(Columns(), (torch.rand(4, 6),), WEIGHTS_ONLY, id="columns, weights alone"),
    *(pytest.param(Small(), (torch.rand(2, 2, 5, 5),), s, id=n) for n, s in SETTINGS.items()),
]


@pytest.mark.share(5)
@pytest.mark.parametrize(("module", "inputs", "settings"), CASES)
def test_the_program_equals_the_quantized_model(module, inputs, settings):
    _, model = quantized(module, inputs, config(**settings))
    expected = model(*inputs).detach()
    assert sqnr_db(module(*inputs).detach().numpy(), expected.numpy()) > SQNR_INT8
    edge = _lowered(model, inputs)
    for engine in ENGINES:
        (actual,) = _run(edge, engine, inputs)
        assert_within_steps(actual, expected)


def assert_within_steps(actual, expected):
    # Symmetric grids of eight bits: the largest value is 127 or 128 steps from zero.
    step = float(expected.abs().max()) / 127
    assert float((actual - expected).abs().max()) <= QUANTIZED_STEPS * step


def test_the_example_of_the_documentation():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).eval()
    sample_inputs = (torch.randn(1, 3, 32, 32),)

    static_8bit_config = ct.optimize.torch.quantization.LinearQuantizerConfig(
        global_config=ct.optimize.torch.quantization.ModuleLinearQuantizerConfig(
            quantization_scheme="symmetric",
            activation_dtype=torch.quint8,
            weight_dtype=torch.qint8,
            weight_per_channel=True,
        )
    )
    quantizer = CoreMLQuantizer(static_8bit_config)

    training_gm = torch.export.export(model, sample_inputs).module()

    prepared_model = prepare_pt2e(training_gm, quantizer)

    for calibration_sample in [torch.randn(1, 3, 32, 32)]:
        prepared_model(calibration_sample)

    quantized_model = convert_pt2e(prepared_model)

    et_program = to_edge_transform_and_lower(
        torch.export.export(quantized_model, sample_inputs),
        partitioner=[
            CoreMLPartitioner(
                compile_specs=CoreMLBackend.generate_compile_specs(
                    minimum_deployment_target=ct.target.iOS17
                )
            )
        ],
    ).to_executorch()

    expected = quantized_model(*sample_inputs).detach()
    (actual,) = runtime.load_program(et_program.buffer).run("forward", list(sample_inputs))
    assert_within_steps(actual, expected)


def test_a_missing_target_is_chosen():
    inputs = (torch.rand(1, 4),)
    _, model = quantized(nn.Linear(4, 3), inputs, config())
    edge = _lowered(model, inputs, target=None)
    (actual,) = _run(edge, "reference", inputs)
    assert_within_steps(actual, model(*inputs).detach())


def test_a_part_may_stay_in_float():
    names = {"0": None}
    inputs = (torch.rand(1, 4),)
    settings = LinearQuantizerConfig(layer(), module_name_configs=names)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    _, model = quantized(module, inputs, settings)
    (actual,) = _run(_lowered(model, inputs), "openvino", inputs)
    torch.testing.assert_close(actual, model(*inputs).detach(), atol=0.02, rtol=0.02)
