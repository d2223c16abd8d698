"""PT2E quantization for Core ML."""

if __name__ == "quantizer":
    raise ImportError("'quantizer' is a subpackage; import coreml_delegate.quantizer instead")

from coreml_delegate.quantizer.quantizer import CoreMLQuantizer
from coreml_delegate.quantizer.report import NodeQuantization, QuantizationReport
from coreml_delegate.quantizer.schedule import MilestoneSchedule

__all__ = ["CoreMLQuantizer", "MilestoneSchedule", "NodeQuantization", "QuantizationReport"]
