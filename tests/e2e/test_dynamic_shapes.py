"""Programs with dynamic dimensions: any size of the range, on every host and engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs
from support.partitioned import delegate_functions
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.export import Dim
from torch.nn import functional

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import InputError

ATOL, RTOL = ATOL_RTOL["fp32"]
Shapes = tuple[tuple[int, ...], ...]

S, T = Dim("s", min=2, max=8), Dim("t", min=2, max=9)
EVEN = {2: 2 * Dim("h", min=3, max=12), 3: 2 * Dim("w", min=3, max=12)}
ROWS = torch.contiguous_format
IMAGES = (((1, 2, 6, 24),), ((1, 2, 16, 14),))
X = ((3, 5, 4),)
XS = (((2, 9, 4),), ((8, 8, 4),))


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        forward: What it computes.
        example: Shapes of the inputs it is exported with.
        dynamic: Dynamic shapes for ``torch.export``.
        runs: Shapes to run it with.
        refused: Shapes, and what is said of them.
        left: Ops that stay on the CPU.
        partitions: How many delegates there are.
    """

    forward: Callable[..., Any]
    example: Shapes
    dynamic: tuple[Any, ...]
    runs: tuple[Shapes, ...]
    refused: tuple[tuple[Shapes, str], ...] = ()
    left: frozenset[str] = frozenset()
    partitions: int = 1


class Computing(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self._forward = forward
        self.linear = nn.Linear(4, 4)

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def pooled(module):
    return Case(lambda _, x: module(x), ((1, 2, 8, 10),), (EVEN,), IMAGES)


def computing(forward, **options):
    """Return the case of one input with two dynamic dimensions."""
    return Case(lambda _, x: forward(x), X, ({0: S, 1: T},), XS, **options)


CASES = {
    "named": Case(
        lambda m, x: m.linear(x).relu(),
        ((3, 4),),
        ({0: S},),
        (((2, 4),), ((8, 4),)),
        (
            (((1, 4),), r"'inputs_0' .* dimension 0: got 1 \(shape \[1, 4\]\), expected 2\.\.8"),
            (((9, 4),), r"input 0 .*: got float32\[9, 4\] \(9 in dimension 0, at most 8\)"),
            (((3, 3),), "'inputs_0' has the wrong size in dimension 1: got 3 .*expected 4"),
            (((3,),), r"input 0 \(inputs_0\) of method 'forward' has the wrong shape"),
        ),
    ),
    # Torch traces with 2 or more, and takes 1 when the program runs.
    "one": Case(
        lambda m, x: m.linear(x).relu().sum(1, keepdim=True) * x,
        ((3, 4),),
        ({0: Dim("n", min=1, max=8)},),
        (((1, 4),), ((8, 4),)),
        ((((0, 4),), r"'inputs_0' .* dimension 0: got 0 .*expected 1\.\.8"),),
    ),
    "one of two": Case(
        lambda m, x, y: m.linear(x).repeat(2, 1) + y,
        ((3, 4), (6, 4)),
        ({0: Dim("n", max=8)}, {0: 2 * Dim("n", max=8)}),
        (((1, 4), (2, 4)), ((8, 4), (16, 4))),
        ((((1, 4), (1, 4)), r"'inputs_1' .* 0: got 1 .*expected 2\.\.16"),),
    ),
    "one in the second delegate": Case(
        lambda _, x: torch.asinh(x + 1).view(x.shape[0] * x.shape[1], 4).cos(),
        X,
        ({0: Dim("n", min=1, max=8), 1: T},),
        (((1, 2, 4),), ((8, 9, 4),)),
        left=frozenset({"aten.asinh.default"}),
        partitions=2,
    ),
    "automatic": Case(
        lambda m, x: m.linear(x).relu(),
        ((3, 4),),
        ({0: Dim.AUTO(min=2, max=8)},),
        (((2, 4),), ((8, 4),)),
    ),
    "means of groups": Case(
        lambda _, x, group: torch.zeros(3, 4).scatter_reduce(
            0, group.gt(0).long()[:, None].expand(-1, 4), x, "mean", include_self=False
        ),
        ((3, 4), (3,)),
        ({0: S}, {0: S}),
        (((2, 4), (2,)), ((8, 4), (8,))),
    ),
    "padded integers": computing(lambda x: functional.pad((x > 0).long(), (0, 0, 1, 2), value=7)),
    # Without an upper bound it is the size of the example.
    "unbounded": Case(
        lambda m, x: m.linear(x).relu(),
        ((5, 4),),
        ({0: Dim.AUTO},),
        (((2, 4),), ((5, 4),)),
        ((((6, 4),), r"6 in dimension 0, at most 5"),),
    ),
    "shared": Case(
        lambda m, x, y: m.linear(x) + y,
        ((3, 4), (3, 4)),
        ({0: S}, {0: S}),
        (((2, 4), (2, 4)), ((8, 4), (8, 4))),
        (
            (
                ((2, 4), (3, 4)),
                r"'inputs_1' .* 0: got 3 .*expected 2 \(equal to dimension 0 of 'inputs_0'\)",
            ),
        ),
    ),
    "derived": Case(
        lambda m, x, y: m.linear(x).repeat(2, 1) + y,
        ((3, 4), (6, 4)),
        ({0: S}, {0: 2 * S}),
        (((2, 4), (4, 4)), ((8, 4), (16, 4))),
        ((((3, 4), (5, 4)), r"'inputs_1' .* 0: got 5 .*expected 6 \(2\*s0, given by"),),
    ),
    "multiple": Case(
        lambda m, x: m.linear(x.reshape(-1, 2, 4)).sum(1),
        ((6, 4),),
        ({0: 2 * S},),
        (((4, 4),), ((16, 4),)),
        ((((5, 4),), r"got 5 .*expected 2\*s0 for a whole number s0"),),
    ),
    "one more": Case(
        lambda m, x, y: m.linear(x) + y[1:],
        ((3, 4), (4, 4)),
        ({0: S}, {0: S + 1}),
        (((2, 4), (3, 4)), ((8, 4), (9, 4))),
        # It would broadcast.
        ((((3, 4), (3, 4)), r"got 3 .*expected 4 \(s0 \+ 1, given by"),),
    ),
    # Numbers computed from shapes, inside of the delegate
    "flattened": computing(lambda x: x.relu().flatten(0, 1)),
    "heads": computing(
        lambda x: (
            x.view(x.shape[0], x.shape[1], 2, 2)
            .transpose(1, 2)
            .reshape(x.shape[0] * 2, x.shape[1], 2)
            .relu()
        )
    ),
    "sliced": computing(lambda x: x[:, : x.shape[0]].relu()),
    "filled": computing(lambda x: torch.cat([x, torch.zeros(x.shape[0], x.shape[1], 1)], -1)),
    "counted": computing(lambda x: x + torch.arange(x.shape[1])[None, :, None] * x.shape[0]),
    "last": computing(lambda x: x[:, x.shape[1] - 1].relu()),
    "causal attention": computing(
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    ),
    # MIL declares what is selected as large as the branches.
    "chosen by a larger condition": computing(
        lambda x: torch.where(x > 0, x[:1, :1] * 0, x[:, :1] * 2).flatten(0, 1)
    ),
    "chosen of whole numbers": computing(
        lambda x: torch.where(x > 0, (x[:1] * 9).int(), torch.ones((), dtype=torch.int32)) + 1
    ),
    "chosen of truths": computing(
        lambda x: torch.where(x > 0, x[:1] > 1, x[:1] > -1).logical_not()
    ),
    "attention of heads": computing(
        lambda x: nn.functional.scaled_dot_product_attention(
            *(x.view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2) for _ in range(3)),
            attn_mask=(x.sum(-1) > 0)[:, None, None, :],
        )
    ),
    # Used after an op of the CPU alone, a size is computed there.
    "in the second delegate": computing(
        lambda x: torch.asinh(x + 1).view(x.shape[0] * x.shape[1], 4).cos(),
        left=frozenset({"aten.asinh.default"}),
        partitions=2,
    ),
    # Needed in two delegates, and by the caller: none may cross.
    "in both delegates": computing(
        lambda x: (
            torch.asinh(x.view(x.shape[0] * x.shape[1], 4).relu())
            .view(x.shape[0], x.shape[1], 4)
            .cos()
        ),
        left=frozenset(
            {"aten.asinh.default", "aten.sym_size.int", "operator.mul", "aten.view_copy.default"}
        ),
        partitions=2,
    ),
    "returned": computing(
        lambda x: (x.view(x.shape[0] * x.shape[1], 4).relu(), x.shape[0]),
        left=frozenset({"aten.sym_size.int", "operator.mul", "aten.view_copy.default"}),
    ),
    # How sentence embeddings are made of those of tokens.
    "mean under a mask": Case(
        lambda _, x, mask: _masked_mean(x, mask),
        ((2, 5, 4), (2, 5)),
        ({1: T}, {1: T}),
        (((2, 2, 4), (2, 2)), ((2, 9, 4), (2, 9))),
    ),
    # Strides of the copy are products of sums, written out.
    "copied": pooled(lambda x: functional.max_pool2d(x, 3, 2).clone(memory_format=ROWS).relu()),
    # Windows that are placed at run time
    "pooled rounding up": pooled(nn.MaxPool2d(3, 2, ceil_mode=True)),
    "pooled with padding": pooled(nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "pooled to a size": pooled(nn.AdaptiveAvgPool2d((6, 1))),
    "volume pooled to a size": Case(
        lambda _, x: nn.functional.adaptive_avg_pool3d(x, (2, 3, 4)),
        ((1, 2, 5, 6, 8),),
        ({2: Dim("d", min=3, max=9), 4: Dim("w", min=5, max=12)},),
        (((1, 2, 3, 6, 12),), ((1, 2, 9, 6, 5),)),
    ),
    "line pooled to a size": Case(
        lambda _, x: nn.functional.adaptive_avg_pool1d(x, 3),
        ((1, 2, 8),),
        ({2: Dim("w", min=5, max=12)},),
        (((1, 2, 5),), ((1, 2, 12),)),
    ),
}


def _masked_mean(x, mask):
    weights = (mask > 0).unsqueeze(-1).expand(x.size()).float()
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def edge_of(case):
    torch.manual_seed(0)
    module = Computing(case.forward).eval()
    example = tuple(torch.randn(shape) for shape in case.example)
    exported = torch.export.export(module, example, dynamic_shapes={"inputs": case.dynamic})
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    return module, partitioner.report, edge


def lowered(case):
    module, report, edge = edge_of(case)
    return module, report, edge.to_executorch().buffer


@pytest.mark.share(5)
@pytest.mark.parametrize("name", CASES)
def test_every_size(name):
    case = CASES[name]
    module, report, pte = lowered(case)
    assert {node.op for node in report.undelegated} == case.left
    assert len(report.partitions) == case.partitions
    for host, engine in itertools.product(("python", "stock"), ("openvino", "reference")):
        program = runtime.load_program(pte, host=host, engine=engine)
        for shapes in (case.example, *case.runs):
            inputs = [torch.randn(shape) for shape in shapes]
            expected = module(*inputs)
            results = program.run("forward", inputs)
            expected = expected if isinstance(expected, tuple) else (expected,)
            assert [getattr(r, "shape", r) for r in results] == [
                getattr(e, "shape", e) for e in expected
            ]
            torch.testing.assert_close(results[0], expected[0], atol=ATOL, rtol=RTOL)
        for shapes, message in case.refused:
            with pytest.raises(InputError, match=message):
                program.run("forward", [torch.randn(shape) for shape in shapes])


def test_equal_bytes():
    assert lowered(CASES["derived"])[2] == lowered(CASES["derived"])[2]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("chosen")])
def test_what_is_selected_is_declared_as_large_as_its_condition(name):
    (function,) = delegate_functions(edge_of(CASES[name])[2])
    # Bools are selected by logic.
    selection = next(op for op in function.block.ops if op.type in ("select", "logical_or"))
    assert selection.outputs[0].type.shape == (None, None, 4)


def test_a_mean_under_a_mask_has_a_known_size():
    (function,) = delegate_functions(edge_of(CASES["mean under a mask"])[2])
    assert "shape" not in {op.type for op in function.block.ops}
    assert [output.type.shape for output in function.outputs] == [(2, 4)]


def test_report_shows_ranges():
    report = lowered(CASES["derived"])[1]
    assert report.partitions[0].flexible == (
        ("inputs_0", "[2..8, 4]"),
        ("inputs_1", "[4..16, 4]"),
    )
    assert "    takes inputs_1 [4..16, 4]" in report.to_table().splitlines()
    (partition,) = report.to_dict()["partitions"]
    assert partition["flexible"][1] == ("inputs_1", "[4..16, 4]")


def test_report_tells_bounds_that_nobody_gave():
    report = lowered(CASES["unbounded"])[1]
    assert report.partitions[0].flexible == (("inputs_0", "[2..5 (of the example), 4]"),)


def test_lowering_fixes_no_size_of_the_program():
    case = CASES["counted"]
    exported = torch.export.export(
        Computing(case.forward),
        tuple(torch.randn(shape) for shape in case.example),
        dynamic_shapes={"inputs": case.dynamic},
    )
    before = {str(symbol): str(found) for symbol, found in exported.range_constraints.items()}
    CoreMLPartitioner().plan(exported)
    to_edge_transform_and_lower(exported, partitioner=[CoreMLPartitioner()])
    after = {str(symbol): str(found) for symbol, found in exported.range_constraints.items()}
    assert after == before
    (placeholder,) = (n for n in exported.graph.nodes if n.name == "inputs_0")
    sizes = placeholder.meta["val"].shape[:2]
    assert [str(size) for size in sizes] == list(before)


def test_windows_that_may_begin_beyond_the_input_stay():
    case = pooled(nn.MaxPool2d(3, 3, 1, ceil_mode=True))
    report = lowered(case)[1]
    texts = {str(node.reason) for node in report.undelegated}
    assert "where windows lie depends on a size that is dynamic" in texts
