"""``as_strided`` indexes the memory of the tensor that its argument is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lowering import Function, lower_unchecked
from torch import nn
from torch.export import Dim, export

from coreml_delegate import runtime
from coreml_delegate.transforms.executorch_gaps import stride_over_bases

X = torch.arange(24.0).reshape(4, 6)


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().t()
    y.mul_(2.0)
    return y.as_strided((3, 2), (1, 4))


def _branch(x: torch.Tensor) -> Any:
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return x.t().as_strided((3, 2), (1, 4)).sum(0)

    return torch.cond(x.sum() > 0, transposed, lambda x: x[0, :2] * 1, (x,))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: x.t().as_strided((3, 2), (1, 4)),
    "of a result": lambda x: x.sin().mT.as_strided((3, 2), (1, 4)),
    "result in the order of its argument": lambda x: x.t().sin().as_strided((3, 2), (1, 4)),
    "permuted twice": lambda x: (
        x.reshape(2, 2, 6).permute(2, 0, 1).mT.as_strided((2, 5), (7, 3), 1)
    ),
    "offset of a slice": lambda x: x[1:, 2:].as_strided((2, 2), (6, 1)),
    "offset of its own": lambda x: x[1:].as_strided((3, 2), (1, 4), 0),
    "beyond the view": lambda x: x[:2].as_strided((4, 3), (6, 2)),
    "expanded": lambda x: x[:1].expand(4, 6).as_strided((2, 2), (6, 1)),
    "one of several": lambda x: x.unbind(1)[2].as_strided((3,), (5,)),
    "copied": lambda x: torch.as_strided_copy(x.t(), (3, 2), (1, 4)),
    "copy by reshape": lambda x: x.t().reshape(24).as_strided((3, 2), (1, 4)),
    "written": _written,
    "filled diagonal": lambda x: x.t().clone().fill_diagonal_(7.0),
    "in a branch": _branch,
}


def test_strides_of_views() -> None:
    module = Function(lambda x: {name: function(x) for name, function in VIEWS.items()})
    lowered = lower_unchecked(module, (X,))
    assert not lowered.report.undelegated
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [X])
        for result, (name, expected) in zip(results, module(X).items(), strict=True):
            torch.testing.assert_close(result, expected, msg=name)


def test_other_programs_are_unchanged() -> None:
    function = Function(lambda x: (x[1:].as_strided((3, 2), (1, 4)), x.as_strided((2,), (3,), 9)))
    program = export(function, (X,))
    assert stride_over_bases(program) is program


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(24.0).reshape(4, 6)[:, :3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.as_strided((2, 2), (6, 1))


def test_a_constant_with_gaps_in_memory_is_folded() -> None:
    x = torch.zeros(2, 2)
    lowered = lower_unchecked(_Table(), (x,))
    (result,) = runtime.load_program(lowered.pte, engine="reference").run("forward", [x])
    assert torch.equal(result, _Table()(x))


def test_an_input_with_gaps_in_memory_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    program = export(Function(lambda x: x.as_strided((2, 2), (6, 1))), (X[:, :3],))
    stride_over_bases(program)
    assert "memory of inputs_0 that no program has" in caplog.text


@pytest.mark.parametrize("transposed", [True, False])
def test_a_view_of_unknown_sizes_is_warned_of(
    transposed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.t() if transposed else x.sin()).as_strided((2, 2), (1, 4))

    program = export(Function(function), (X,), dynamic_shapes=(({0: Dim("rows", min=2)},),))
    assert stride_over_bases(program) is program
    assert ("sizes are known only when the program runs" in caplog.text) is transposed
