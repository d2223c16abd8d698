"""Programs of several methods, lowered together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from coreml_delegate import (
    MULTIMETHOD_WEIGHT_SHARING_STRATEGY,
    CoreMLBackend,
    CoreMLPartitioner,
)
from coreml_delegate.formats.blob import BlobReference
from coreml_delegate.partition import DelegationReport
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.targets import Opset
from support.lowering import fp32_specs

Method = tuple[nn.Module, tuple[torch.Tensor, ...]]
IOS18 = {"minimum_deployment_target": Opset.iOS18}


class Layers(nn.Module):
    """Linear layers, optionally with an operator between them that Core ML does not have."""

    def __init__(self, *layers: nn.Linear, split: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = torch.asinh(x) if self.split and layer is not self.layers[-1] else x
        return x


class Accumulator(nn.Module):
    """A buffer that accumulates the results of a layer."""

    def __init__(self, layer: nn.Linear, name: str = "total") -> None:
        super().__init__()
        self.layer = layer
        self.name = name
        self.register_buffer(name, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.get_buffer(self.name)
        total.add_(self.layer(x).sum(0))
        return total * 2


class Reader(Accumulator):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.get_buffer(self.name)


def linear(features: int = 4, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(features, features)


def two(module: nn.Module | None = None, features: int = 4, count: int = 3) -> dict[str, Method]:
    """A module as two methods of different shapes."""
    module = module or Layers(linear(features))
    return {"decode": (module, rows(1, features)), "prefill": (module, rows(count, features))}


def specs(strategy: str | None = None, **options: Any) -> list[Any]:
    """Compile specs for fp32, with a strategy by name."""
    compile_specs = fp32_specs(**options)
    if strategy is not None:
        member = MULTIMETHOD_WEIGHT_SHARING_STRATEGY[strategy]
        compile_specs.append(
            CoreMLBackend.generate_multimethod_weight_sharing_strategy_compile_spec(member)
        )
    return compile_specs


@dataclass(frozen=True)
class LoweredMethods:
    """A program of several methods.

    Attributes:
        pte: Its bytes.
        reports: The partitioner's reports, by method.
    """

    pte: bytes
    reports: Mapping[str, DelegationReport]

    @property
    def program(self) -> PteProgram:
        return PteProgram.open(self.pte)

    def references(self, method: str) -> list[BlobReference | None]:
        """The reference in each delegate, or None for a blob."""
        info = self.program.method(method)
        return [BlobReference.decode(delegate.processed) for delegate in info.delegates]

    def shared_by(self, method: str) -> list[tuple[str, ...]]:
        return [partition.shared_by for partition in self.reports[method].partitions]

    def not_shared(self, method: str) -> list[str]:
        return [partition.not_shared for partition in self.reports[method].partitions]


def lower_methods(
    methods: Mapping[str, Method], compile_specs: list[Any], **options: Any
) -> LoweredMethods:
    """Lower methods with one partitioner; ``options`` go to it."""
    partitioner = CoreMLPartitioner(compile_specs=compile_specs, **options)
    edge = to_edge_transform_and_lower(exported(methods), partitioner=[partitioner])
    return LoweredMethods(
        edge.to_executorch().buffer, dict(zip(methods, partitioner.reports, strict=True))
    )


def exported(methods: Mapping[str, Method]) -> dict[str, Any]:
    """The methods' programs, in ATen dialect."""
    return {
        name: torch.export.export(module.eval().requires_grad_(False), inputs)
        for name, (module, inputs) in methods.items()
    }


def rows(count: int, features: int, seed: int = 0) -> tuple[torch.Tensor]:
    """An input: [count, features], fp32."""
    return (torch.randn(count, features, generator=torch.Generator().manual_seed(seed)),)
