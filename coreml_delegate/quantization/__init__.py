"""Quantization by named modes: the modes, how to apply them, and what they cost.

This package module is cheap to import: the command line reads the names of the modes from it.
"""

from coreml_delegate.quantization.assignment import QuantizationAssignment
from coreml_delegate.quantization.modes import FORMS, Method, QuantizationMode, mode_of

__all__ = ["FORMS", "Method", "QuantizationAssignment", "QuantizationMode", "mode_of"]
