"""Ahead-of-time partitioning: which nodes of a program Core ML takes, and why not the rest."""

if __name__ == "partition":
    raise ImportError("'partition' is a subpackage; import coreml_delegate.partition instead")

from coreml_delegate.partition.partitioner import CoreMLPartitioner
from coreml_delegate.partition.report import DelegationReport, NodeReport

__all__ = ["CoreMLPartitioner", "DelegationReport", "NodeReport"]
