"""The choice of the calls that compute in fp32 where fp16 loses their numbers.

A program is lowered in fp16 and measured; then it is lowered with the chosen calls in fp32 and
measured again. coremltools may fuse other operations around calls in fp32, so a program that misses
the target by some dB is chosen for anew, with a target higher by as much.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from coreml_delegate.runtime.precision.islands import PrecisionMeasurement
from coreml_delegate.runtime.precision.report import Call, PrecisionReport

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MARGIN_DB = 3.0


class Measure(Protocol):
    """``Measurements.measure``, or ``measure_method`` of a program on its samples."""

    def __call__(self, *, min_sqnr_db: float, search: bool = True) -> PrecisionMeasurement:
        """Measure the program."""
        ...


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A lowered program, to measure.

    Attributes:
        measure: Measures it.
        calls: Its calls by debug handle.
    """

    measure: Measure
    calls: Mapping[int, Sequence[Call]]

    def report(self, min_sqnr_db: float) -> PrecisionReport:
        """Measure the program, and search for the calls that need fp32."""
        measurement = self.measure(min_sqnr_db=min_sqnr_db)
        return PrecisionReport.of(measurement, self.calls, target_db=min_sqnr_db)


Lower: TypeAlias = Callable[[frozenset[str]], LoweredProgram]
"""Lowers a program in fp16, with the named calls in fp32."""


def choose_fp32_calls(lower: Lower, min_sqnr_db: float) -> PrecisionReport:
    """Return the calls that have to compute in fp32, and the accuracy with them.

    Logs a warning if the target is missed.

    Args:
        lower: Lowers the program.
        min_sqnr_db: Ratio of signal to error that every output has to reach, in dB.

    Raises:
        CoreMLDelegateError: The program cannot be lowered, or see ``measure_method``.
    """
    report = _choose(lower, min_sqnr_db)
    if not report.is_reached:
        logger.warning(
            "the outputs reach %.1f dB of %g dB; the report lists the operations that lose most",
            report.after_db,
            report.target_db,
        )
    return report


def _choose(lower: Lower, min_sqnr_db: float) -> PrecisionReport:
    plain = lower(frozenset())
    reports: list[PrecisionReport] = []
    goal = min_sqnr_db
    for _ in range(_ATTEMPTS):
        measurement = plain.measure(min_sqnr_db=goal)
        report = PrecisionReport.of(measurement, plain.calls, target_db=min_sqnr_db)
        if not report.in_fp32:
            # Without names, the islands cannot be lowered.
            report = report.in_fp16() if report.islands else report
            return max(reports, key=_after_db, default=report)
        after = lower(report.in_fp32).measure(min_sqnr_db=goal, search=False).before_db
        report = PrecisionReport.of(measurement, plain.calls, target_db=min_sqnr_db, after_db=after)
        reports.append(report)
        missing = min_sqnr_db - report.after_db
        if missing <= 0 or math.isinf(missing):
            break
        goal += missing + _MARGIN_DB
    return max(reports, key=_after_db)


def _after_db(report: PrecisionReport) -> float:
    return report.after_db
