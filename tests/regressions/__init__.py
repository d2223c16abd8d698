"""Reports of wrong results in coremltools' converter and ExecuTorch's Core ML backend, as tests."""

from __future__ import annotations

from regressions import executorch_issues, layers, numbers, passes
from regressions.record import Here, Regression

RECORDS: tuple[Regression, ...] = (
    *numbers.RECORDS,
    *layers.RECORDS,
    *passes.RECORDS,
    *executorch_issues.RECORDS,
)

__all__ = ["RECORDS", "Here", "Regression"]
