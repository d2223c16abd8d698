"""What the partitioner reports: records, and their forms as table, JSON and HTML page."""

from coreml_delegate.partition.report.describe import describe
from coreml_delegate.partition.report.records import (
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
    "Coverage",
    "DelegationReport",
    "NodeReport",
    "Obstacle",
    "PartitionReport",
    "SourceLine",
    "describe",
]
