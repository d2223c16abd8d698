"""From a module to a ``.pte`` with Core ML delegates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    to_edge,
    to_edge_transform_and_lower,
)
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.formats.blob import flatten
from coreml_delegate.lowering.build import build_files
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition import DelegationReport

Inputs = tuple[torch.Tensor, ...]

PRECISIONS = (Precision.FLOAT16, Precision.FLOAT32)
"""The types that Core ML computes in; ``auto`` becomes either, call by call."""


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class Lowered:
    """A lowered program.

    Attributes:
        edge: Its edge program, delegated.
        report: The partitioner's report.
        operators: Names of the operators outside the delegates.
    """

    edge: EdgeProgramManager
    report: DelegationReport
    operators: tuple[str, ...]

    @classmethod
    def of(cls, edge: EdgeProgramManager, partitioner: CoreMLPartitioner) -> Lowered:
        names = [
            target_name(n.target)
            for n in edge.exported_program().graph.nodes
            if n.op == "call_function"
        ]
        outside = tuple(n for n in names if n != GETITEM and "call_delegate" not in n)
        return cls(edge, partitioner.report, outside)

    @property
    def pte(self) -> bytes:
        return self.edge.to_executorch().buffer


def fp32_specs(**options: Any) -> list[Any]:
    """Compile specs for fp32, to compare with eager torch."""
    return CoreMLBackend.generate_compile_specs(
        **({"compute_precision": Precision.FLOAT32} | options)
    )


def lower(module: nn.Module, inputs: Inputs, **options: Any) -> Lowered:
    """Lower by ``to_edge_transform_and_lower``; ``options`` go to the partitioner."""
    return _lower(module, inputs, EdgeCompileConfig(), options)


def lower_unchecked(
    module: nn.Module, inputs: tuple[Any, ...], *, dynamic_shapes: Any = None, **options: Any
) -> Lowered:
    """Like ``lower``, with operators outside the core ATen opset."""
    config = EdgeCompileConfig(_check_ir_validity=False)
    with torch.no_grad():
        return _lower(module, inputs, config, options, dynamic_shapes)


def _lower(
    module: nn.Module,
    inputs: tuple[Any, ...],
    config: EdgeCompileConfig,
    options: dict[str, Any],
    dynamic_shapes: Any = None,
) -> Lowered:
    partitioner = CoreMLPartitioner(**({"compile_specs": fp32_specs()} | options))
    exported = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic_shapes)
    before = {name: value.clone() for name, value in _tensors(module)}
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert [n for n, value in _tensors(module) if not torch.equal(value, before[n])] == []
    return Lowered.of(edge, partitioner)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of a module, which lowering may not change: NaN is not compared."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if type(value) in (torch.Tensor, nn.Parameter):
            yield name, value.detach().nan_to_num() if value.is_floating_point() else value.detach()


def lower_core_aten(module: nn.Module, inputs: Inputs, **options: Any) -> Lowered:
    """Lower by ``to_edge(...).to_backend(...)``, which decomposes composite ops first."""
    partitioner = CoreMLPartitioner(**({"compile_specs": fp32_specs()} | options))
    edge = to_edge(torch.export.export(module.eval(), inputs)).to_backend(partitioner)
    return Lowered.of(edge, partitioner)


def reasons(report: DelegationReport) -> Mapping[str, str]:
    """The reason of each undelegated operator, by op."""
    return {n.op: str(n.reason) for n in report.undelegated}


def build_blob(program: ExportedProgram, options: CompileOptions) -> bytes:
    """Lower a subgraph to its blob."""
    handles = handles_of(program)
    return flatten(with_handles(build_files(program, options), handles))
