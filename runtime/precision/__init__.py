"""Measurement of programs in fp16, and of the operations that have to compute in fp32."""

from coreml_delegate.runtime.precision.choice import LoweredProgram, choose_fp32_calls
from coreml_delegate.runtime.precision.islands import (
    Measurements,
    Operation,
    PrecisionMeasurement,
    measure_method,
    measure_model,
)
from coreml_delegate.runtime.precision.report import (
    Call,
    LossyCall,
    PrecisionReport,
    describe_auto,
)
from coreml_delegate.runtime.precision.runs import Method, SingleModel

__all__ = [
    "Call",
    "LossyCall",
    "LoweredProgram",
    "Measurements",
    "Method",
    "Operation",
    "PrecisionMeasurement",
    "PrecisionReport",
    "SingleModel",
    "choose_fp32_calls",
    "describe_auto",
    "measure_method",
    "measure_model",
]
