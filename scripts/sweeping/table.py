"""The rows of a sweep as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from coreml_delegate.scripts import console
from coreml_delegate.scripts.sweeping.fronts import Earlier, columns, fronts
from coreml_delegate.scripts.sweeping.records import Row
from coreml_delegate.scripts.sweeping.sweep_file import Skipped


def to_table(
    rows: Sequence[Row], skipped: Sequence[Skipped] = (), earlier: Earlier | None = None
) -> str:
    """Return the rows with all measures, and the problems below them."""
    best = fronts(rows)
    measures = columns(rows)
    heads = [measure.title for measure in measures]
    table = [("job", *heads, "front")]
    for row in rows:
        values = (measure.value(row.record) for measure in measures)
        texts = [
            "-" if value is None else measure.text(value)
            for measure, value in zip(measures, values, strict=True)
        ]
        table.append((row.name, *texts, ", ".join(best[row.name])))
    parts = [console.columns(table)]
    if earlier is not None:
        compared = [
            ("compared", *heads),
            *((row.name, *earlier.differences(row, measures)) for row in rows),
        ]
        parts.append(console.columns(compared))
        parts += [f"{name}: no longer there" for name in earlier.removed(rows)]
    parts += [f"{name}: {problem}" for name, problem in problems(rows, skipped)]
    return "\n".join(parts)


def problems(rows: Sequence[Row], skipped: Sequence[Skipped] = ()) -> list[tuple[str, str]]:
    """Return the names of jobs and combinations that lack something, with the reason.

    Jobs may lack a result, a latency, or kernels for operations that stay on the CPU.
    """
    listed: list[tuple[str, str]] = []
    for row in rows:
        record = row.record
        if not record.is_done:
            listed.append((row.name, f"{record.status.value}: {record.reason}"))
        elif record.latency is not None and "reason" in record.latency:
            listed.append((row.name, f"no latency: {record.latency['reason']}"))
        if record.missing_kernels:
            operators = ", ".join(record.missing_kernels)
            listed.append((row.name, f"no device loads it: no kernel for {operators}"))
    return listed + [
        (combination.name, f"skipped: {combination.reason}") for combination in skipped
    ]
