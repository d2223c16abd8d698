"""Measurement of programs in fp16, and of the operations that have to compute in fp32."""

from coreml_delegate.runtime.precision.islands import (
    Operation,
    PrecisionMeasurement,
    measure_method,
    measure_model,
)

__all__ = [
    "Operation",
    "PrecisionMeasurement",
    "measure_method",
    "measure_model",
]
