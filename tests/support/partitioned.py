"""Partly delegated modules, and checks on the result, for the partitioner's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coreml_delegate import runtime
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.mil.program import Function
from support.tolerances import ATOL_RTOL

ATOL, RTOL = ATOL_RTOL["fp32"]


class Network(nn.Module):
    """Linear layers around an operator that Core ML lacks (asinh)."""

    def __init__(self, *, supported: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.supported = supported

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y if self.supported else torch.asinh(y))


def example(*shape: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) * 0.5,)


def assert_equal_eager(pte: bytes, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    expected = module(*inputs)
    (actual,) = runtime.load_program(pte).run("forward", list(inputs))
    torch.testing.assert_close(actual, expected, atol=ATOL, rtol=RTOL)


def delegate_functions(edge: Any, method: str = "forward") -> list[Function]:
    """Return the main function of every delegate of a method of a lowered edge program."""
    modules = edge.exported_program(method).graph_module
    blobs = [
        getattr(modules, n.target).processed_bytes
        for n in modules.graph.nodes
        if n.op == "get_attr" and "lowered_module" in str(n.target)
    ]
    return [read_blob(blob)[0].functions["main"] for blob in blobs]
