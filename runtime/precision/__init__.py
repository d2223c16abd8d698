"""Which operations of a program in fp16 have to compute in fp32, by measurement."""

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
