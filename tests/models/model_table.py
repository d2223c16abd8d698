"""Writes the tables of ``docs/models.md``: ``make models``.

With names of models, it measures these alone and leaves the others as they are.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.measuring import ENGINES, Measured, measure
from models.rows import ROWS
from support.generated_sections import with_section

from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.options.compile_specs import Precision

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_PRECISIONS = (Precision.FLOAT32, Precision.FLOAT16)
_COLUMNS = [(p.value, e) for p in _PRECISIONS for e in ENGINES]
_EXACT, _NOT_COMPARED = "equal", "-"


def rows(measured: Mapping[str, Measured]) -> Iterator[str]:
    """Yield the lines of both tables.

    Args:
        measured: By name.
    """
    titles = (f"{e}, {p.replace('float', 'fp')}" for p, e in _COLUMNS)
    yield f"| model | from | input | partitions | on the CPU | {' | '.join(titles)} | lowering |"
    yield f"|---|---|---|{'---|' * (len(_COLUMNS) + 3)}"
    for row in ROWS:
        found = measured[row.name]
        cells = [f"`{row.name}`" if "_" in row.name else row.name, row.origin, row.size]
        cells += [str(found.partitions), str(found.on_cpu)]
        cells += [decibels(found.decibels.get(column)) for column in _COLUMNS]
        yield f"| {' | '.join(cells)} | {found.seconds:.1f} s |"
    yield ""
    yield "| model | stays on the CPU | calls | because |"
    yield "|---|---|---|---|"
    for row in ROWS:
        for (op, reason), count in sorted(measured[row.name].reasons.items()):
            yield f"| {row.name} | `{op}` | {count} | {reason} |"


def write_rows(
    section: str,
    models: Iterable[Any],
    names: Sequence[str],
    read_rows: Callable[[str], Mapping[str, Any]],
    lines: Callable[[Mapping[str, Any]], Iterable[str]],
    measure_row: Callable[[Any], Any],
) -> None:
    """Measure models, and write a section of the page after each.

    Args:
        section: Name of the section.
        models: The rows, in order.
        names: Models to measure; empty for those that have no row yet.
        read_rows: Returns the measured rows of a page, by name.
        lines: Yields the lines of measured rows.
        measure_row: Measures a model.
    """
    known_names = read_rows(PAGE.read_text("utf-8")).keys()
    for row in models:
        if row.name not in names if names else row.name in known_names:
            continue
        measured = measure_row(row)
        text = PAGE.read_text("utf-8")
        known = {**read_rows(text), row.name: measured}
        PAGE.write_text(with_section(text, section, lines(known)), "utf-8")
        print(row.name, measured, flush=True)  # noqa: T201 - the progress of minutes
        gc.collect()


def decibels(value: float | None) -> str:
    """Return a cell of a table; None is a result that is not compared."""
    if value is None:
        return _NOT_COMPARED
    return _EXACT if value == math.inf else f"{value:.0f} dB"


def read(text: str) -> dict[str, Measured]:
    """Return the rows that a page has, by name."""
    found: dict[str, Measured] = {}
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        if len(cells) == len(_COLUMNS) + 6 and cells[-1].endswith(" s"):
            name, _, _, partitions, on_cpu, *ratios, seconds = cells
            stated = zip(_COLUMNS, map(number, ratios), strict=True)
            known = {column: value for column, value in stated if value is not None}
            found[name] = Measured(int(partitions), int(on_cpu), float(seconds[:-2]), known, {})
        elif len(cells) == 4 and cells[2].isdigit():
            name, op, count, reason = cells
            found[name] = _with_reason(found[name], op, reason, int(count))
    return found


def number(cell: str) -> float | None:
    """Return the value of a cell; see ``decibels``."""
    if cell == _NOT_COMPARED:
        return None
    return math.inf if cell == _EXACT else float(re.sub(" dB$", "", cell))


def _with_reason(found: Measured, op: str, reason: str, count: int) -> Measured:
    reasons = {**found.reasons, (op, reason): count}
    return Measured(found.partitions, found.on_cpu, found.seconds, found.decibels, reasons)


def main(names: Sequence[str]) -> None:
    """Measure the named models, or all, and write the page after each."""
    known = read(PAGE.read_text("utf-8"))
    for row in ROWS:
        if names and row.name not in names and row.name in known:
            continue
        found = measure(row, _PRECISIONS, ENGINES)
        ratios = {c: v for c, v in found.decibels.items() if not (row.picks and "16" in c[0])}
        known[row.name] = Measured(
            found.partitions, found.on_cpu, found.seconds, ratios, found.reasons
        )
        print(row.name, found, flush=True)  # noqa: T201 - the progress of minutes
        gc.collect()
    text = with_section(PAGE.read_text("utf-8"), "models", rows(known))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder  # conversions are timed, not found
        main(sys.argv[1:])
