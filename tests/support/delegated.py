"""Programs with delegates of the test backend."""

from __future__ import annotations

import functools

import torch
from torch import nn

from support.eager_backend import lower


class Mixed(nn.Module):
    """Two delegates around an undelegated operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        a = self.linear(x)
        return torch.sin(a) + torch.relu(a), a


class Other(nn.Module):
    def forward(self, x):
        return torch.relu(x) + x


class Scalar(nn.Module):
    """A delegate whose output is a scalar."""

    def forward(self, x):
        return torch.sum(x)


_MIXED_OPS = (
    "aten.linear.default",
    "aten.addmm.default",
    "aten.permute_copy.default",
    "aten.add.Tensor",
    "aten.relu.default",
)


@functools.cache
def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"forward": Mixed().eval(), "other": Other().eval()}


@functools.cache
def two_methods() -> bytes:
    rows = torch.export.Dim("rows", min=1, max=6)
    return lower(
        {
            "forward": (modules()["forward"], (torch.randn(5, 4),), ({0: rows},)),
            "other": (modules()["other"], (torch.randn(2),), None),
        },
        *_MIXED_OPS,
    )


@functools.cache
def scalar() -> bytes:
    return lower(
        {"forward": (Scalar(), (torch.randn(3),), None)}, "aten.sum.default", "aten.sum.dim_IntList"
    )


class OneInput(nn.Module):
    """A delegate whose input an operator outside takes too, or does not."""

    def __init__(self, *, shared_with_cpu: bool) -> None:
        super().__init__()
        self.shared_with_cpu = shared_with_cpu

    def forward(self, x):
        y = torch.relu(x) + x
        return y, torch.sin(x if self.shared_with_cpu else y)


def one_input(*, shared_with_cpu: bool) -> tuple[nn.Module, bytes]:
    """The module, and its program with the addition delegated."""
    module = OneInput(shared_with_cpu=shared_with_cpu)
    pte = lower(
        {"forward": (module, (torch.randn(3, 4),), None)}, "aten.relu.default", "aten.add.Tensor"
    )
    return module, pte
