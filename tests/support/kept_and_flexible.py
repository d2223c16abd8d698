"""Programs that keep states, and programs of enumerated and dynamic shapes."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from support.lowering import fp32_specs, lower


class Counting(nn.Module):
    """Replaces a state, writes rows of another state, and returns both and the unchanged input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("rows", torch.zeros(3, 6, 2))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(x[0, 0])
        self.rows.index_copy_(1, places, x)
        return self.count * 2, self.rows + 1, x


def counting_steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = ([0, 1], [5, 2], [1, 1], [4, 0])
    return [
        (torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(n)).half().float(), p)
        for n, p in enumerate(torch.tensor(indices) for indices in rows)
    ]


def lower_stateful(module: nn.Module) -> bytes:
    specs = fp32_specs(minimum_deployment_target=ct.target.iOS18)
    return lower(
        module, counting_steps()[0], compile_specs=specs, take_over_mutable_buffer=True
    ).pte


class Writing(nn.Module):
    """Writes rows of a state that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 6, 2))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(1, places, x)
        return x * 2


class Scaled(nn.Module):
    """Outputs with the sizes of its inputs; one output is an unchanged input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x) + y.sum(), x.sum(0), y * 2, y


def lower_scaled(
    sizes: Any, module: nn.Module | None = None, *, others: int = 6, listed: Any = None
) -> Any:
    exported = torch.export.export(
        module or Scaled(), (torch.randn(6, 30), torch.randn(others, 4)), dynamic_shapes=sizes
    )
    specs = fp32_specs(minimum_deployment_target=ct.target.iOS18)
    if listed is not None:
        specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(exported, listed))
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)
    return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer
