"""Reading and writing by a mask, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.lowering import Function, lower_unchecked, reasons
from support.tolerances import ATOL_RTOL
from torch.export import Dim
from torch.nn import functional

from coreml_delegate import runtime

Results = torch.Tensor | tuple[torch.Tensor, ...]

ATOL, RTOL = ATOL_RTOL["fp32"]
X = torch.linspace(-9.0, 9.0, 96).sin().mul(2).reshape(2, 6, 8)
INPUTS = {"some": X, "none": torch.full_like(X, -3.5), "all": torch.full_like(X, 0.5)}
MATRIX = torch.linspace(-3.0, 3.0, 64).cos().reshape(8, 8)


def _by_another_form_of_the_mask(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x.abs() > 1] = x[x.abs() > 1] * 0.1
    return x


def _by_a_mask_and_its_inverse(x: torch.Tensor) -> torch.Tensor:
    positive, copied = x > 0, torch.zeros_like(x)
    copied[positive] = x[positive] * x.flip(0)[positive] + 1
    reduced = x.clone()
    reduced[~positive] -= 3
    return copied + reduced


def _constants(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0.5] = 2.0
    x[x.sum(-1) > 0] = x[0, 0].clone()
    x[:, x[0].sum(-1) > 0] = 0.5
    return x * 2


def _layers(x: torch.Tensor) -> torch.Tensor:
    mask, total = x.sum(-1) > 0, x.clone()
    rows = functional.layer_norm(torch.relu(x[mask] @ MATRIX), [8])
    total[mask] += functional.linear(rows, MATRIX, MATRIX[0])
    return total


def _experts(x: torch.Tensor) -> torch.Tensor:
    choices, result = (x @ MATRIX[:, :3]).argmax(-1), torch.zeros_like(x)
    for expert in range(3):
        mask = choices == expert
        result[mask] = functional.linear(x[mask], MATRIX * (expert + 1))
    return result


def _added(x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    return x.index_put((mask,), x[mask] * 2, accumulate=True)


def _sorted(x: torch.Tensor) -> torch.Tensor:
    mask, result = x[..., 0] > 0, x.clone()
    largest, _ = x[mask].max(-1, keepdim=True)
    result[mask] = x[mask].sort(-1)[0] + largest
    return result


def _spline(x: torch.Tensor) -> torch.Tensor:
    """Positions outside the bins have a bin number that is negative, or too large."""
    position = x[..., 0] + 0.5
    inside, result = (position >= 0) & (position < 1), position.clone()
    widths = x[inside].softmax(-1)
    edges = functional.pad(widths.cumsum(-1), (1, 0))
    number = (position[inside][:, None] >= edges).sum(-1, keepdim=True) - 1
    edge, width = (values.gather(-1, number).squeeze(-1) for values in (edges, widths))
    result[inside] = (position[inside] - edge) / width
    return result


def _totals(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = x[..., 0] > 0
    rows = x[mask]
    means = rows.mean(0), rows.mean(), rows.mean((0, 1)), x[x > 0].mean()
    return *means, rows.sum(), rows.sum(0, keepdim=True), rows.sum(-1).sum(0), (rows > 0).sum()


FUNCTIONS: list[Callable[[torch.Tensor], Results]] = [
    _by_another_form_of_the_mask,
    _by_a_mask_and_its_inverse,
    _constants,
    _layers,
    _experts,
    _added,
    _sorted,
    _spline,
    _totals,
]


def _compare(pte: bytes, x: torch.Tensor, expected: Results) -> None:
    expected = expected if isinstance(expected, tuple) else (expected,)
    for engine in ("reference", "openvino"):
        results = runtime.load_program(pte, engine=engine).run("forward", [x])
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value, atol=ATOL, rtol=RTOL, equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__.lstrip("_"))
def test_delegated(function: Callable[[torch.Tensor], Results]) -> None:
    lowered = lower_unchecked(Function(function), (X,))
    assert not lowered.report.undelegated
    pte = lowered.pte
    for x in INPUTS.values():
        _compare(pte, x, function(x))


@pytest.mark.parametrize("function", [_by_a_mask_and_its_inverse, _constants, _layers, _totals])
def test_delegated_with_a_dynamic_size(function: Callable[[torch.Tensor], Results]) -> None:
    shapes = (({1: Dim("rows", min=2, max=64)},),)
    lowered = lower_unchecked(Function(function), (X,), dynamic_shapes=shapes)
    assert not lowered.report.undelegated
    pte = lowered.pte
    for x in INPUTS.values():
        longer = torch.cat((x, x[:, :5]), 1)
        _compare(pte, longer, function(longer))


def _is_returned(x: torch.Tensor) -> Results:
    mask, result = x > 0, x.clone()
    result[mask] = x[mask] * 2
    return result, x[mask]


def _mixes_rows(x: torch.Tensor) -> torch.Tensor:
    mask, result = x > 0, x.clone()
    result[mask] = x[mask].cumsum(0)
    return result


def _writes_by_another_mask(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[x.flip(0) > 0] = x[x > 0]
    return result


def _divides_integers(x: torch.Tensor) -> torch.Tensor:
    integers = (x * 4).to(torch.int64)
    mask, result = integers != 0, torch.zeros_like(integers)
    result[mask] = 100 // integers[mask]
    return result


def _divides_a_number(x: torch.Tensor) -> torch.Tensor:
    integers = (x * 4).to(torch.int64)
    mask, result = integers != 0, torch.zeros_like(integers)
    result[mask] = 100 % integers[mask]
    return result


def _multiplies_rows_with_each_other(x: torch.Tensor) -> torch.Tensor:
    rows = x[x[..., 0] > 0]
    return functional.linear(rows, rows).sum(1).sum(0)


@pytest.mark.parametrize(
    "function",
    [
        *(_is_returned, _mixes_rows, _writes_by_another_mask, _divides_integers),
        *(_divides_a_number, _multiplies_rows_with_each_other),
    ],
)
def test_undelegated(function: Callable[[torch.Tensor], Results]) -> None:
    lowered = lower_unchecked(Function(function), (X,))
    assert "aten.index.Tensor" in reasons(lowered.report)
    _compare(lowered.pte, X, function(X))
