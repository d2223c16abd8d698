"""Programs with tensors that are not row-major: Core ML has all calls but the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import Function, fp32_specs, lower, reasons
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.export import Dim

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.ops import ReasonCode

ATOL, RTOL = ATOL_RTOL["fp32"]
COPY = "dim_order_ops._clone_dim_order.default"


class Net(nn.Module):
    """Convolutions, batch norms and activations in place, as in a ResNet."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if rank == 4 else (nn.Conv3d, nn.BatchNorm3d)
        self.first, self.norm, self.second = conv(3, 8, 3), norm(8), conv(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.relu_(self.norm(self.first(x))))


def _image(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def _channels_last(*shape: int) -> torch.Tensor:
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return _image(*shape).to(memory_format=order)


def _assert_equal_eager(
    pte: bytes, module: nn.Module, inputs: tuple[torch.Tensor, ...], host: str = "auto"
) -> None:
    expected = module(*(x.clone() for x in inputs))
    results = runtime.load_program(pte, host=host).run("forward", list(inputs))
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for actual, tensor in zip(results, wanted, strict=True):
        torch.testing.assert_close(actual, tensor, atol=ATOL, rtol=RTOL)
        if tensor.dim() in (4, 5):
            assert actual.stride() == tensor.stride()


@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("weights", ["channels_last", "row-major"])
def test_core_ml_has_a_network_in_channels_last(weights: str, host: str) -> None:
    module, inputs = Net().eval(), (_channels_last(1, 3, 8, 9),)
    if weights == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    lowered = lower(module, inputs)
    assert set(lowered.operators) == {COPY}
    assert len(lowered.report.partitions) == 1
    layouts = [n.reason for n in lowered.report.undelegated if n.reason]
    assert [reason.code for reason in layouts] == [ReasonCode.LAYOUT] * 2
    assert layouts[0].text == "'x' has dim order (0, 2, 3, 1), Core ML is row-major"
    _assert_equal_eager(lowered.pte, module, inputs, host)


def test_core_ml_has_volumes_in_channels_last() -> None:
    module, inputs = Net(rank=5).eval(), (_channels_last(1, 3, 6, 5, 7),)
    lowered = lower(module, inputs)
    assert set(lowered.operators) == {COPY}
    _assert_equal_eager(lowered.pte, module, inputs)


class Tokens(nn.Module):
    """Pixels as tokens by a view, which the order of channels_last allows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.layer = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.contiguous(memory_format=torch.channels_last))
        return self.layer(x.permute(0, 2, 3, 1).view(x.shape[0], -1, 8))


@pytest.mark.parametrize("image", [_image, _channels_last])
def test_a_view_that_only_channels_last_allows_is_a_copy(
    image: Callable[..., torch.Tensor],
) -> None:
    module = Tokens().eval().to(memory_format=torch.channels_last)
    inputs = (image(2, 3, 8, 8),)
    lowered = lower(module, inputs)
    assert set(lowered.operators) == ({COPY} if image is _channels_last else set())
    _assert_equal_eager(lowered.pte, module, inputs)


def _with_call_on_cpu(x: torch.Tensor) -> torch.Tensor:
    x = (x.to(memory_format=torch.channels_last) * 2).sin()
    return (x.sigmoid() + 1).cos()


@pytest.mark.parametrize(
    ("function", "inputs", "cpu"),
    [
        (lambda x: (x.mm(x) + 1).sin(), (_image(4, 4).t(),), {COPY}),
        (_with_call_on_cpu, (_image(1, 2, 3, 4),), {COPY, "aten.sigmoid.default"}),
        (lambda x, y: (x, x + y), (_channels_last(1, 2, 3, 4), _image(1, 2, 3, 4)), {COPY}),
        (lambda x: (x * 2).permute(0, 2, 3, 1) + 1, (_channels_last(1, 2, 3, 4),), {COPY}),
    ],
    ids=["transposed", "call on the CPU", "input returned", "permuted"],
)
def test_calls_between_the_copies_are_delegated(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], cpu: set[str]
) -> None:
    module = Function(function)
    lowered = lower(module, inputs, skip_ops_for_coreml_delegation=["aten.sigmoid.default"])
    assert set(lowered.operators) == cpu
    expected = module(*inputs)
    results = runtime.load_program(lowered.pte).run("forward", list(inputs))
    for actual, tensor in zip(results, expected if len(inputs) > 1 else [expected], strict=True):
        torch.testing.assert_close(actual, tensor, atol=ATOL, rtol=RTOL)


def test_a_program_that_writes_to_an_input_stays_as_it_is() -> None:
    class Writer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0].add_(1)
            return (x * 2).sin()

    x = _channels_last(1, 2, 3, 4)
    lowered = lower(Writer(), (x,))
    changed = x.clone()
    expected = Writer()(changed)
    # ExecuTorch's kernels do not write to a tensor in channels_last.
    written, result = runtime.load_program(lowered.pte, host="python").run("forward", [x])
    torch.testing.assert_close(written, changed, atol=ATOL, rtol=RTOL)
    torch.testing.assert_close(result, expected, atol=ATOL, rtol=RTOL)


def test_strides_that_a_call_takes_stay_as_they_are() -> None:
    module = Function(lambda x: x.as_strided((2, 2), (1, 2)) + 1)
    inputs = (_channels_last(1, 2, 3, 4),)
    _assert_equal_eager(lower(module, inputs).pte, module, inputs)


def test_control_flow_stays_as_it_is() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))

    module, inputs = Branches(), (_channels_last(1, 2, 3, 4),)
    _assert_equal_eager(lower(module, inputs).pte, module, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_channels_last_is_delegated(dtype: torch.dtype) -> None:
    module, inputs = Net().eval().to(dtype), (_channels_last(1, 3, 8, 9).to(dtype),)
    lowered = lower(module, inputs)
    assert "aten.conv2d.default" in {n.op for n in lowered.report.delegated}
    assert set(lowered.operators) <= {COPY, "dim_order_ops._to_dim_order_copy.default"}
    (actual,) = runtime.load_program(lowered.pte).run("forward", list(inputs))
    atol, rtol = ATOL_RTOL["fp16" if dtype is torch.float16 else "bf16"]
    torch.testing.assert_close(actual, module(*inputs), atol=atol, rtol=rtol)


def test_dynamic_images_in_channels_last_are_delegated() -> None:
    module, inputs = Net().eval(), (_channels_last(2, 3, 8, 9),)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    sizes = {0: Dim("n", min=1, max=4), 2: Dim("h", min=6, max=32), 3: Dim("w", min=6, max=32)}
    edge = to_edge_transform_and_lower(
        torch.export.export(module, inputs, dynamic_shapes=(sizes,)), partitioner=[partitioner]
    )
    assert {n.op for n in partitioner.report.undelegated} == {COPY}
    pte = edge.to_executorch().buffer
    for shape in ((1, 3, 8, 9), (3, 3, 12, 7)):
        _assert_equal_eager(pte, module, (_channels_last(*shape),))


def test_results_that_are_no_tensors_stay() -> None:
    module = Function(lambda x: (x * 2, None, 3))
    x = _channels_last(1, 2, 3, 4)
    lowered = lower(module, (x,))
    results = runtime.load_program(lowered.pte).run("forward", [x])
    torch.testing.assert_close(results[0], x * 2, atol=ATOL, rtol=RTOL)
    assert results[0].stride() == x.stride()


def test_a_whole_graph_has_the_reason_and_the_remedy() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"dim order \(0, 2, 3, 1\).*contiguous"):
        lower(Net().eval(), (_channels_last(1, 3, 8, 9),), lower_full_graph=True)


def test_another_order_of_the_weights_only_changes_no_program() -> None:
    inputs = (_image(1, 3, 8, 9),)
    plain = lower(Net().eval(), inputs)
    strided = lower(Net().eval().to(memory_format=torch.channels_last), inputs)
    assert reasons(plain.report) == reasons(strided.report) == {}
