"""Writes the table of precisions of ``docs/models.md``: ``make models``.

With names of models, it measures only them; without, the models that have no row yet.
The page is written after each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping

from models.architectures import ARCHITECTURES, Architecture
from models.measuring import MeasuredPrecision, measure_precision
from models.model_table import decibels, number, write_rows
from models.rows import ROWS, Row

from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.options.lowering_options import MIN_SQNR_DB

SECTION = "precisions"
MODELS: tuple[Architecture | Row, ...] = (*ARCHITECTURES, *(row for row in ROWS if not row.picks))
"""The rows, in order; models that pick the best of many candidates are not compared."""
_TITLES = (
    *("model", "from", "fp16", "auto", "islands", "calls in fp32"),
    *("fp16, lowering", "auto, lowering"),
)


def rows(measured: Mapping[str, MeasuredPrecision]) -> Iterator[str]:
    """Yield the lines of the table, and a line with its medians.

    Args:
        measured: By name.
    """
    known = [row for row in MODELS if row.name in measured]
    values = [measured[row.name] for row in known]
    if values:
        islands = statistics.median(value.islands for value in values)
        reached = sum(round(value.auto_db) >= MIN_SQNR_DB for value in values)
        yield (
            f"{len(values)} models: {reached} with at least {MIN_SQNR_DB:.0f} dB in `auto`, and "
            f"{islands:.0f} islands in the median."
        )
        yield ""
    yield f"| {' | '.join(_TITLES)} |"
    yield f"|{'---|' * len(_TITLES)}"
    for row, value in zip(known, values, strict=True):
        cells = [f"`{row.name}`", row.origin, decibels(value.fp16_db), decibels(value.auto_db)]
        cells += [str(value.islands), str(value.calls)]
        cells += [f"{value.fp16_seconds:.1f} s", f"{value.auto_seconds:.1f} s"]
        yield f"| {' | '.join(cells)} |"


def read(text: str) -> dict[str, MeasuredPrecision]:
    """Return the rows that a page has, by name."""
    measured: dict[str, MeasuredPrecision] = {}
    section = text.partition(f"<!-- {SECTION} -->")[2].partition(f"<!-- end of {SECTION} -->")[0]
    for line in section.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        if len(cells) == len(_TITLES) and cells[-1].endswith(" s"):
            fp16, auto = number(cells[2]), number(cells[3])
            assert fp16 is not None
            assert auto is not None
            seconds = [float(cell.removesuffix(" s")) for cell in cells[6:]]
            measured[cells[0]] = MeasuredPrecision(
                fp16, auto, int(cells[4]), int(cells[5]), seconds[0], seconds[1]
            )
    return measured


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder  # conversions are timed, not found
        write_rows(
            SECTION, MODELS, sys.argv[1:], read, rows, lambda row: measure_precision(*row.build())
        )
