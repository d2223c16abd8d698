"""Constants that several partitions use, or a partition and the CPU: each user has a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.failing_conversions import counted
from support.lowering import Lowered, fp32_specs, lower, lower_core_aten, reasons
from support.multimethod import IOS18, lower_methods, specs
from support.partitioned import ATOL, RTOL, delegate_functions, example
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers what dequantizes
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.patches.third_party import coremltools

coremltools()
import torch.ao.quantization.fx._decomposed  # noqa: E402 - registers what dequantizes

LINE, IMAGE, VOLUME = (2, 4, 5), (2, 4, 5, 3), (1, 4, 3, 3, 3)


class Repeated(nn.Module):
    """One layer several times, with an operator between them that Core ML lacks."""

    def __init__(self, layer: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for _ in range(self.times - 1):
            x = self.layer(torch.asinh(x))
        return x


class Computed(nn.Module):
    """A function of the input and of a weight."""

    def __init__(self, function: Callable[..., Any], *shape: int, **buffer: bool) -> None:
        super().__init__()
        weight = torch.rand(shape) * 0.5
        if buffer:
            self.register_buffer("weight", weight, **buffer)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(torch.asinh(functional.conv2d(x, w)), w)


def tied() -> nn.Module:
    """Return two layers with one weight."""
    first, second = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
    second.weight = first.weight
    return nn.Sequential(first, Asinh(), second)


class Asinh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: Repeated(nn.Conv1d(4, 4, 1)), LINE),
    "conv2d": (lambda: Repeated(nn.Conv2d(4, 4, 1)), IMAGE),
    "conv3d": (lambda: Repeated(nn.Conv3d(4, 4, 1)), VOLUME),
    "transposed": (lambda: Repeated(nn.ConvTranspose2d(4, 4, 1)), IMAGE),
    "weight norm": (lambda: Repeated(weight_norm(nn.Conv1d(4, 4, 1))), LINE),
    "prelu": (lambda: Repeated(nn.PReLU(4)), IMAGE),
    "batch norm": (lambda: Repeated(nn.BatchNorm2d(4)), IMAGE),
    "linear": (lambda: Repeated(nn.Linear(5, 5)), LINE),
    "three times": (lambda: Repeated(nn.Conv1d(4, 4, 1), 3), LINE),
    # Tags are strings, and "coreml_10" comes before "coreml_2".
    "twelve times": (lambda: Repeated(nn.PReLU(4), 12), LINE),
    "tied": (tied, LINE),
    "buffer": (lambda: Computed(twice, 4, 4, 1, 1, persistent=True), IMAGE),
    "non-persistent buffer": (lambda: Computed(twice, 4, 4, 1, 1, persistent=False), IMAGE),
    "more than once in a partition": (
        lambda: Computed(
            lambda x, b: functional.prelu(torch.asinh(functional.prelu(x, b)) * b.sum(), b),
            4,
            persistent=True,
        ),
        (2, 4),
    ),
}


def assert_equal_eager(lowered: Lowered, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    expected = module(*inputs)
    actual = runtime.load_program(lowered.pte).run("forward", list(inputs))
    for one, other in zip(
        actual, [expected] if isinstance(expected, torch.Tensor) else expected, strict=True
    ):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=RTOL)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MODULES)
def test_each_partition_has_its_own_copy_of_a_shared_constant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    counts, module, inputs = counted(monkeypatch), make(), example(*shape)
    lowered = lower(module, inputs)
    assert set(lowered.operators) == {"aten.asinh.default"}
    functions = delegate_functions(lowered.edge)
    assert [len(f.inputs) for f in functions] == [1] * (1 + len(lowered.operators))
    assert counts["mlprogram"] == len(functions)
    assert_equal_eager(lowered, module, inputs)


@pytest.mark.parametrize("name", ["conv2d", "prelu", "batch norm", "linear"])
def test_results_are_right_with_shared_constants_outside(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module, inputs = make(), example(*shape)
    assert_equal_eager(lower(module, inputs, take_over_constant_data=False), module, inputs)


def test_a_skipped_op_separates_partitions_as_well() -> None:
    module, inputs = Computed(lambda x, w: twice(x.sin(), w).sin(), 4, 4, 1, 1), example(*IMAGE)
    for route in (lower, lower_core_aten):
        lowered = route(module, inputs, skip_ops_for_coreml_delegation=["asinh", "sin"])
        assert set(lowered.operators) == {"aten.sin.default", "aten.asinh.default"}
        assert_equal_eager(lowered, module, inputs)


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "returned": lambda x, w: (functional.conv2d(x, w), w),
    "used on the CPU first": lambda x, w: functional.conv2d(torch.asinh(w).sum() + x, w),
    "used on the CPU between": lambda x, w: twice(x, w) + torch.asinh(w).sum(),
    "control flow between": lambda x, w: functional.conv2d(
        torch.cond(x.sum() > 0, torch.relu, torch.neg, (functional.conv2d(x, w),)), w
    ),
    "in control flow": lambda x, w: functional.conv2d(
        torch.cond(x.sum() > 0, functional.conv2d, lambda y, _: y * 2, (x, w)), w
    ),
    "in a list": lambda x, w: torch.asinh(torch.cat([twice(x, w).mean((0, 2, 3)), w.flatten()])),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", USES)
def test_other_users_of_a_weight_do_not_keep_a_convolution_out(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = Computed(USES[name], 4, 4, 1, 1), example(*IMAGE)
    lowered = lower(module, inputs)
    assert not any("conv" in n.op for n in lowered.report.undelegated)
    assert not any("conv" in name for name in lowered.operators)
    assert_equal_eager(lowered, module, inputs)


def test_a_constant_that_several_partitions_take_in_lists_is_an_input() -> None:
    def lists(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cat([torch.asinh(torch.relu(torch.cat([x, w]))), w]))

    module, inputs = Computed(lists, 2, 4), example(3, 4)
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.asinh.default",)
    assert [len(f.inputs) for f in delegate_functions(lowered.edge)] == [2, 2]
    assert_equal_eager(lowered, module, inputs)


def test_a_convolution_by_a_constant_in_two_lists_runs_on_the_cpu() -> None:
    def lists(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = torch.asinh(torch.relu(torch.cat([x, w])))
        return torch.relu(functional.conv1d(torch.cat([x, w]), w))

    module, inputs = Computed(lists, 4, 4, 1), example(3, 4, 1)
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.asinh.default", "aten.convolution.default")
    assert set(reasons(lowered.report)) == {"aten.asinh.default", "aten.conv1d.default"}
    assert "'weight' is computed" in reasons(lowered.report)["aten.conv1d.default"]
    assert_equal_eager(lowered, module, inputs)


class Dequantized(nn.Module):
    """A weight of 8 bits, dequantized once for two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-99, 99, (4, 4, 1), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) / 100)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dequantize = torch.ops.quantized_decomposed.dequantize_per_channel
        w = dequantize(self.codes, self.scales, self.zeros, 0, -128, 127, torch.int8)
        return functional.conv1d(torch.asinh(functional.conv1d(x, w)), w)


def test_each_partition_dequantizes_its_copy_of_a_weight() -> None:
    torch.manual_seed(0)
    module, inputs = Dequantized(), example(*LINE)
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.asinh.default",)
    assert [len(f.inputs) for f in delegate_functions(lowered.edge)] == [1, 1]
    assert_equal_eager(lowered, module, inputs)


@pytest.mark.share(3)
@pytest.mark.parametrize("strategy", [None, "POSITIONAL", "DISABLED"])
def test_methods_with_partitions_that_share_a_weight(strategy: str | None) -> None:
    torch.manual_seed(0)
    module = Repeated(nn.Conv1d(4, 4, 1))
    methods = {name: (module, example(n, 4, 5)) for name, n in (("one", 1), ("two", 2))}
    lowered = lower_methods(methods, specs(strategy, **IOS18))
    for name, (_, inputs) in methods.items():
        assert [n.op for n in lowered.reports[name].undelegated] == ["aten.asinh.default"]
        assert len(lowered.reports[name].partitions) == 2
        (actual,) = runtime.load_program(lowered.pte).run(name, list(inputs))
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)


def test_the_exported_program_keeps_its_weights() -> None:
    module, inputs = Repeated(nn.Conv1d(4, 4, 1)), example(*LINE)
    program = torch.export.export(module, inputs)
    before = dict(program.state_dict)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    plan = partitioner.plan(program)
    to_edge_transform_and_lower(program, partitioner=[partitioner])
    assert plan == partitioner.report
    assert program.state_dict.keys() == before.keys()
    assert all(program.state_dict[key] is value for key, value in before.items())
