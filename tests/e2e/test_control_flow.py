"""Control flow inside delegates, and what stays outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import Lowered, fp32_specs
from support.partitioned import delegate_functions
from support.tolerances import ATOL_RTOL, SQNR_FP16, sqnr_db
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.options.compile_specs import Precision

ENGINES = ("reference", "openvino")
ATOL, RTOL = ATOL_RTOL["fp32"]


class Branching(nn.Module):
    """Conditions in a condition, layers and literals in the branches, integers as results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def positive(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inner = torch.cond(v.mean() > 0.5, self.linear, lambda w: (w * 2).softmax(-1), (v,))
            return inner, v.argmax(-1)

        def negative(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scaled = self.convolution(v[None, None]).amax((0, 1)) * torch.tensor([1.0, 2, 3, 4])
            return scaled, (v < -0.5).sum(-1)

        return torch.cond(x.sum() > 0, positive, negative, (x,))


class Choosing(nn.Module):
    """A layer in one branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.linear, torch.cos, (x,)) + 1


class Looping(nn.Module):
    """As many turns as the values demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def goes_on(count: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (count < 5) & (v.sum() < 30)

        def turn(count: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return count + 1, self.linear(v).abs() + 1

        return while_loop(goes_on, turn, (torch.tensor(0), x))


class Replacing(nn.Module):
    """Turns that give one value up for another, from outside of the loop or from beside it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outside = x * 2

        def goes_on(count: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return count < 3

        def turn(count: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
            return count + 1, outside.clone(), c.clone(), b.clone()

        return while_loop(goes_on, turn, (torch.tensor(0), x, x + 1, x - 1))


class Scanning(nn.Module):
    """A sum that goes on from row to row, and what is seen of it on the way."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.backwards = backwards

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return total + self.linear(row), (total * row).sum(-1)

        return scan(step, x.new_zeros(2, 4), x, reverse=self.backwards)


_MAP: Any = torch_map


class Mapping(nn.Module):
    """The same of every row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MAP(lambda row, bias: self.linear(row).tanh() + bias, x, self.linear.bias * 2)


class OutsideCoreML(nn.Module):
    """A branch with an operator that Core ML lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.asinh, torch.cos, (x.sin(),)) + 1


class Normalized(nn.Module):
    """Layers in nested branches whose weights are computed of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def positive(v: torch.Tensor) -> torch.Tensor:
            return torch.cond(v.mean() > 0.5, self.layer, lambda w: self.layer(w * 2), (v,))

        return torch.cond(x.sum() > 0, positive, lambda v: self.layer(v).relu(), (x,))


_MATRIX, _ROWS = torch.ones(2, 4), torch.linspace(-1, 1, 56).reshape(7, 2, 4)
CASES: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "cond": (Branching(), (_MATRIX, -_MATRIX, _MATRIX * 0.1)),
    "while_loop": (Looping(), (_MATRIX, _MATRIX * 40, -_MATRIX)),
    "while_loop of others' values": (Replacing(), (_MATRIX, -_MATRIX)),
    "scan": (Scanning(), (_ROWS, _ROWS.flip(0))),
    "scan backwards": (Scanning(backwards=True), (_ROWS,)),
    "map": (Mapping(), (_ROWS, -_ROWS)),
}


def lower(module: nn.Module, x: torch.Tensor, **options: Any) -> Lowered:
    given: dict[str, Any] = {"compile_specs": fp32_specs()}
    partitioner = CoreMLPartitioner(**(given | options))
    exported = torch.export.export(module.eval().requires_grad_(False), (x,))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    return Lowered.of(edge, partitioner)


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return pytree.tree_leaves(module(x))


def assert_equal_eager(lowered: Lowered, module: nn.Module, x: torch.Tensor, engine: str) -> None:
    actual = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
    for mine, theirs in zip(actual, results(module, x), strict=True):
        torch.testing.assert_close(mine, theirs, atol=ATOL, rtol=RTOL)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", CASES)
def test_control_flow_is_delegated_as_a_whole(name: str) -> None:
    module, inputs = CASES[name]
    lowered = lower(module, inputs[0])
    assert not lowered.operators
    for engine in ENGINES:
        for x in inputs:
            assert_equal_eager(lowered, module, x, engine)


class Casting(nn.Module):
    """Branches with casts, beside which torch puts checks of dtypes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def positive(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = torch.div((v * 8).to(torch.int32), 3, rounding_mode="floor")
            return v.std(-1), torch.atan2(v, v.flip(0) + 0.1), whole

        def negative(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = torch.remainder((v * 8).to(torch.int32), 3)
            return v.logsumexp(-1), torch.remainder(v.roll(1, -1), 0.7), whole

        return torch.cond(x.sum() > 0, positive, negative, (x,))


class Rewritten(nn.Module):
    """Branches whose calls coremltools translates wrongly or not at all, unless rewritten."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def positive(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.add(v, v.flip(0), alpha=3), (v * 200).log_softmax(-1)

        def negative(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.rsub(v, 2.0, alpha=3), torch.fmod(v * 7, 2.5)

        return torch.cond(x.sum() > 0, positive, negative, (x,))


def test_weights_of_branches_are_folded() -> None:
    module = Normalized().eval()
    lowered = lower(module, _MATRIX)
    assert not lowered.operators
    for engine in ENGINES:
        for scale in (1, -1, 0.1):
            assert_equal_eager(lowered, module, _MATRIX * scale, engine)


@pytest.mark.share(2)
@pytest.mark.parametrize("module", [Casting(), Rewritten()], ids=["casts", "rewrites"])
def test_branches_are_prepared_as_the_rest_of_a_program(module: nn.Module) -> None:
    x = torch.linspace(-1.1, 2.3, 8).reshape(2, 4)
    lowered = lower(module, x)
    assert not lowered.operators
    for engine in ENGINES:
        for sign in (1, -1):
            assert_equal_eager(lowered, module, x * sign, engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_control_flow_in_fp16(name: str) -> None:
    module, inputs = CASES[name]
    specs = fp32_specs(compute_precision=Precision.FLOAT16)
    lowered = lower(module, inputs[0], compile_specs=specs)
    for engine in ENGINES:
        program = runtime.load_program(lowered.pte, engine=engine)
        for x in inputs:
            actual = program.run("forward", [x])
            for mine, theirs in zip(actual, results(module, x), strict=True):
                assert sqnr_db(theirs.numpy(), np.asarray(mine)) > SQNR_FP16


def operations(steps: int) -> int:
    lowered = lower(Scanning(), torch.ones(steps, 2, 4))
    (function,) = delegate_functions(lowered.edge)

    def count(block: Any) -> int:
        return sum(1 + sum(map(count, op.blocks)) for op in block.ops)

    return count(function.block)


@pytest.mark.slow
def test_a_scan_has_as_many_operations_for_any_number_of_rows() -> None:
    assert operations(3) == operations(50)


def test_a_condition_with_an_operator_outside_core_ml_stays_outside() -> None:
    module, x = OutsideCoreML(), torch.linspace(-1, 1, 8)
    lowered = lower(module, x)
    assert "higher_order.cond" in str(lowered.edge.exported_program())
    assert lowered.report.tags == ("coreml_0", "coreml_1", "submodule_1_coreml_0")
    for sign in (1, -1):
        assert_equal_eager(lowered, module, x.abs() * sign, "reference")


class Inside(nn.Module):
    """Branches in branches, of whose calls Core ML lacks some; a layer, and integers as results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def layers(v: torch.Tensor) -> torch.Tensor:
            return self.convolution(self.linear(v).relu()[None, None]).amax((0, 1)).asinh()

        def positive(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.cond(v.mean() > 0.5, layers, torch.cos, (v,)).sin(), v.argmax(-1)

        def negative(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (v * 2).softmax(-1).asinh(), (v < -0.5).sum(-1)

        return torch.cond(x.sum() > 0, positive, negative, (x,))


class ScanningInside(nn.Module):
    """Steps with an operator that Core ML lacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return total + self.linear(row).asinh(), (total * row).sum(-1).exp()

        return scan(step, x.new_zeros(2, 4), x)


class MappingInside(Mapping):
    """The same of every row, with an operator that Core ML lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear.bias * 2
        return _MAP(lambda row, bias: (self.linear(row).tanh().asinh() + bias).exp(), x, bias)


PARTIAL: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "cond": (Inside(), (_MATRIX, _MATRIX * 0.1, -_MATRIX)),
    "scan": (ScanningInside(), (_ROWS, _ROWS.flip(0))),
    "map": (MappingInside(), (_ROWS,)),
}
INNER = "submodule_0.submodule_0"


@pytest.mark.parametrize(
    "name", ["cond", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scan", "map"))]
)
def test_branches_of_what_stays_outside_are_delegated(name: str) -> None:
    module, inputs = PARTIAL[name]
    lowered = lower(module, inputs[0])
    left = {node.op for node in lowered.report.undelegated if "." in node.name}
    assert "aten.asinh.default" in left
    assert any(tag.startswith("submodule_0_") for tag in lowered.report.tags)
    for engine in ENGINES:
        for x in inputs:
            assert_equal_eager(lowered, module, x, engine)
    program = runtime.load_program(lowered.pte, host="stock")
    for x in inputs:
        for mine, theirs in zip(program.run("forward", [x]), results(module, x), strict=True):
            torch.testing.assert_close(mine, theirs, atol=ATOL, rtol=RTOL)


def test_the_report_names_calls_of_branches() -> None:
    module, (x, *_) = PARTIAL["cond"]
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    exported = torch.export.export(module.eval().requires_grad_(False), (x,))
    report = partitioner.plan(exported)
    convolution = report.node(f"{INNER}.aten_convolution_default")
    assert "'weight' is computed" in str(convolution.reason)
    relu = report.node(f"{INNER}.aten_relu_default")
    assert relu.delegated
    assert all(name.startswith(f"{INNER}.") for name in relu.inputs)
    assert report.tags == lower(module, x).report.tags
    assert len(set(report.tags)) == len(report.tags)
    assert any(f"{INNER}.aten_asinh_default" in obstacle.nodes for obstacle in report.obstacles)


@pytest.mark.slow
def test_branches_of_dynamic_size_are_delegated() -> None:
    """Which are never held as a whole."""

    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda v: v.exp() * 2, lambda v: v.sin() * v, (x,))

    rows = torch.export.Dim("rows", min=2, max=16)
    exported = torch.export.export(Choice(), (_MATRIX,), dynamic_shapes=({0: rows},))
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    lowered = Lowered.of(edge, partitioner)
    assert {"submodule_0_coreml_0", "submodule_1_coreml_0"} <= set(lowered.report.tags)
    for engine in ENGINES:
        for count in (2, 5, 16):
            assert_equal_eager(lowered, Choice(), torch.rand(count, 4), engine)
            assert_equal_eager(lowered, Choice(), -torch.rand(count, 4), engine)


# ExecuTorch itself fails with literals in a branch.
@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["one condition", "scan", "map"])
def test_what_no_backend_takes_is_control_flow_of_executorch(name: str) -> None:
    module, inputs = {"one condition": (Choosing(), (_MATRIX, -_MATRIX)), **CASES}[name]
    lowered = lower(module, inputs[0], min_partition_nodes=100)
    assert lowered.operators
    for x in inputs:
        assert_equal_eager(lowered, module, x, "reference")


def test_a_loop_that_core_ml_does_not_take_is_an_error() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return while_loop(lambda v: v.sum() < 3, lambda v: (v.asinh() + 1,), (x,))

    with pytest.raises(UnsupportedOperatorError, match="has no while_loop") as raised:
        lower(Inverse(), torch.zeros(4))
    assert "aten.asinh.default" in str(raised.value)
    with pytest.raises(UnsupportedOperatorError, match="no backend took it"):
        lower(CASES["while_loop"][0], _MATRIX, min_partition_nodes=100)
