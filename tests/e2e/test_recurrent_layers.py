"""Recurrent layers: one op or loop for all steps, for any number of steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.failing_conversions import MESSAGE, fail_as_a_whole, fresh_trials
from support.lowering import Lowered, fp32_specs, lower, lower_unchecked, reasons
from support.partitioned import assert_equal_eager, delegate_functions
from support.tolerances import ATOL_RTOL, SQNR_FP16, SQNR_FP32, sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, dynamic_steps, runtime
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.opaque_ops.recurrent_layers import PLACEHOLDER_OPS
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime.mil.program import Block
from coreml_delegate.targets import Opset

pytestmark = [
    # torch.export says so of every recurrent module, whose list of weights is an attribute.
    pytest.mark.filterwarnings("ignore:The tensor attributes? self"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

ATOL, RTOL = ATOL_RTOL["fp32"]
ENGINES = ("reference", "openvino")
FORM = {"batch_first": True, "bidirectional": True}
LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected lstm": functools.partial(nn.LSTM, proj_size=3),
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
}


class Steps(nn.Module):
    """A layer and an operator that Core ML lacks."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, last = self.layer(torch.asinh(x))
        return hidden, *(last if isinstance(last, tuple) else (last,))


def layer(name: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return LAYERS[name](4, 5, **(FORM | options))


def lower_dynamic(module: nn.Module, **options: Any) -> Lowered:
    steps = torch.export.Dim("steps", min=1, max=40)
    with dynamic_steps():
        exported = torch.export.export(
            module.eval(), (torch.randn(2, 7, 4),), dynamic_shapes=({1: steps},)
        )
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), **options)
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    return Lowered.of(edge, partitioner)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LAYERS)
def test_the_number_of_steps_is_dynamic(name: str) -> None:
    module = Steps(layer(name))
    lowered = lower_dynamic(module)
    assert lowered.operators == ("aten.asinh.default",)
    pte = lowered.pte
    for engine in ENGINES:
        program = runtime.load_program(pte, engine=engine)
        for steps in (1, 7, 23, 40):
            x = torch.randn(2, steps, 4)
            results = program.run("forward", [x])
            for actual, expected in zip(results, module(x), strict=True):
                torch.testing.assert_close(actual, expected, atol=ATOL, rtol=RTOL)


def test_dynamic_steps_that_stay_out_of_core_ml_are_an_error() -> None:
    with pytest.raises(UnsupportedOperatorError, match="dynamic number of steps") as raised:
        lower_dynamic(Steps(layer("lstm")), skip_ops_for_coreml_delegation=["lstm"])
    assert "aten.lstm.input is in skip_ops_for_coreml_delegation" in str(raised.value)
    with pytest.raises(UnsupportedOperatorError, match="no backend took it"):
        lower_dynamic(Steps(layer("gru")), min_partition_nodes=100)


def test_layers_compute_while_others_are_exported() -> None:
    module, x = layer("gru"), torch.randn(2, 3, 4)
    expected, _ = module(x)
    tables = [dict(op.py_kernels) for op in PLACEHOLDER_OPS]

    def leave() -> None:
        with dynamic_steps():
            actual, _ = module(x)
            assert torch.equal(actual, expected)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert [dict(op.py_kernels) for op in PLACEHOLDER_OPS] == tables


def ops_in(block: Block) -> Iterator[str]:
    for op in block.ops:
        yield op.type
        for inner in op.blocks:
            yield from ops_in(inner)


@functools.cache
def ops_of(name: str, steps: int) -> Counter[str]:
    lowered = lower_unchecked(Steps(layer(name, num_layers=2)), (torch.randn(2, steps, 4),))
    (function,) = delegate_functions(lowered.edge)
    return Counter(ops_in(function.block))


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("name", "op", "count"),
    [
        ("lstm", "lstm", 2),
        ("projected lstm", "while_loop", 4),
        ("gru", "while_loop", 4),
        ("rnn_tanh", "rnn", 4),
    ],
)
def test_programs_have_one_op_for_all_steps(name: str, op: str, count: int) -> None:
    assert ops_of(name, 3)[op] == count
    assert ops_of(name, 3) == ops_of(name, 30)


class Recognizer(nn.Module):
    """Windows of a signal to scores of letters, as in speech recognition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.windows = nn.Conv1d(8, 32, 5, stride=2, padding=2)
        self.first = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(48, 32, num_layers=2, batch_first=True)
        self.letters = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.windows(x)).transpose(1, 2)
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.letters(x).log_softmax(-1)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("precision", "target", "bound"),
    [
        (Precision.FLOAT32, Opset.iOS15, SQNR_FP32),
        (Precision.FLOAT16, Opset.iOS15, SQNR_FP16),
        (Precision.FLOAT16, Opset.iOS18, SQNR_FP16),
    ],
)
def test_a_recognizer_is_one_delegate(precision: Precision, target: Opset, bound: float) -> None:
    module, x = Recognizer().eval(), torch.randn(1, 8, 100)
    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=precision, minimum_deployment_target=target
    )
    lowered = lower(module, (x,), compile_specs=specs)
    assert not lowered.operators
    pte, expected = lowered.pte, module(x).detach().numpy()
    for engine in ENGINES:
        (actual,) = runtime.load_program(pte, engine=engine).run("forward", [x])
        assert sqnr_db(expected, actual.numpy()) > bound


class Only(nn.Module):
    """The hidden states of a layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "options",
    [
        {"skip_ops_for_coreml_delegation": ["gru"]},
        {"skip_modules": [nn.GRU]},
        {"take_over_constant_data": False},
    ],
    ids=["op", "module", "weights-are-inputs"],
)
def test_refused_layers_are_decomposed(options: dict[str, Any]) -> None:
    module, inputs = Only(layer("gru")), (torch.randn(2, 3, 4),)
    lowered = lower(module, inputs, **options)
    assert not any("gru" in op for op in lowered.operators)
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_layer_that_fails_to_convert_is_decomposed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_trials(monkeypatch, tmp_path)
    fail_as_a_whole(monkeypatch, "lstm")
    module, inputs = Only(layer("lstm")), (torch.randn(2, 3, 4),)
    lowered = lower(module, inputs)
    (name,) = (name for name in reasons(lowered.report) if "lstm" in name)
    assert MESSAGE in reasons(lowered.report)[name]
    assert not any("lstm" in op for op in lowered.operators)
    assert_equal_eager(lowered.pte, module, inputs)


class Dequantized(nn.Module):
    """A layer whose input weights are stored in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weight_ih", torch.randint(-99, 99, (5, 4), dtype=torch.int8))
        self.register_buffer("weight_hh", torch.rand(5, 5))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor
        weight = dequantize(self.weight_ih, 0.01, 0, -128, 127, torch.int8)
        weights = [weight, self.weight_hh]
        return torch.ops.aten.rnn_tanh(x, state, weights, False, 1, 0.0, False, False, False)[0]


def test_layers_of_dequantized_weights_are_decomposed() -> None:
    module, inputs = Dequantized(), (torch.randn(3, 2, 4), torch.randn(1, 2, 5))
    lowered = lower(module, inputs)
    assert not any("rnn" in node.op for node in lowered.report.nodes)
    assert_equal_eager(lowered.pte, module, inputs)


def test_weights_may_be_computed_of_parameters() -> None:
    module = nn.utils.parametrizations.weight_norm(layer("rnn_tanh"), "weight_hh_l0")
    lowered = lower(Only(module), (torch.randn(2, 3, 4),))
    assert {node.op for node in lowered.report.nodes} >= {"aten.rnn_tanh.input"}
    assert_equal_eager(lowered.pte, Only(module), (torch.randn(2, 3, 4),))


def test_weights_are_stored_compressed() -> None:
    module = nn.LSTM(64, 64, batch_first=True)
    x = torch.randn(1, 5, 64)
    specs = fp32_specs(
        weight_compression={
            "config_type": "OpLinearQuantizerConfig",
            "global_config": {"mode": "linear_symmetric"},
        }
    )
    lowered = lower(Only(module), (x,), compile_specs=specs)
    plain = lower(Only(module), (x,))
    assert len(lowered.pte) < 0.4 * len(plain.pte)
    expected = module(x)[0].detach().numpy()
    for engine in ENGINES:
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
        assert sqnr_db(expected, actual.numpy()) > SQNR_FP16
