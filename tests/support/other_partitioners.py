"""Programs lowered by several partitioners."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from coreml_delegate.ops.call import GETITEM, target_name
from support.partitioned import example

LINEAR = "aten.linear.default"
KINDS = ("static", "dynamic", "quantized", "stateful")


class Layers(nn.Module):
    """A composite op between two other ops."""

    def __init__(self, *, attention: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.attention = nn.Linear(4, 4), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y = functional.scaled_dot_product_attention(y, y, y) if self.attention else self.linear(y)
        return torch.sin(y)


class Stateful(Layers):
    """Layers around a buffer that every run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(torch.tanh(x))
        return torch.sin(self.linear(self.total * 2))


def quantized(module: nn.Module, x: torch.Tensor) -> ExportedProgram:
    """Return the program that PT2E quantization makes of a module for XNNPACK."""
    config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = xnnpack_quantizer.XNNPACKQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(module, (x,)).module(), quantizer)
    prepared(x)
    return torch.export.export(convert_pt2e(prepared), (x,))


def exported(kind: str) -> tuple[ExportedProgram, nn.Module, tuple[torch.Tensor, ...]]:
    """Return a program of a kind, the module that computes the same, and inputs."""
    module = (Stateful() if kind == "stateful" else Layers()).eval()
    (x,) = example(2, 4)
    if kind == "quantized":
        program = quantized(module, x)
        return program, program.module(), (x,)
    sizes = {"x": {0: Dim("rows", min=1, max=9)}} if kind == "dynamic" else None
    program = torch.export.export(module, (x,), dynamic_shapes=sizes)
    return program, module, (x, example(7, 4)[0]) if sizes else (x, x)


@dataclass(frozen=True)
class Lowered:
    """A program lowered by several partitioners.

    Attributes:
        delegates: Backend of every delegate, and the ops inside.
        outside: The ops outside, including ops in branches.
        pte: The program.
    """

    delegates: Sequence[tuple[str, tuple[str, ...]]]
    outside: Sequence[str]
    pte: bytes


def lower(program: ExportedProgram, *partitioners: Partitioner) -> Lowered:
    edge = to_edge_transform_and_lower(
        copy.deepcopy(program),
        partitioner=list(partitioners),
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    root = edge.exported_program().graph_module
    delegates: list[tuple[str, tuple[str, ...]]] = []
    outside: list[str] = []
    for module in _outer_modules(root):
        for node in module.graph.nodes:
            if "call_delegate" in str(node.target):
                lowered: Any = getattr(module, str(node.args[0].target))
                delegates.append((lowered.backend_id, _ops(lowered.original_module)))
        outside += [op for op in _ops(module) if "call_delegate" not in op]
    return Lowered(delegates, outside, edge.to_executorch().buffer)


def _outer_modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Return a module and the branches in it, without delegates."""
    used = [getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"]
    branches = [m for m in used if isinstance(m, torch.fx.GraphModule)]
    return [module, *(inner for branch in branches for inner in _outer_modules(branch))]


def _ops(program: Any) -> tuple[str, ...]:
    names = [target_name(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return tuple(name for name in names if name != GETITEM)
