"""The boundary of a delegate: layouts, identities, names, containers, integers and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import Function, fp32_specs, lower, lower_core_aten, lower_unchecked, reasons
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.utils._pytree import tree_leaves

from coreml_delegate import CoreMLPartitioner, detection, runtime
from coreml_delegate.errors import InputError
from coreml_delegate.ops import ReasonCode
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.device_findings import models_of_pte

ATOL, RTOL = ATOL_RTOL["fp32"]


def assert_equal_eager(pte: bytes, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    expected = module(*inputs)
    results = runtime.load_program(pte).run("forward", list(inputs))
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for actual, tensor in zip(results, wanted, strict=True):
        torch.testing.assert_close(actual, tensor, atol=ATOL, rtol=RTOL)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.clone(), id="clone"),
        pytest.param(lambda x: (x.clone(), x.clone()), id="twice"),
        pytest.param(lambda x: x.squeeze(0), id="squeeze"),
        pytest.param(lambda x: x[:, 0:3], id="slice"),
        pytest.param(lambda x: nn.functional.dropout(x, 0.5, training=False), id="dropout"),
        pytest.param(lambda x: (lambda y: (y, y.clone()))(torch.cat([x, x])), id="result"),
        pytest.param(
            lambda x: (lambda y: (y.clone(), y.clone().view(4, 3)))(torch.cat([x, x])), id="copies"
        ),
    ],
)
def test_an_argument_can_be_returned_as_a_result(
    function: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Coremltools gives both the same name, which two features cannot share."""
    module, inputs = Function(function), (torch.ones(2, 3).to(dtype),)
    lowered = lower(module, inputs)
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


def test_a_scalar_argument_can_be_returned_as_a_result() -> None:
    module, inputs = Function(lambda x: (x.sum(), x.sum().clone())), (torch.ones(2, 3),)
    lowered = lower(module, inputs)
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


def test_the_only_feature_of_a_result_is_no_copy() -> None:
    """Indices of Core ML are int32: their cast to int64 is none, and nothing takes its place."""
    boxes, scores = torch.tensor([[[0.0, 0, 1, 1], [0, 0, 2, 2]]]), torch.tensor([[0.5, 0.6]])
    lowered = lower(Function(lambda b, s: detection.nms(b, s, max_boxes=2)), (boxes, scores))
    (model,) = models_of_pte(PteProgram.open(lowered.pte)).checked
    assert model.views[0].ops[-1].type == "non_maximum_suppression"
    (kept,) = runtime.load_program(lowered.pte, engine="reference").run("forward", [boxes, scores])
    assert kept.tolist() == [[1, 0]]


class Image(nn.Module):
    """A convolution, an activation after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


def test_calls_on_channels_last_inputs_stay_on_the_cpu_in_edge_dialect() -> None:
    """``keep_row_major`` needs ATen dialect, which ``to_edge`` keeps from the partitioner."""
    module = Image()
    inputs = (torch.rand(1, 3, 5, 6).to(memory_format=torch.channels_last),)
    lowered = lower_core_aten(module, inputs)
    assert {n.reason.code for n in lowered.report.undelegated if n.reason} == {ReasonCode.LAYOUT}
    text = reasons(lowered.report)["aten.convolution.default"]
    assert text == "'x' has dim order (0, 2, 3, 1), Core ML is row-major"
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("copied", [False, True])
def test_calls_on_cpu_results_of_another_layout_stay_on_the_cpu(copied: bool) -> None:
    class Factor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = torch.linalg.qr(self.conv(x))[1]  # column-major
            return self.conv(factor.contiguous() if copied else factor.abs())

    module, inputs = Factor(), (torch.rand(1, 1, 4, 4),)
    lowered = lower_unchecked(module, inputs)
    assert lowered.report.without_kernel[0].op == "aten.linalg_qr.default"
    layouts = [n.op for n in lowered.report.undelegated if n.reason.code is ReasonCode.LAYOUT]
    # A copy is where the layout ends; a composite op on the CPU is decomposed.
    copy = "dim_order_ops._clone_dim_order.default"
    assert layouts == ([copy] if copied else ["aten.abs.default", "aten.convolution.default"])
    assert_equal_eager(lowered.pte, module, inputs)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: Pair(x.sin(), x.cos()), id="named tuple"),
        pytest.param(lambda x: torch.max(x, 1), id="return type"),
        pytest.param(lambda x: {"a": [Pair(x.sin(), torch.sort(x, 1))]}, id="nested"),
    ],
)
def test_results_in_containers_that_a_pte_cannot_name(function: Callable[..., Any]) -> None:
    module, inputs = Function(function), (torch.rand(2, 3),)
    exported = torch.export.export(module, inputs)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    results = runtime.load_program(edge.to_executorch().buffer).run("forward", list(inputs))
    expected = tree_leaves(module(*inputs))
    for actual, tensor in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, tensor, atol=ATOL, rtol=RTOL)
    # The exported program is as it was.
    again = exported.module()(*inputs)
    assert type(again) is type(module(*inputs))


def test_inputs_in_containers_that_a_pte_cannot_name() -> None:
    class Sum(nn.Module):
        def forward(self, pair: Pair) -> torch.Tensor:
            return pair.first.sin() + pair.second

    inputs = (torch.rand(2, 3), torch.rand(2, 3))
    lowered = lower(Sum(), (Pair(*inputs),))
    (actual,) = runtime.load_program(lowered.pte).run("forward", list(inputs))
    torch.testing.assert_close(actual, Sum()(Pair(*inputs)), atol=ATOL, rtol=RTOL)


def test_row_major_copies_of_channels_last_inputs_are_delegated() -> None:
    image = Image()
    module = Function(lambda x: image(x.contiguous()))
    inputs = (torch.rand(1, 3, 5, 6).to(memory_format=torch.channels_last),)
    lowered = lower(module, inputs)
    assert lowered.operators == ("dim_order_ops._clone_dim_order.default",)
    assert_equal_eager(lowered.pte, module, inputs)


def test_channels_last_weights_are_delegated() -> None:
    module: Any = Image().to(memory_format=torch.channels_last)
    inputs = (torch.rand(1, 3, 5, 6),)
    lowered = lower(module, inputs)
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


def test_other_layouts_inside_a_partition_are_delegated() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        last = (x * 2).clone(memory_format=torch.channels_last)
        return last.relu().permute(0, 2, 3, 1).reshape(1, -1, 3) + 1

    module, inputs = Function(function), (torch.randn(1, 3, 5, 6),)
    lowered = lower(module, inputs)
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("follows", [False, True])
def test_results_of_another_layout_stay_on_the_cpu(follows: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        last = (x * 2).to(memory_format=torch.channels_last)
        return last.relu() if follows else last

    module, inputs = Function(function), (torch.randn(1, 3, 5, 6),)
    lowered = lower(module, inputs)
    texts = [str(node.reason) for node in lowered.report.undelegated]
    assert "has dim order (0, 2, 3, 1) and leaves the partition at 'output'" in texts[-1]
    assert_equal_eager(lowered.pte, module, inputs)


def test_inputs_with_names_like_constants_stay_inputs() -> None:
    class Named(nn.Module):
        def forward(
            self, x: torch.Tensor, p_weight: torch.Tensor, b_bias: torch.Tensor
        ) -> torch.Tensor:
            return nn.functional.conv2d(x, p_weight, b_bias)

    module, inputs = Named(), (torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), torch.ones(3))
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.convolution.default",)
    assert_equal_eager(lowered.pte, module, inputs)


def test_results_of_a_skipped_op_stay_on_the_cpu_with_it() -> None:
    module = Function(lambda x: torch.split(x, [1, 2], dim=1)[1] * 2.0)
    inputs = (torch.rand(2, 3),)
    lowered = lower(module, inputs, skip_ops_for_coreml_delegation=["split_with_sizes"])
    assert "aten.split_with_sizes_copy.default" in lowered.operators
    text = reasons(lowered.report)["operator.getitem"]
    assert text.startswith("part of aten.split_with_sizes_copy.default: ")
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("at_hand", [True, False], ids=["values", "no values"])
def test_numbers_beyond_int32_keep_dependent_calls_on_the_cpu(
    at_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_hand:
        monkeypatch.setattr("coreml_delegate.lowering.trial.real_values", lambda _: {})
    module = Function(lambda x: torch.relu((x + 2**32 + 1).float()) * 2.0)
    inputs = (torch.tensor([-5, 7]),)
    lowered = lower(module, inputs)
    # The number is hidden in a constant of edge dialect; without values, so may the other one be.
    assert lowered.operators == (
        "aten.add.Tensor",
        "aten.add.Tensor",
        "dim_order_ops._to_dim_order_copy.default",
    )
    said = "has int64 values 4294967296 to 4294967296" if at_hand else "may be beyond int32"
    assert said in reasons(lowered.report)["aten.add.Tensor"]
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize(
    ("function", "stays", "values"),
    [
        (
            lambda x: (torch.arange(100000) + x.argmax() * 0).sum(),
            "sum.dim_IntList",
            "0 to 9999900000",
        ),
        (lambda x: x.argmax(-1) * 2**30, "mul.Tensor", "0 to 5368709120"),
        (lambda x: (x > 0).cumsum(1) * 2**29, "mul.Tensor", "0 to 3221225472"),
        (lambda x: -x.long().clamp(-5, 5) * 2**29, "mul.Tensor", "-2684354560 to 2684354560"),
        (lambda x: (x.long() % 70000) ** 2, "pow.Tensor_Scalar", "0 to 4899860001"),
        (lambda x: torch.topk(x, 2)[1].sum() * 2**28, "mul.Tensor", "0 to 2684354560"),
    ],
    ids=["arange", "argmax", "truths", "clamp", "remainder", "topk"],
)
def test_calls_with_results_known_beyond_int32_stay_on_the_cpu(function, stays, values) -> None:
    module, inputs = (
        Function(function),
        (torch.tensor([[-3.0, 4, 2, 9, -1, 90000]]),),
    )
    lowered = lower(module, inputs)
    assert f"aten.{stays}" in lowered.operators
    assert f"can have int64 values {values}, Core ML has int32" in " ".join(
        reasons(lowered.report).values()
    )
    assert lowered.report.partitions
    assert_equal_eager(lowered.pte, module, inputs)


def test_integers_that_fit_are_delegated() -> None:
    def function(x: torch.Tensor, ids: torch.Tensor) -> Any:
        near = x.argmax(-1) * 2**28, (x.argmax(-1) * 2**40) % 1000 * 3, torch.arange(6).cumsum(0)
        return *near, ids * 2**20  # of which nothing is known

    module, inputs = Function(function), (torch.eye(6), torch.tensor([-2000, 7]))
    lowered = lower(module, inputs)
    # What is computed of a wide number, but fits, goes on inside.
    assert lowered.operators == ("aten.mul.Tensor", "aten.remainder.Scalar")
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("host", ["python", "stock"])
def test_an_input_beyond_int32_is_an_error_at_run_time(host: str) -> None:
    lowered = lower(Function(lambda x: x * 2 + 1), (torch.tensor([-5, 7]),))
    assert not lowered.operators
    program = runtime.load_program(lowered.pte, host=host)
    (result,) = program.run("forward", [torch.tensor([2**30 - 1, -3])])
    assert result.tolist() == [2**31 - 1, -5]
    with pytest.raises(InputError, match="beyond int32: got -3 to 2147483648, expected"):
        program.run("forward", [torch.tensor([2**31, -3])])


def windows(x: torch.Tensor) -> torch.Tensor:
    """Splits an image into windows, as window attention does."""
    n, c, h, w = x.shape
    split = x.reshape(n, c, h // 2, 2, w // 2, 2)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)


def test_rank_six_between_reshapes_is_delegated() -> None:
    module, inputs = Function(windows), (torch.rand(1, 3, 4, 6),)
    lowered = lower(module, inputs)
    assert not lowered.operators
    assert_equal_eager(lowered.pte, module, inputs)


def test_other_calls_of_rank_six_stay_on_the_cpu() -> None:
    module = Function(lambda x: x.reshape(1, 2, 1, 2, 1, 3).permute(5, 4, 3, 2, 1, 0))
    inputs = (torch.rand(4, 3),)
    lowered = lower(module, inputs)
    assert set(lowered.operators) == {"aten.view_copy.default", "aten.permute_copy.default"}
    assert all("rank 6" in why for why in reasons(lowered.report).values())
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.parametrize("shape", [(2, 8, 1, 3), (1, 1, 4, 5)])
def test_transposing_dimensions_of_one_element_keeps_the_layout(shape: tuple[int, ...]) -> None:
    """Their strides look transposed, although no element moves."""
    inputs = (torch.rand(shape).transpose(1, 2),)
    assert inputs[0].is_contiguous()
    asinh = Function(lambda x: torch.asinh(x.transpose(1, 2)).transpose(1, 2) * x)
    for module, left in ((Function(lambda x: x * 2), ()), (asinh, ("aten.asinh.default",))):
        lowered = lower(module, inputs)
        assert lowered.operators == left
        assert_equal_eager(lowered.pte, module, inputs)
