"""Measurement of a program in fp16 on the command line, with the warning and its remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.formats.text import decibels
from coreml_delegate.scripts import console

if TYPE_CHECKING:
    from coreml_delegate.runtime.precision import PrecisionReport


def add_no_verify(parser: argparse.ArgumentParser) -> None:
    """Declare ``--no-verify``."""
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="with --precision float16, do not measure the program on the example inputs",
    )


def measured(
    measure: Callable[[float], PrecisionReport], min_sqnr_db: float
) -> PrecisionReport | None:
    """Measure a program in fp16; warn if its outputs miss the target.

    Args:
        measure: Measures the program, and searches for calls that need fp32.
        min_sqnr_db: The target, in dB.

    Returns:
        The report on the program as it is; None if the program does not run here.
    """
    from coreml_delegate.runtime.precision import describe_auto

    try:
        with console.step("Measuring in fp16"):
            report = measure(min_sqnr_db)
    except CoreMLDelegateError as error:
        console.note(f"not measured, because the program does not run here: {error}")
        return None
    if not report.before_db >= report.target_db:
        gain = (
            f"--precision auto {describe_auto(len(report.in_fp32), report.after_db)}"
            if report.is_reached
            else f"{decibels(report.after_db)} with all operations in fp32"
        )
        console.warn(f"{decibels(report.before_db)} on the example inputs; {gain}")
    return report.in_fp16()
