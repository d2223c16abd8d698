"""Quantization by named modes: the modes, their application, and the loss of accuracy.

This package is cheap to import, because the command line reads the names of the modes from it.
"""

from coreml_delegate.quantization.assignment import QuantizationAssignment
from coreml_delegate.quantization.modes import (
    FORMS,
    MODULE_FORMS,
    Method,
    QuantizationMode,
    mode_of,
)

__all__ = [
    "FORMS",
    "MODULE_FORMS",
    "Method",
    "QuantizationAssignment",
    "QuantizationMode",
    "mode_of",
]
