"""Assertions are dropped with what only they use; bounds of sizes stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lowering import Function, lower_unchecked
from support.tolerances import ATOL_RTOL
from torch.export import ExportedProgram, export

from coreml_delegate import runtime
from coreml_delegate.ops.call import target_name
from coreml_delegate.transforms.executorch_gaps import drop_assertions

X = torch.linspace(-1, 1, 12).reshape(3, 4)
_ATEN: Any = torch.ops.aten


def _all_true(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x.abs() < 100, lambda: "too large")
    return x * 2


def _asynchronous(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x == x).all())
    torch._assert_async(torch.isfinite(x).all(), "not finite")
    return x * 2


def _of_a_number(x: torch.Tensor) -> torch.Tensor:
    largest = x.argmax().item()
    torch._check(largest < 12)
    return x * 2


def _of_metadata(x: torch.Tensor) -> torch.Tensor:
    _ATEN._assert_tensor_metadata(x, dtype=torch.float32)
    return x * 2


def _targets(program: ExportedProgram) -> list[str]:
    return [target_name(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("function", [_all_true, _asynchronous, _of_a_number, _of_metadata])
def test_assertions_and_what_only_they_use_are_dropped(function: Callable[..., Any]) -> None:
    program = export(Function(function), (X,))
    before = _targets(program)
    assert len(before) > 1
    dropped = drop_assertions(program)
    assert _targets(dropped) == ["aten.mul.Tensor"]
    assert _targets(program) == before
    assert drop_assertions(dropped) is dropped


def _bounded(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x < 100)
    size = count.item()
    torch._check(size >= 1)
    torch._check(size <= 4)
    return x[:, :size] * 2


def test_bounds_of_sizes_stay() -> None:
    program = export(Function(_bounded), (X, torch.tensor(3)))
    dropped = _targets(drop_assertions(program))
    assert dropped.count("aten._assert_scalar.default") == 2
    assert "aten._is_all_true.default" not in dropped
    # Without its bounds no memory could be planned for the result.
    pte = lower_unchecked(Function(_bounded), (X, torch.tensor(3))).pte
    (actual,) = runtime.load_program(pte, host="python").run("forward", [X, torch.tensor(3)])
    torch.testing.assert_close(actual, X[:, :3] * 2)


def _branches(x: torch.Tensor) -> torch.Tensor:
    def product(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x < 100)
        return x.logcumsumexp(1)

    torch._check_tensor_all(x > -100)
    # Core ML takes neither branch, so that both stay as they are.
    return torch.cond(x.sum() > 0, product, lambda x: x.logcumsumexp(0), (x,)) + 1


@pytest.mark.parametrize("x", [X + 0.1, X - 0.1], ids=["then", "else"])
def test_assertions_in_branches_are_dropped(x: torch.Tensor, branches: bytes) -> None:
    (actual,) = runtime.load_program(branches, host="python").run("forward", [x])
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(actual, _branches(x), atol=atol, rtol=rtol)


@pytest.fixture(scope="module")
def branches() -> bytes:
    """The program of ``_branches``."""
    lowered = lower_unchecked(Function(_branches), (X,))
    names = {node.op for node in lowered.report.nodes}
    assert "aten.logcumsumexp.default" in names
    assert not any("assert" in name or "all_true" in name for name in names)
    return lowered.pte


def _as_values(x: torch.Tensor) -> torch.Tensor:
    largest = torch.where(_ATEN._is_any_true(x > 0.5), x, -x)
    return largest + _ATEN._is_all_true(x > 0.5).float()


def test_conditions_of_assertions_as_values() -> None:
    lowered = lower_unchecked(Function(_as_values), (X,))
    assert not lowered.report.undelegated
    for x in (X, -X.abs(), X + 2):
        (result,) = runtime.load_program(lowered.pte, engine="reference").run("forward", [x])
        assert torch.equal(result, _as_values(x))
