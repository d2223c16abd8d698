"""Ahead-of-time partitioning: which nodes of a program Core ML takes, and why not the rest."""

if __name__ == "partition":
    raise ImportError("'partition' is a subpackage; import coreml_delegate.partition instead")

from coreml_delegate.partition.filters import do_not_delegate
from coreml_delegate.partition.partitioner import CoreMLPartitioner
from coreml_delegate.partition.report import (
    BufferReport,
    Coverage,
    DelegationReport,
    NodeReport,
    Obstacle,
    PartitionReport,
    SourceLine,
)

__all__ = [
    "BufferReport",
    "CoreMLPartitioner",
    "Coverage",
    "DelegationReport",
    "NodeReport",
    "Obstacle",
    "PartitionReport",
    "SourceLine",
    "do_not_delegate",
]
