"""The measures of a row, differences between two sweeps, fronts of unbeaten rows, and the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from coreml_delegate.formats.text import decibels
from coreml_delegate.scripts import console
from coreml_delegate.scripts.sweeping.records import Record, Row
from coreml_delegate.scripts.sweeping.sweep_file import Skipped

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that a record may have.

    Attributes:
        value: Returns the number of a record, or None.
        difference: Formats the difference between an earlier value and a later value.
        optional: Whether a column without any value is left out.
    """

    title: str
    value: Callable[[Record], float | None]
    text: Callable[[float], str]
    difference: Callable[[float, float], str]
    optional: bool = False


def _in_result(name: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        number = record.result.get(name)
        return None if number is None else float(number)  # infinity is text in JSON

    return value


def _in_coverage(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.result["coverage"][name] if record.is_done else None


def _delegated(record: Record) -> float | None:
    if not record.is_done:
        return None
    coverage = record.result["coverage"]
    return 1 - coverage["cpu_nodes"] / coverage["nodes"] if coverage["nodes"] else 1.0


def _latency(record: Record) -> float | None:
    return None if record.latency is None else record.latency.get("median_ms")


def _relative(before: float, after: float) -> str:
    return f"{(after - before) / before:+.1%}" if before else f"{after - before:+g}"


def _absolute(form: str, scale: int = 1) -> Callable[[float, float], str]:
    """Return a formatter of scaled differences; infinite values may be equal."""
    return lambda before, after: form.format(0.0 if before == after else scale * (after - before))


SIZE: Final = Measure(
    "size", _in_result("program_bytes"), lambda value: console.size(int(value)), _relative
)
LATENCY: Final = Measure("latency", _latency, "{:.3f} ms".format, _relative)
SQNR: Final = Measure("SQNR", _in_result("sqnr_db"), decibels, _absolute("{:+.1f} dB"))
_SHARE: Final = "{:.1%}".format, _absolute("{:+.1f} points", 100)
_COUNT: Final = "{:.0f}".format, _absolute("{:+.0f}")
MEASURES: Final = (
    SIZE,
    LATENCY,
    SQNR,
    *(
        Measure(title, _in_result(title.replace("-", "").replace(" ", "_")), *_SHARE, optional=True)
        for title in ("top-1 agreement", "top-5 agreement", "top-1 accuracy", "top-5 accuracy")
    ),
    Measure("delegated", _delegated, *_SHARE),
    Measure("partitions", _in_coverage("partitions"), *_COUNT),
    Measure("CPU nodes", _in_coverage("cpu_nodes"), *_COUNT),
    Measure("lowering", lambda r: r.cost.get("lower_seconds"), "{:.1f} s".format, _relative),
)
"""The measures of tables, in their order."""

COSTS: Final = (SIZE, LATENCY)
"""The measures that a front weighs against SQNR."""


def columns(rows: Sequence[Row]) -> list[Measure]:
    """Return the measures that a table of ``rows`` shows."""
    return [
        m for m in MEASURES if not m.optional or any(m.value(r.record) is not None for r in rows)
    ]


def unbeaten(points: Mapping[_Name, tuple[float, float]]) -> set[_Name]:
    """Return the names of the points that no other point beats.

    Args:
        points: A cost (less is better) and a gain (more is better). A point beats another if it is
            better in one of the two and at least as good in the other.
    """
    front: set[_Name] = set()
    best = -math.inf
    cost_of_best = math.inf
    for name, (cost, gain) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if not front or gain > best or (gain, cost) == (best, cost_of_best):
            front.add(name)
            best, cost_of_best = gain, cost
    return front


def points_of(rows: Sequence[Row], cost: Measure) -> dict[str, tuple[float, float]]:
    """Return cost and SQNR of the rows that have both, by name."""
    points: dict[str, tuple[float, float]] = {}
    for row in rows:
        spent, gain = cost.value(row.record), SQNR.value(row.record)
        if spent is not None and gain is not None:
            points[row.name] = (spent, gain)
    return points


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model, by its name."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.label, []).append(row)
    return models


def fronts(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return, by row name, the titles of the costs on whose front it is; each model has fronts."""
    titles: dict[str, list[str]] = {row.name: [] for row in rows}
    for model_rows in by_model(rows).values():
        for cost in COSTS:
            for name in unbeaten(points_of(model_rows, cost)):
                titles[name].append(cost.title)
    return titles


class Earlier:
    """The rows of an earlier sweep, found by model and options."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {_identity(row): row for row in rows}

    def differences(self, row: Row, measures: Sequence[Measure]) -> list[str]:
        """Return, as text, the difference of each measure from the earlier row."""
        earlier = self._rows.get(_identity(row))
        if earlier is None:
            return ["new", *[""] * (len(measures) - 1)]
        texts: list[str] = []
        for measure in measures:
            before, after = measure.value(earlier.record), measure.value(row.record)
            texts.append(
                "" if before is None or after is None else measure.difference(before, after)
            )
        if earlier.record.status is not row.record.status:
            texts[0] = f"was {earlier.record.status.value}"
        return texts

    def removed(self, rows: Sequence[Row]) -> list[str]:
        """Return the names of the earlier rows without a counterpart in ``rows``."""
        now = {_identity(row) for row in rows}
        return [row.name for identity, row in self._rows.items() if identity not in now]


def _identity(row: Row) -> tuple[object, ...]:
    return row.label, *sorted(row.options.items())


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
