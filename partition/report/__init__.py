"""The report of the partitioner: records, and their forms as table, JSON and HTML page."""

from coreml_delegate.partition.report.delegation import DelegationReport
from coreml_delegate.partition.report.describe import describe
from coreml_delegate.partition.report.records import (
    BufferReport,
    Coverage,
    DeviceFinding,
    NodeReport,
    Obstacle,
    PartitionReport,
    SourceLine,
)

__all__ = [
    "BufferReport",
    "Coverage",
    "DelegationReport",
    "DeviceFinding",
    "NodeReport",
    "Obstacle",
    "PartitionReport",
    "SourceLine",
    "describe",
]
