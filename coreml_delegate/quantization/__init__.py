"""Named ways to quantize a model, which recipes and the command line share."""

from coreml_delegate.quantization.assignment import QuantizationAssignment
from coreml_delegate.quantization.modes import FORMS, Method, QuantizationMode, mode_of

__all__ = ["FORMS", "Method", "QuantizationAssignment", "QuantizationMode", "mode_of"]
