"""Estimated FLOPs: of products as torch's counter has them, of other ops by the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from coreml_delegate.ops import flops_of

Function = Callable[..., torch.Tensor]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def estimated(function: Function, *shapes: tuple[int, ...]) -> int:
    program = torch.export.export(Calls(function), tuple(torch.rand(s) for s in shapes))
    return sum(flops_of(node) for node in program.graph.nodes)


PRODUCTS = {
    "mm": (torch.mm, (3, 5), (5, 7)),
    "bmm": (torch.bmm, (2, 3, 5), (2, 5, 7)),
    "matmul": (torch.matmul, (2, 1, 3, 5), (4, 5, 7)),
    "linear": (F.linear, (2, 3, 5), (7, 5)),
    "conv1d": (F.conv1d, (2, 3, 9), (4, 3, 3)),
    "conv2d": (F.conv2d, (2, 3, 9, 8), (4, 3, 3, 2)),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (1, 3, 9, 9), (4, 3, 3, 3)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=4), (1, 4, 9, 9), (8, 1, 3, 3)),
    "conv3d": (F.conv3d, (1, 2, 5, 5, 5), (3, 2, 2, 2, 2)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (1, 3, 5, 5), (3, 4, 3, 3)),
}


@pytest.mark.parametrize(("function", "first", "second"), PRODUCTS.values(), ids=PRODUCTS)
def test_flops_of_products_agree_with_torch(
    function: Function, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    with FlopCounterMode(display=False) as counter:
        function(torch.rand(first), torch.rand(second))
    assert estimated(function, first, second) == counter.get_total_flops()


def test_flops_of_attention_are_its_products_and_a_softmax() -> None:
    shape = (1, 2, 5, 8)
    products = 2 * 2 * (2 * 5 * 5 * 8)
    assert estimated(F.scaled_dot_product_attention, shape, shape, shape) == products + 5 * 2 * 25


def test_flops_of_einsum_count_every_index() -> None:
    function: Function = lambda a, b: torch.einsum("bij,bjk->bik", a, b)  # noqa: E731
    assert estimated(function, (2, 3, 5), (2, 5, 7)) == 2 * 2 * 3 * 5 * 7


OTHERS: dict[str, tuple[Function, tuple[int, ...], int]] = {
    "elementwise": (torch.sin, (3, 4), 12),
    "broadcast": (lambda x: x + torch.ones(5, 1, 1), (3, 4), 60),
    "no rule": (torch.asinh, (3, 4), 12),
    "reduction": (lambda x: x.sum(1), (3, 4), 12),
    "softmax": (lambda x: x.softmax(1), (3, 4), 60),
    "max pooling": (lambda x: F.max_pool2d(x, 2), (1, 1, 4, 4), 16),
    "one size for all": (lambda x: F.avg_pool2d(x, [2], stride=2), (1, 1, 4, 4), 16),
    "global pooling": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 3, 4, 4), 48),
    "moving data": (lambda x: x.t().reshape(2, 6)[:, 1:], (3, 4), 0),
    "bias": (lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5)), (3, 4), 3 * 5 * (2 * 4 + 1)),
}


@pytest.mark.parametrize(("function", "shape", "expected"), OTHERS.values(), ids=OTHERS)
def test_flops_of_other_ops(function: Function, shape: tuple[int, ...], expected: int) -> None:
    assert estimated(function, shape) == expected


def test_dynamic_sizes_count_as_traced() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Calls(F.linear),
        (torch.rand(6, 5), torch.rand(7, 5)),
        dynamic_shapes=(({0: batch}, None),),
    )
    assert sum(map(flops_of, program.graph.nodes)) == 2 * 6 * 5 * 7
