"""What ExecuTorch would show the partitioner, found out without lowering anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from torch._ops import OpOverload
from torch.export import ExportedProgram

from coreml_delegate.partition.tagging import remove_tags

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node

    from coreml_delegate.partition.partitioner import CoreMLPartitioner


def rehearse(program: ExportedProgram, partitioner: CoreMLPartitioner) -> None:
    """Let ExecuTorch take a program to the partitioner and no further.

    Args:
        program: In ATen dialect; it is left as it is.
        partitioner: Partitions it, and has the report afterwards.
    """
    with torch.no_grad():  # which some operators demand
        to_edge_transform_and_lower(
            program,
            partitioner=[_Rehearsal(partitioner)],
            # Ops that were kept for the delegate are left over here, which is no error.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )


class _Rehearsal(Partitioner):
    """Asks a partitioner everything that ExecuTorch asks, and delegates nothing."""

    def __init__(self, partitioner: CoreMLPartitioner) -> None:
        super().__init__()
        self._partitioner = partitioner
        self._done = False

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self._partitioner.transform_for_pre_decomposition(exported_program)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self._partitioner.partition(exported_program)
        remove_tags(exported_program)
        self._done = True
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        if self._done:
            # Asked once more, to see that nothing was left over; here everything is.
            return [], None
        return self._partitioner.ops_to_not_decompose(ep)
