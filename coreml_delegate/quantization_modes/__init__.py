"""Named ways to quantize a model, which recipes and the command line share."""

from coreml_delegate.quantization_modes.assignment import QuantizationAssignment
from coreml_delegate.quantization_modes.table import FORMS, Method, QuantizationMode, mode_of

__all__ = ["FORMS", "Method", "QuantizationAssignment", "QuantizationMode", "mode_of"]
