"""``CoreMLPartitioner``: the constants and mutable buffers that it takes over."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.failing_conversions import counted
from support.lowering import fp32_specs, lower, reasons
from support.partitioned import ATOL, RTOL, Network, assert_equal_eager, delegate_functions, example
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import (
    ContractError,
)
from coreml_delegate.targets import Opset


class Accumulator(nn.Module):
    """Adds its inputs up in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2.0


class Shared(nn.Module):
    """One weight used on both sides of an operator that Core ML lacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4, 4) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x @ self.weight) @ self.weight


class SharedLayer(nn.Module):
    """One convolution, which takes a constant for its weight, on both sides of such an operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.asinh(self.conv(x)))


# Constants


def test_the_exported_program_keeps_its_data() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("scale", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale + torch.tensor([1.0, 2.0, 3.0])

    module, inputs = Shifted(), (torch.ones(2, 3),)
    program = torch.export.export(module, inputs)
    first, second = (
        to_edge_transform_and_lower(
            program, partitioner=[CoreMLPartitioner(compile_specs=fp32_specs())]
        )
        .to_executorch()
        .buffer
        for _ in range(2)
    )
    assert first == second
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))


def test_constants_go_to_the_delegates_that_use_them() -> None:
    module, inputs = Network(), example(2, 4)
    lowered = lower(module, inputs)
    signature = lowered.edge.exported_program().graph_signature
    assert not signature.inputs_to_parameters
    assert lowered.report.tags == ("coreml_0", "coreml_1")
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("kind", [Shared, SharedLayer])
def test_a_constant_shared_by_two_delegates_goes_to_both(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(monkeypatch)
    module, inputs = kind(), example(2, 4)
    lowered = lower(module, inputs)
    assert len(lowered.report.partitions) == counts["mlprogram"] == 2
    assert [len(f.inputs) for f in delegate_functions(lowered.edge)] == [1, 1]
    assert_equal_eager(lowered.pte, module, inputs)


def test_constants_left_outside_become_inputs() -> None:
    module, inputs = Network(supported=True), example(2, 4)
    lowered = lower(module, inputs, take_over_constant_data=False)
    assert len(lowered.edge.exported_program().graph_signature.inputs_to_parameters) == 4
    (function,) = delegate_functions(lowered.edge)
    assert len(function.inputs) == 5
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


def test_ops_that_need_constants_stay_on_the_cpu_if_constants_do() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(x))

    module, inputs = Convolution(), example(1, 2, 5, 5)
    lowered = lower(module, inputs, take_over_constant_data=False)
    assert lowered.operators == ("aten.convolution.default",)
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_calls_on_int64_constants_beyond_int32_stay_on_the_cpu(value: int) -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.tensor([1, value]))
            self.register_buffer("small", torch.tensor([1, 2**31 - 1]), persistent=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.maximum(x, self.offset), torch.minimum(x, self.small)

    module, inputs = Offset(), (torch.tensor([3, 4]),)
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.maximum.default",)
    assert (
        f"int64 values {min(1, value)} to {max(1, value)}"
        in reasons(lowered.report)["aten.maximum.default"]
    )
    results = runtime.load_program(lowered.pte).run("forward", list(inputs))
    for actual, expected in zip(results, module(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)


# Mutable buffers


def test_mutable_buffers_become_states() -> None:
    module = Accumulator()
    lowered = lower(
        module,
        example(3),
        compile_specs=fp32_specs(minimum_deployment_target=Opset.iOS18),
    )
    (function,) = delegate_functions(lowered.edge)
    assert len(function.states) == 1
    assert len(function.inputs) == 1
    run_thrice(lowered.pte)


def test_mutable_buffers_not_taken_over_become_inputs_and_outputs() -> None:
    lowered = lower(
        Accumulator(),
        example(3),
        compile_specs=fp32_specs(minimum_deployment_target=Opset.iOS15),
        take_over_mutable_buffer=False,
    )
    (function,) = delegate_functions(lowered.edge)
    assert not function.states
    assert len(function.inputs) == 2
    run_thrice(lowered.pte)


def test_states_raise_the_deployment_target_if_none_is_given() -> None:
    lowered = lower(Accumulator(), example(3))
    (function,) = delegate_functions(lowered.edge)
    assert function.opset == Opset.iOS18.mil_name
    run_thrice(lowered.pte)


def run_thrice(pte: bytes) -> None:
    program, reference = runtime.load_program(pte), Accumulator()
    # Core ML keeps states in fp16 whatever the precision: these values fit.
    inputs = (torch.tensor([0.25, -0.5, 1.75]),)
    for _ in range(3):
        (actual,) = program.run("forward", list(inputs))
        torch.testing.assert_close(actual, reference(*inputs), atol=ATOL, rtol=RTOL)


class SplitState(nn.Module):
    """Reads a buffer in one delegate and writes it in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.asinh(self.total * 2.0 + x)
        self.total.copy_(y + 1.0)
        return y * 2.0


class SeenState(nn.Module):
    """Uses the new value of a buffer outside the delegate that writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return torch.asinh(self.total)


@pytest.mark.parametrize("kind", [SplitState, SeenState])
def test_buffers_used_outside_of_one_delegate_are_no_states(kind: type[nn.Module]) -> None:
    lowered = lower(kind(), example(3))
    assert lowered.operators == ("aten.asinh.default",)
    assert not any(f.states for f in delegate_functions(lowered.edge))
    program, reference = runtime.load_program(lowered.pte), kind()
    for _ in range(3):
        (actual,) = program.run("forward", list(example(3)))
        torch.testing.assert_close(actual, reference(*example(3)), atol=ATOL, rtol=RTOL)


def test_states_have_their_initial_values_in_the_first_run() -> None:
    module = Accumulator()
    module.total.fill_(1.5)
    lowered = lower(module, example(3))
    (buffer,) = lowered.report.buffers
    assert (buffer.partition, buffer.initial) == ("coreml_0", "constant")
    program, reference = runtime.load_program(lowered.pte), Accumulator()
    reference.total.fill_(1.5)
    inputs = (torch.tensor([0.25, -0.5, 1.75]),)
    for _ in range(3):
        (actual,) = program.run("forward", list(inputs))
        torch.testing.assert_close(actual, reference(*inputs), atol=ATOL, rtol=RTOL)


def test_states_below_ios18_are_an_error() -> None:
    with pytest.raises(ContractError) as raised:
        lower(
            Accumulator(),
            example(3),
            compile_specs=fp32_specs(minimum_deployment_target=Opset.iOS17),
        )
    assert str(raised.value) == (
        "mutable buffers become Core ML states, which need iOS18: "
        "got minimum_deployment_target iOS17 and total. "
        "Raise it, or set take_over_mutable_buffer=False"
    )
