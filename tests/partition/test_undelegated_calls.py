"""Ops preserved for Core ML: a call that ends up on the CPU is decomposed, or has a kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from ops.op_samples import ACCEPTED
from ops.op_samples.sample import Calls, Sample
from support.compressed import IntxWeightOnlyConfig, PerAxis, PerGroup, compressed, tokens
from support.failing_conversions import MESSAGE, fail_as_a_whole, fresh_trials
from support.lowering import Lowered, fp32_specs, lower, reasons
from support.partitioned import ATOL, RTOL, assert_equal_eager, example
from torch import nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn import functional

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.ops import record_of

# ExecuTorch itself has neither kernels for these nor anything to make of them.
_UNKNOWN_TO_EXECUTORCH = frozenset(
    {
        "aten._linalg_det.default",
        "aten._linalg_solve_ex.default",
        "aten.adaptive_max_pool2d.default",
        "aten.adaptive_max_pool3d.default",
        "aten.bucketize.Tensor",
        "aten.cumprod.default",
        "aten.diagonal_scatter.default",
        "aten.exp2.default",
        "aten.linalg_inv_ex.default",
        "aten.remainder.Scalar_Tensor",
        "aten.round.decimals",
        "aten.scatter.reduce",
        "aten.scatter.value_reduce",
        "aten.searchsorted.Tensor",
        "aten.var_mean.correction",
    }
)


def wanted_in_aten(node: Node) -> bool:
    """Return whether a call is in ATen dialect, in which ops to preserve are asked for."""
    return isinstance(node.target, OpOverload)


def composite_calls() -> tuple[Sample, ...]:
    """Return a call of every preserved op that core ATen lacks."""
    found: dict[str, Sample] = {}
    for sample in (s for samples in ACCEPTED.values() for s in samples):
        rule = record_of(sample.target)
        kept = rule is not None and rule.preserve and torch.Tag.core not in sample.overload.tags
        if kept and sample.compare and sample.target not in _UNKNOWN_TO_EXECUTORCH:
            found.setdefault(sample.target, sample)
    return tuple(found.values())


def wanted_nowhere(_: Node) -> bool:
    return False


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [wanted_in_aten, wanted_nowhere])
def test_every_preserved_op_runs_on_the_cpu(wanted: Callable[[Node], bool]) -> None:
    samples = composite_calls()
    module = Calls(samples)
    lowered = lower(module, module.inputs(), node_filter=wanted)
    assert not lowered.report.partitions
    # Two have become other ops before anybody is asked.
    become = {
        "aten.batch_norm.default": "aten._native_batch_norm_legit_no_training.default",
        "aten.unfold.default": "aten.unfold_copy.default",
    }
    targets = {become.get(sample.target, sample.target) for sample in samples}
    if wanted is wanted_nowhere:
        # Tensors made of numbers, and the norm, which only ExecuTorch's table decomposes.
        targets -= {"aten.eye.m", "aten.eye.default", "aten.linalg_vector_norm.default"}
    assert targets <= {node.op for node in lowered.report.undelegated}
    results = runtime.load_program(lowered.pte).run("forward", list(module.inputs()))
    for actual, expected in zip(results, module(*module.inputs()), strict=True):
        torch.testing.assert_close(actual, expected, atol=ATOL, rtol=RTOL)


class Layers(nn.Module):
    """Composite ops in a row: of weights, of numbers, and of sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.hardswish(self.norm(self.linear(x)))
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.share(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", ["linear", "layer_norm", "hardswish", "scaled_dot_product"])
def test_a_preserved_call_that_fails_to_convert_runs_on_the_cpu(
    op: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_trials(monkeypatch, tmp_path)
    fail_as_a_whole(monkeypatch, f"aten.{op}")
    module, inputs = Layers(), example(2, 3, 4)
    sizes = {"x": {1: torch.export.Dim("rows", min=2, max=9)}} if dynamic else None
    exported = torch.export.export(module.eval(), inputs, dynamic_shapes=sizes)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    lowered = Lowered.of(edge, partitioner)
    (name,) = (name for name in reasons(lowered.report) if op in name)
    assert MESSAGE in reasons(lowered.report)[name]
    # ExecuTorch has a kernel for linear.
    assert (name in lowered.operators) is (op == "linear")
    pte = lowered.pte
    for rows in (3, 5) if dynamic else (3,):
        assert_equal_eager(pte, module, example(2, rows, 4))


class Branch(nn.Module):
    """A convolution before control flow, and in a branch of it, with a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 4, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def branch(y: torch.Tensor) -> torch.Tensor:
            return functional.hardswish(self.conv(y)) + functional.hardswish(y)

        x = functional.hardswish(self.conv(x))
        return self.conv(torch.cond(x.sum() > 0, branch, torch.neg, (x,)))


@pytest.mark.share(2)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_preserved_call_in_a_branch_is_decomposed(sign: int) -> None:
    module, inputs = Branch(), tuple(sign * 9 * x for x in example(2, 4, 5))
    lowered = lower(module, inputs)
    delegated = [op for partition in lowered.report.partitions for op, _ in partition.ops]
    assert {"aten.conv1d.default", "aten.hardswish.default"} <= set(delegated)
    assert_equal_eager(lowered.pte, module, inputs)


def test_decomposed_results_of_the_program_keep_their_order() -> None:
    class Returned(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            kept = functional.pad(x, (0, 0))
            return functional.softplus(x), kept, *x.max(1), functional.softplus(kept)

    module, inputs = Returned(), example(2, 4)
    lowered = lower(module, inputs, node_filter=wanted_in_aten)
    results = runtime.load_program(lowered.pte).run("forward", list(inputs))
    for actual, expected in zip(results, module(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize(
    "config",
    [
        IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    ],
    ids=["channels", "groups"],
)
def test_left_over_calls_on_compressed_weights_are_decomposed(config: Any) -> None:
    module, inputs = compressed(config), tokens()
    lowered = lower(module, inputs, node_filter=wanted_in_aten)
    assert not lowered.report.partitions
    assert_equal_eager(lowered.pte, module, inputs)
