"""Tensors of more than five dimensions: made without them, or left to the CPU with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from hypothesis import given
from hypothesis import strategies as st
from support.lowering import Function, fp32_specs, lower_unchecked, reasons
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.ops.call import MAX_RANK
from coreml_delegate.ops.merging import transposes

_SIX = (2, 2, 3, 2, 1, 4)
_SEVEN = (2, 3, 2, 2, 1, 2, 2)
_WEIGHTS = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
_ROW = torch.linspace(0.0, 1.0, 4)
_BIAS = torch.linspace(-1.0, 1.0, 24).reshape(2, 1, 3, 1, 1, 4)

# By name, what is done to a tensor of the shape _SIX.
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: x,
    "unary": lambda x: x.tanh().neg(),
    "same shapes": lambda x: x * x.sigmoid(),
    "number": lambda x: x / 3.0,
    "row": lambda x: x + _ROW,
    "constant": lambda x: x + _BIAS,
    "broadcast": lambda x: x + x[:, :1] * x[..., :1],
    "of lower rank": lambda x: x - x[0, 1],
    "bool": lambda x: torch.where(x > 0.1, x, -x),
    "masked": lambda x: x.masked_fill(x < 0, 2.0),
    "cast": lambda x: (x * 3).to(torch.int32) + 1,
    "permute": lambda x: x.permute(5, 3, 4, 1, 2, 0),
    "turns": lambda x: x.permute(3, 0, 5, 2, 4, 1),
    "transpose": lambda x: x.transpose(-1, 1),
    "expand": lambda x: x.expand(2, 2, 3, 2, 3, 4),
    "repeat": lambda x: x.repeat_interleave(2, dim=2),
    "select": lambda x: x[:, :, 1],
    "select last": lambda x: x[..., -1] + 1,
    "slice": lambda x: x[:, :, 1:, :, :, ::2] * 2,
    "unbind": lambda x: torch.unbind(x, 2)[1] - torch.unbind(x, 2)[0],
    "unbind first": lambda x: torch.unbind(x)[1],
    "split": lambda x: torch.split(x, [1, 2], dim=2)[1].exp(),
    "chunk": lambda x: torch.chunk(x, 2, dim=-1)[1].exp(),
    "cat": lambda x: torch.cat([x, x.sin(), x[:, :1]], dim=1),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 1].cos()], dim=3),
    "flip": lambda x: x.flip(1, 5),
    "roll": lambda x: x.roll((1, 2), (-1, 2)),
    "unsqueeze": lambda x: x.unsqueeze(3).exp().squeeze(5),
    "windows": lambda x: x.unfold(2, 2, 1),
    "pad": lambda x: nn.functional.pad(x, (1, 2, 0, 0, 2, 0), value=0.5),
    "softmax": lambda x: x.softmax(-1),
    "softmax inside": lambda x: x.log_softmax(2),
    "mean": lambda x: x.mean((1, 2, -1), keepdim=True) + x,
    "mean of all": lambda x: x.mean(),
    "sum": lambda x: x.sum((2, 3)),
    "sum of all": lambda x: x.sum(),
    "amax": lambda x: x.amax((0, 1)),
    "max": lambda x: x.max(2).values,
    "argmax": lambda x: x.argmax(5),
    "variance": lambda x: x.var((2, 5), correction=0),
    "variance and mean": lambda x: torch.var_mean(x, (2, 5))[1] + torch.var_mean(x, (2, 5))[0],
    "products": lambda x: x.cumprod(2) + x.prod(4, keepdim=True) + x.prod(),
    "buckets": lambda x: torch.bucketize(x, _ROW),
    "cumsum": lambda x: x.cumsum(2),
    "any": lambda x: (x > 1.5).any(5),
    "glu": lambda x: nn.functional.glu(x, 1),
    "linear": lambda x: nn.functional.linear(x, _WEIGHTS, _WEIGHTS[:, 0]),
    "layer norm": lambda x: nn.functional.layer_norm(x, (4,), _ROW, _ROW + 1),
    "layer norm of two": lambda x: nn.functional.layer_norm(x, (1, 4)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "matrix": lambda x: x @ _WEIGHTS.T,
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x.sin(), x),
}


class Calls(nn.Module):
    """Every call, between views."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: call(x.reshape(_SIX)).flatten() for name, call in CALLS.items()}


@pytest.mark.slow
def test_calls_on_tensors_of_six_dimensions_are_delegated() -> None:
    module, inputs = Calls(), (torch.linspace(-2.0, 2.0, math.prod(_SIX)).reshape(8, 12).sin(),)
    lowered = lower_unchecked(module, inputs)
    assert reasons(lowered.report) == {}
    pte, expected = lowered.pte, module(*inputs)
    atol, rtol = ATOL_RTOL["fp32"]
    for engine in ("reference", "openvino"):
        program = runtime.load_program(pte, engine=engine)
        results = program.run("forward", list(inputs))
        for (name, wanted), result in zip(expected.items(), results, strict=True):
            torch.testing.assert_close(
                result.to(wanted.dtype), wanted, atol=atol, rtol=rtol, msg=f"{name} on {engine}"
            )


@pytest.mark.property
@given(st.data())
def test_transposes_of_few_dimensions_make_any_permutation(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(len(sizes))))
    array = np.arange(math.prod(sizes)).reshape(sizes)
    moved = array
    for shape, dims in transposes(sizes, order):
        assert len(shape) == len(dims) <= MAX_RANK
        moved = moved.reshape(shape).transpose(dims)
    np.testing.assert_array_equal(moved.reshape(-1), array.transpose(order).reshape(-1))


def _torn(x: torch.Tensor) -> torch.Tensor:
    six = x.reshape(_SIX).tanh()
    # Core ML runs what is before the operator and what is behind it, in two partitions.
    return (six * six.sum().asinh()).flatten()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.reshape(_SIX).tanh(), "has rank 6 and leaves the partition at 'output'"),
        (
            lambda x: x.reshape(_SIX).asinh().flatten(),
            "'aten_view_copy_default' has rank 6 and leaves the partition at 'aten_asinh_default'",
        ),
        (
            lambda x: (x.reshape(_SIX).asinh().reshape(_SEVEN).tanh().flatten(),),
            "has rank 7, Core ML takes at most 5",
        ),
        (_torn, "has rank 6 and is shared by several partitions"),
        (
            lambda x: (x[:6].reshape(1, 6, 1, 3, 1, 4) + x[:6].reshape(6, 1, 3, 1, 4, 1)).flatten(),
            "it tells 6 dimensions apart, Core ML has at most 5",
        ),
    ],
    ids=["result", "operator", "chain", "torn", "broadcast"],
)
def test_what_needs_six_dimensions_stays_on_the_cpu(
    function: Callable[[torch.Tensor], Any], why: str
) -> None:
    inputs = (torch.linspace(-1.0, 1.0, 96).reshape(8, 12),)
    lowered = lower_unchecked(Function(function), inputs)
    assert any(why in str(node.reason) for node in lowered.report.undelegated)
    (result,) = runtime.load_program(lowered.pte).run("forward", list(inputs))
    expected = Function(function)(*inputs)
    torch.testing.assert_close(result, expected[0] if isinstance(expected, tuple) else expected)


def _windows(x: torch.Tensor) -> torch.Tensor:
    n, h, w, c = x.shape
    split = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(2, 3)
    return (split.softmax(-1) + 1).reshape(n, -1, c)


def _unfolded(x: torch.Tensor) -> torch.Tensor:
    n, _, _, c = x.shape
    return x.unfold(1, 2, 2).unfold(2, 3, 1).reshape(n, -1, c) * 2


@pytest.mark.share(3)
@pytest.mark.parametrize("engine", ["reference", "openvino"])
@pytest.mark.parametrize("function", [_windows, _unfolded])
def test_windows_of_a_dynamic_batch(
    function: Callable[[torch.Tensor], torch.Tensor], engine: str
) -> None:
    module, inputs = Function(function), (torch.randn(2, 4, 6, 3),)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    batch = torch.export.Dim("batch", min=1, max=8)
    exported = torch.export.export(module, inputs, dynamic_shapes=(({0: batch},),))
    pte = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer
    assert not partitioner.report.undelegated
    program = runtime.load_program(pte, engine=engine)
    atol, rtol = ATOL_RTOL["fp32"]
    for size in (1, 5):
        x = torch.randn(size, 4, 6, 3)
        (result,) = program.run("forward", [x])
        torch.testing.assert_close(result, module(x), atol=atol, rtol=rtol)
