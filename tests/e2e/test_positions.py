"""Numbers taken out of tensors, as positions in a table: on every host and engine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import Lowered, fp32_specs
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.export import Dim

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import ExecutionError

ATOL, RTOL = ATOL_RTOL["fp32"]
ROWS, TAKEN = 32, 4
X = torch.randn(1, TAKEN, 8, generator=torch.Generator().manual_seed(0))
WHERE = list(itertools.product(("python", "stock"), ("openvino", "reference")))


class Table(nn.Module):
    """Cosines and sines by row, as rotary embeddings have them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._forward = forward
        angles = torch.arange(ROWS)[:, None] / 7.0 ** torch.arange(8)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("kept", torch.zeros(1, ROWS, 8))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> Any:
        return self._forward(self, x, position)


def checked(position: torch.Tensor, rows: int = ROWS - TAKEN) -> int:
    """The position, and what ExecuTorch's models tell the exporter of it."""
    number = position.item()
    torch._check(number >= 0)
    torch._check(number <= rows)
    return number


def rotated(m, x, position):
    start, count = checked(position[-1]), x.shape[1]
    cos, sin = (table.narrow(0, start, count) for table in (m.cos, m.sin))
    return x * cos + x.roll(1, -1) * sin


def sliced(m, x, position):
    start = checked(position[-1])
    return x * m.cos[start : start + TAKEN], m.sin[start : start + TAKEN]


def behind(m, x, position):
    start = checked(position[0])
    return torch.asinh(x * 2).cos() * m.cos.narrow(0, start, TAKEN)


def written(m, x, position):
    kept = torch.slice_scatter(m.kept, x, 1, (start := checked(position[0])), start + TAKEN)
    return kept * 2


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        forward: What it computes.
        position: What it is exported with.
        rows: Rows of the first input to run it with.
        dynamic: Whether their number is dynamic.
        left: Ops that stay on the CPU.
        partitions: How many delegates there are.
    """

    forward: Callable[..., Any]
    position: torch.Tensor = torch.tensor([3])  # noqa: RUF009 - nothing changes it
    rows: tuple[int, ...] = (TAKEN,)
    dynamic: bool = False
    left: frozenset[str] = frozenset()
    partitions: int = 1


CASES = {
    "narrow": Case(rotated),
    "slice": Case(sliced),
    "any number of rows": Case(rotated, rows=(1, 3, TAKEN), dynamic=True),
    "one row": Case(lambda m, x, p: x * m.cos[checked(p[0])]),
    "one row as a slice": Case(lambda m, x, p: x * m.cos.narrow(0, checked(p[0]), 1)),
    "scalar": Case(lambda m, x, p: x * m.cos.narrow(0, checked(p), TAKEN), torch.tensor(3)),
    "vector": Case(lambda m, x, p: x * m.cos.narrow(0, checked(p), TAKEN)),
    "matrix": Case(lambda m, x, p: x * m.cos.narrow(0, checked(p), TAKEN), torch.tensor([[3]])),
    "int32": Case(rotated, torch.tensor([3], dtype=torch.int32)),
    "two": Case(
        lambda m, x, p: x * m.cos[checked(p[0])] + m.sin[checked(p[1])], torch.tensor([3, 5])
    ),
    "written": Case(written),
    "number": Case(lambda m, x, p: x * checked(p[0]) + p.float().mean().item()),
    "behind what stays": Case(behind, left=frozenset({"aten.asinh.default"}), partitions=2),
}


def lowered(case: Case) -> Lowered:
    rows = {1: Dim("rows", min=1, max=TAKEN)} if case.dynamic else None
    exported = torch.export.export(
        Table(case.forward),
        (X, case.position),
        dynamic_shapes={"x": rows, "position": None},
    )
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    return Lowered.of(edge, partitioner)


@pytest.mark.share(6)
@pytest.mark.parametrize("name", CASES)
def test_every_position(name: str) -> None:
    case = CASES[name]
    found = lowered(case)
    assert set(found.operators) == case.left
    assert len(found.report.partitions) == case.partitions
    module, pte = Table(case.forward), found.pte
    for host, engine in WHERE:
        program = runtime.load_program(pte, host=host, engine=engine)
        for rows, number in itertools.product(case.rows, (0, 9, ROWS - TAKEN)):
            inputs = X[:, :rows], torch.full_like(case.position, number)
            expected = module(*inputs)
            results = program.run("forward", list(inputs))
            wanted = expected if isinstance(expected, tuple) else (expected,)
            for result, tensor in zip(results, wanted, strict=True):
                torch.testing.assert_close(result, tensor, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize(("host", "engine"), WHERE)
def test_rows_that_are_not_there_are_an_error(host: str, engine: str) -> None:
    program = runtime.load_program(lowered(CASES["narrow"]).pte, host=host, engine=engine)
    with pytest.raises(ExecutionError, match="reshape"):
        program.run("forward", [X, torch.tensor([ROWS - 2])])


def stays(forward: Callable[..., Any]) -> tuple[Lowered, set[str]]:
    """The program, and why numbers stay on the CPU."""
    found = lowered(Case(forward))
    assert "aten._local_scalar_dense.default" in found.operators
    return found, {str(n.reason) for n in found.report.undelegated}


def test_shapes_that_depend_on_values_stay() -> None:
    found, texts = stays(lambda m, x, p: x + m.cos[: checked(p[0])].sum(0))
    pattern = r"the shape \[u\d+, 8\] of aten_slice_copy_tensor depends on values"
    assert any(re.fullmatch(pattern, text) for text in texts)
    (result,) = runtime.load_program(found.pte).run("forward", [X, torch.tensor([5])])
    torch.testing.assert_close(result, X + Table(sliced).cos[:5].sum(0), atol=ATOL, rtol=RTOL)


def test_numbers_that_are_only_checked_are_dropped() -> None:
    found = lowered(Case(lambda _, x, p: (checked(p[0]), x * 2)[1]))
    assert found.operators == ()
    (result,) = runtime.load_program(found.pte).run("forward", [X, torch.tensor([5])])
    torch.testing.assert_close(result, X * 2)


def test_numbers_that_the_caller_is_given_stay() -> None:
    found, texts = stays(lambda m, x, p: (start := checked(p[0]), x * m.cos[start]))
    outside = "size _local_scalar_dense is needed outside of the partition as well, by the caller"
    assert outside in texts
    number, _ = runtime.load_program(found.pte).run("forward", [X, torch.tensor([5])])
    assert number == 5
