"""Calls on the CPU: operators outside the core ATen opset, their kernels, report and warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.failing_conversions import fail_as_a_whole, fresh_trials
from support.gates import needs_compiler
from support.lowering import fp32_specs, lower_unchecked
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import LoweringError, UnsupportedOpError
from coreml_delegate.ops import ReasonCode
from coreml_delegate.partition import DelegationReport

ATOL, RTOL = ATOL_RTOL["fp32"]


class Between(nn.Module):
    """Functions of one matrix each, between two convolutions."""

    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(2, 2, 3, padding=1)
        self.after = nn.Conv2d(2, 2, 3, padding=1)
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.after(sum((function(x) for function in self.functions), x))


INPUT = torch.linspace(-1, 1, 50).cos().reshape(1, 2, 5, 5)
EYE = torch.eye(5)


# Operators that ExecuTorch's check refuses, or its runtime has no kernel for, by the kernel.
LACKING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten::lgamma.out": lambda x: x.exp().lgamma(),
    "aten::mode.values": lambda x: x.round().mode(2, keepdim=True)[0],
    "aten::nanmedian.dim_values": lambda x: x.nanmedian(2, keepdim=True)[0],
    "aten::cummax.out": lambda x: x.cummax(2)[0],
    "aten::logcumsumexp.out": lambda x: x.logcumsumexp(2),
    "aten::_unique2.out": lambda x: x.unique().sum(),
    "aten::linalg_inv_ex.inverse": lambda x: torch.linalg.inv(x + 6 * EYE),
    "aten::linalg_cholesky_ex.L": lambda x: torch.linalg.cholesky(x @ x.mT + EYE),
    "aten::linalg_solve_triangular.out": lambda x: torch.linalg.solve_triangular(
        x.tril() + 6 * EYE, x, upper=False
    ),
    "aten::_linalg_slogdet.sign": lambda x: torch.linalg.slogdet(x + 6 * EYE)[1].sum(),
}


@pytest.fixture(scope="module")
def lacking() -> tuple[Between, bytes, DelegationReport]:
    """A model with all of them, its program, and the report on it."""
    module = Between(*LACKING.values())
    lowered = lower_unchecked(module, (INPUT,))
    return module, lowered.pte, lowered.report


def test_operators_without_kernels_do_not_fail_the_export(
    lacking: tuple[Between, bytes, DelegationReport],
) -> None:
    module, pte, report = lacking
    assert len(report.partitions) >= 2
    (actual,) = runtime.load_program(pte, host="python").run("forward", [INPUT])
    torch.testing.assert_close(actual, module(INPUT), atol=ATOL, rtol=RTOL)


@needs_compiler
def test_the_report_names_missing_kernels(
    lacking: tuple[Between, bytes, DelegationReport],
) -> None:
    _, pte, report = lacking
    with pytest.raises(UnsupportedOpError) as raised:
        runtime.load_program(pte, host="stock").run("forward", [INPUT])
    refused = set(str(raised.value.got).split(", "))
    assert refused >= LACKING.keys()
    said = {str(n.cpu_obstacle).rpartition(" ")[2] for n in report.without_kernel}
    assert said == refused
    assert {n.cpu_obstacle.code for n in report.without_kernel} == {ReasonCode.KERNEL}


@pytest.mark.slow
def test_every_form_of_the_report_names_missing_kernels(
    lacking: tuple[Between, bytes, DelegationReport],
) -> None:
    report = lacking[2]
    obstacle = "ExecuTorch's runtime has no kernel aten::logcumsumexp.out"
    assert f"the CPU does not run it either: {obstacle}\n" in report.to_table()
    found = {n["op"]: n["cpu_obstacle"] for n in report.to_dict()["nodes"] if n["cpu_obstacle"]}
    assert found["aten.logcumsumexp.default"]["text"] == obstacle
    assert "aten::logcumsumexp.out" in report.to_html()


@needs_compiler
def test_operators_with_kernels_are_not_reported() -> None:
    module = Between(
        lambda x: x + x.nonzero().sum() * 0.01,
        lambda x: torch.cdist(x, x),
    )
    lowered = lower_unchecked(module, (INPUT,))
    assert lowered.report.without_kernel == ()
    assert lowered.operators
    program = runtime.load_program(lowered.pte, host="stock")
    (actual,) = program.run("forward", [INPUT])
    torch.testing.assert_close(actual, module(INPUT), atol=ATOL, rtol=RTOL)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.logcumsumexp(2), lambda v: v.sin(), (x,))


def test_missing_kernels_in_branches_are_reported() -> None:
    (node,) = lower_unchecked(Branches(), (INPUT,)).report.without_kernel
    assert node.name == "submodule_0.aten_logcumsumexp_default"
    assert str(node.cpu_obstacle).endswith("no kernel aten::logcumsumexp.out")


def test_plan_and_lowering_warn_once_for_each_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Between(lambda x: x.logcumsumexp(2), lambda x: x.logcumsumexp(3))
    program = torch.export.export(module.eval(), (INPUT,))
    with caplog.at_level(logging.WARNING, logger="coreml_delegate"):
        CoreMLPartitioner(compile_specs=fp32_specs(), min_partition_nodes=1).plan(program)
        lower_unchecked(module, (INPUT,))
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("coreml_delegate")]
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("aten.logcumsumexp.default at ")
        assert "has no kernel aten::logcumsumexp.out. Register a kernel" in message


# What ExecuTorch cannot lower


class Function(nn.Module):
    """A function alone."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


UNLOWERABLE: dict[str, tuple[nn.Module, str, str, str]] = {
    "no out variant": (
        Function(lambda x: nn.functional.rrelu(x, training=True)),
        "aten.rrelu_with_noise_functional.default has no out variant",
        "Write the model with other operators",
        "Missing out variants",
    ),
    "a size without bound": (
        Function(lambda x: torch.bincount((x.abs() * 3).long().flatten()).sum()),
        "of the result of aten.bincount.default depends on values, and nothing bounds it",
        "torch._check(result.shape[0] <= 100)",
        "Cannot evaluate a finite upper bound",
    ),
    "an effect": (
        Function(lambda x: torch.linalg.matrix_power(x, -2)),
        "aten._linalg_check_errors.default has an effect",
        "torch.linalg.inv_ex",
        "'WithEffects' object has no attribute",
    ),
}


@pytest.mark.parametrize(
    ("module", "cause", "remedy", "theirs"), UNLOWERABLE.values(), ids=UNLOWERABLE
)
def test_calls_that_executorch_cannot_lower_are_reported(
    module: nn.Module, cause: str, remedy: str, theirs: str
) -> None:
    lowered = lower_unchecked(module, (INPUT[0, 0],))
    with pytest.raises(LoweringError) as raised:
        lowered.report.require_lowerable()
    assert cause in str(raised.value)
    assert remedy in str(raised.value)
    assert str(raised.value).startswith("ExecuTorch cannot lower 1 operation(s)")
    with pytest.raises((RuntimeError, AttributeError), match=theirs):
        lowered.edge.to_executorch()


def test_the_remedy_for_unbounded_sizes_helps() -> None:
    def bounded(x: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount((x.abs() * 3).long().flatten())
        torch._check(counts.shape[0] <= 100)
        return counts.sum()

    module = Between(bounded)
    lowered = lower_unchecked(module, (INPUT,))
    lowered.report.require_lowerable()
    (actual,) = runtime.load_program(lowered.pte).run("forward", [INPUT])
    torch.testing.assert_close(actual, module(INPUT), atol=ATOL, rtol=RTOL)


def test_an_op_preserved_in_vain_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It has no out variant, but is decomposed after lowering."""
    fresh_trials(monkeypatch, tmp_path)
    fail_as_a_whole(monkeypatch, "conv2d")
    lowered = lower_unchecked(Between(), (INPUT,))
    assert "aten.conv2d.default" in {node.op for node in lowered.report.undelegated}
    lowered.report.require_lowerable()
    assert lowered.pte
