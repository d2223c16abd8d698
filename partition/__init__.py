"""Ahead-of-time partitioning: delegates calls to Core ML, and reports why other calls stay."""

if __name__ == "partition":
    raise ImportError("'partition' is a subpackage; import coreml_delegate.partition instead")

from coreml_delegate.options.model_interface import ColorLayout, ImageFeature, ModelInterface
from coreml_delegate.partition.package import save_mlpackage
from coreml_delegate.partition.partitioner import CoreMLPartitioner
from coreml_delegate.partition.report import (
    BufferReport,
    Coverage,
    DelegationReport,
    DeviceFinding,
    NodeReport,
    Obstacle,
    PartitionReport,
    SourceLine,
)
from coreml_delegate.partition.verdicts.filters import do_not_delegate
from coreml_delegate.runtime.precision import LossyCall, PrecisionReport

__all__ = [
    "BufferReport",
    "ColorLayout",
    "CoreMLPartitioner",
    "Coverage",
    "DelegationReport",
    "DeviceFinding",
    "ImageFeature",
    "LossyCall",
    "ModelInterface",
    "NodeReport",
    "Obstacle",
    "PartitionReport",
    "PrecisionReport",
    "SourceLine",
    "do_not_delegate",
    "save_mlpackage",
]
