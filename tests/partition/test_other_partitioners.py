"""Our partitioner beside others: calls that Core ML does not take are handed on as they came."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.partitioner import PartitionResult
from executorch.exir.graph_module import get_control_flow_submodules
from support.eager_backend import BACKEND_ID, EagerDelegate, EagerTestPartitioner
from support.gates import needs_compiler
from support.lowering import fp32_specs
from support.other_partitioners import KINDS, LINEAR, Layers, exported, lower
from support.partitioned import example
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.ops.call import target_name
from coreml_delegate.partition import do_not_delegate
from coreml_delegate.runtime.program import stock

pytestmark = needs_compiler

ATTENTION = "aten.scaled_dot_product_attention.default"
TANH, SIN = "aten.tanh.default", "aten.sin.default"
OURS, XNNPACK = "CoreMLBackend", "XnnpackBackend"


class Branches(Layers):
    """Layers of which one is in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def then(y: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.linear(torch.tanh(y)))

        return torch.cond(x.sum() > 0, then, torch.neg, (x,))


def check_runs(
    pte: bytes, module: nn.Module, *inputs: torch.Tensor, precision: str = "fp32"
) -> None:
    """The program computes on the stock host what PyTorch computes, run after run."""
    stock.register(EagerDelegate, backend_id=BACKEND_ID)
    program, expected = runtime.load_program(pte, host="stock"), copy.deepcopy(module)
    atol, rtol = ATOL_RTOL[precision]  # states are fp16
    for x in inputs:
        (actual,) = program.run("forward", [x])
        torch.testing.assert_close(actual, expected(x), atol=atol, rtol=rtol)


def ours(**options: Any) -> CoreMLPartitioner:
    return CoreMLPartitioner(compile_specs=fp32_specs(), **options)


def marked(program: ExportedProgram, op: str) -> ExportedProgram:
    for node in program.graph.nodes:
        if target_name(node.target) == op:
            do_not_delegate(node)
    return program


# The composite ops, and what the user writes to leave them out.
LEFT_OUT: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "op": lambda op: {"skip_ops_for_coreml_delegation": [op]},
    "only": lambda _: {"only_ops": ["tanh", "sin"]},
    "filter": lambda op: {"node_filter": lambda node: target_name(node.target) != op},
    "mark": lambda _: {},
}


@pytest.mark.share(4)
@pytest.mark.parametrize("op", [LINEAR, ATTENTION])
@pytest.mark.parametrize("how", LEFT_OUT)
def test_the_next_partitioner_gets_a_left_out_composite_op_whole(op: str, how: str) -> None:
    module, (x,) = Layers(attention=op == ATTENTION).eval(), example(1, 2, 3, 4)
    program = torch.export.export(module, (x,))
    program = marked(program, op) if how == "mark" else program
    first = ours(**LEFT_OUT[how](op))
    lowered = lower(program, first, EagerTestPartitioner(op, whole=True))
    assert lowered.delegates == [(OURS, (TANH,)), (BACKEND_ID, (op,)), (OURS, (SIN,))]
    assert [node.op for node in first.report.undelegated] == [op]
    check_runs(lowered.pte, module, x)


@pytest.mark.parametrize("op", [LINEAR, ATTENTION])
def test_a_left_out_composite_op_that_nobody_takes_runs_on_the_cpu(op: str) -> None:
    """ExecuTorch has a kernel for the one; the other is decomposed."""
    module, (x,) = Layers(attention=op == ATTENTION).eval(), example(1, 2, 3, 4)
    first = ours(skip_ops_for_coreml_delegation=[op])
    lowered = lower(torch.export.export(module, (x,)), first)
    assert lowered.delegates == [(OURS, (TANH,)), (OURS, (SIN,))]
    assert (op in lowered.outside) is (op == LINEAR)
    assert not first.report.without_kernel
    check_runs(lowered.pte, module, x)


def test_parts_of_a_left_out_op_stay_outside_if_another_partitioner_decomposes_it() -> None:
    module, (x,) = Layers(attention=True).eval(), example(1, 2, 3, 4)
    first = ours(node_filter=lambda node: target_name(node.target) != ATTENTION)
    lowered = lower(torch.export.export(module, (x,)), first, EagerTestPartitioner())
    assert lowered.delegates == [(OURS, (TANH,)), (OURS, (SIN,))]
    assert "aten.bmm.default" in lowered.outside
    reasons = {str(node.reason) for node in first.report.undelegated}
    assert reasons == {"node_filter is false for it"}
    check_runs(lowered.pte, module, x)


def test_a_view_that_is_skipped_does_not_come_back_as_another() -> None:
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.tanh(x).unflatten(1, (2, 2)))

    (x,) = example(3, 4)
    first = ours(skip_ops_for_coreml_delegation=["aten.unflatten"])
    lowered = lower(torch.export.export(Flat(), (x,)), first)
    assert lowered.delegates == [(OURS, (TANH,)), (OURS, (SIN,))]
    check_runs(lowered.pte, Flat(), x)


def test_each_call_of_an_op_goes_its_own_way() -> None:
    """One is left out, one Core ML takes whole, and of one, with fewer keys, it takes the parts."""

    class Three(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.scaled_dot_product_attention(x, x, x).asinh()
            key = y[:, :1]
            y = functional.scaled_dot_product_attention(y, key, key, enable_gqa=True).asinh()
            return functional.scaled_dot_product_attention(y, y, y)

    (x,) = example(1, 2, 3, 4)
    program = torch.export.export(Three(), (x,))
    first, *_ = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    do_not_delegate(first)
    lowered = lower(program, ours(), EagerTestPartitioner(ATTENTION, whole=True))
    (_, left_out), (_, parts), (_, whole) = lowered.delegates
    assert [backend for backend, _ in lowered.delegates] == [BACKEND_ID, OURS, OURS]
    assert left_out == whole == (ATTENTION,)
    assert "aten.bmm.default" in parts
    assert lowered.outside == ["aten.asinh.default", "aten.asinh.default"]
    check_runs(lowered.pte, Three(), x)


@pytest.mark.share(2)
@pytest.mark.parametrize("given_up", [{"min_partition_nodes": 2}, {"max_partitions": 1}])
def test_an_op_whose_partition_is_given_up_is_handed_on_whole(given_up: dict[str, int]) -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.linear = nn.Linear(4, 64), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.asinh(torch.tanh(self.wide(torch.sin(self.wide(x)[:, :4])))))

    module, (x,) = Apart().eval(), example(3, 4)
    program = torch.export.export(module, (x,))
    lowered = lower(program, ours(**given_up), EagerTestPartitioner(LINEAR, whole=True))
    assert [backend for backend, _ in lowered.delegates] == [OURS, BACKEND_ID]
    assert lowered.delegates[1] == (BACKEND_ID, (LINEAR,))
    check_runs(lowered.pte, module, x)


@pytest.mark.share(2)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_left_out_call_in_a_branch_stays_out_of_core_ml(is_first: bool) -> None:
    module, (x,) = Branches().eval(), example(2, 4)
    both = [ours(skip_ops_for_coreml_delegation=[LINEAR]), XnnpackPartitioner()]
    lowered = lower(torch.export.export(module, (x,)), *(both if is_first else both[::-1]))
    *_, first, second, _ = lowered.delegates
    assert [first, second] == [(OURS, (TANH,)), (OURS, (SIN,))]
    assert "aten.addmm.default" in lowered.outside
    check_runs(lowered.pte, module, x, -x)


class BranchPartitioner(EagerTestPartitioner):
    """Tags single calls in branches too, and notes the lowered ops."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        tags = dict(result.partition_tags)
        for name, branch, _ in get_control_flow_submodules(exported_program.graph_module):
            for node in branch.graph.nodes:
                if self.support.is_node_supported({}, node):
                    node.meta["delegation_tag"] = f"{name}_{node.name}"
                    tags[f"{name}_{node.name}"] = self.delegation
        return PartitionResult(exported_program, tags)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_another_backend_took_in_a_branch_stays_as_it_is(is_first: bool) -> None:
    """The op is kept everywhere, because a call of it at the root is left out."""

    class RootAndBranch(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.root = nn.Linear(4, 4).requires_grad_(requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.root(x))

    module, (x,) = RootAndBranch().eval(), example(2, 4)
    both = [ours(skip_ops_for_coreml_delegation=[LINEAR]), BranchPartitioner(LINEAR, whole=True)]
    lowered = lower(torch.export.export(module, (x,)), *(both if is_first else both[::-1]))
    assert lowered.delegates.count((BACKEND_ID, (LINEAR,))) == 2
    assert not {LINEAR, "aten.addmm.default"} & set(lowered.outside)
    check_runs(lowered.pte, module, x, -x)


@pytest.mark.share(4)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_xnnpack_takes_what_is_left_out(kind: str, is_first: bool) -> None:
    program, module, inputs = exported(kind)
    both = [ours(skip_ops_for_coreml_delegation=[LINEAR]), XnnpackPartitioner([LinearConfig])]
    lowered = lower(program, *(both if is_first else both[::-1]))
    (first, _), (second, linear), (third, _) = lowered.delegates
    assert (first, second, third) == (OURS, XNNPACK, OURS)
    quantization = ["quantize_per_tensor", "dequantize_per_tensor", "dequantize_per_channel"]
    around = [f"quantized_decomposed.{name}.default" for name in quantization]
    assert sorted(linear) == sorted([LINEAR, *(around if kind == "quantized" else ())])
    check_runs(lowered.pte, module, *inputs, precision="fp16" if kind == "stateful" else "fp32")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_left_out_call_keeps_half_precision(dtype: torch.dtype, is_first: bool) -> None:
    """Its weights too, for backends that compute in half precision."""
    module, x = Layers().eval().to(dtype), example(2, 4)[0].to(dtype)
    both = [ours(skip_ops_for_coreml_delegation=[LINEAR]), EagerTestPartitioner(LINEAR, whole=True)]
    lowered = lower(torch.export.export(module, (x,)), *(both if is_first else both[::-1]))
    assert [backend for backend, _ in lowered.delegates] == [OURS, BACKEND_ID, OURS]
    seen: list[torch.dtype] = []

    class Observed(EagerDelegate):
        def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            seen.extend(tensor.dtype for tensor in (*inputs, *self.weights.values()))
            return super().__call__(inputs)

    stock.register(Observed, backend_id=BACKEND_ID)
    (actual,) = runtime.load_program(lowered.pte, host="stock").run("forward", [x])
    assert seen == [dtype] * 3
    torch.testing.assert_close(actual, module(x))


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_the_layout_of_a_left_out_recurrent_layer_stays_outside() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(4, 4, batch_first=True)
            self.second = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)[0])[0]

    module, (x,) = Recurrent().eval(), example(1, 2, 4)
    first = ours(skip_modules=["first"])
    lowered = lower(torch.export.export(module, (x,)), first)
    assert "aten.lstm.input" in {node.op for node in first.report.delegated}
    assert {node.module for node in first.report.undelegated} == {"first"}
    check_runs(lowered.pte, module, x)
