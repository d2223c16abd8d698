"""The rows of a sweep as a page: sortable columns, and fronts as drawings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coreml_delegate.formats.html_pages import page_template
from coreml_delegate.scripts.sweeping.fronts import (
    COSTS,
    SQNR,
    Earlier,
    Measure,
    by_model,
    columns,
    fronts,
    points_of,
    problems,
    unbeaten,
)
from coreml_delegate.scripts.sweeping.records import Row
from coreml_delegate.scripts.sweeping.sweep_file import Skipped

_TEMPLATE: Final = "sweep_page.html.j2"

# A drawing, in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 456, 16, 256
_EQUAL: Final = 32  # height above the scale at which outputs that are equal are drawn
_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Point:
    """A job in a drawing."""

    name: str
    x: float
    y: float
    values_text: str
    best: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """The jobs of one model by a cost and by SQNR.

    Attributes:
        points: The jobs, those on the front last.
        front: Corners of the front's line.
        across: Positions and texts of the ticks of the cost's scale.
        up: Positions and texts of the ticks of the scale in dB.
    """

    model: str
    title: str
    points: tuple[Point, ...]
    front: tuple[tuple[float, float], ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table: its text, its sort key, and the difference from an earlier sweep."""

    text: str
    order: str
    difference: str


def to_html(
    rows: Sequence[Row],
    *,
    title: str,
    skipped: Sequence[Skipped] = (),
    earlier: Earlier | None = None,
    compared: str = "",
) -> str:
    """Return one page, which needs no network."""
    measures, best = columns(rows), fronts(rows)
    drawings = [
        drawing
        for model, model_rows in by_model(rows).items()
        for cost in COSTS
        if (drawing := _draw(model, model_rows, cost)) is not None
    ]
    return page_template("coreml_delegate.scripts", _TEMPLATE).render(
        title=title,
        heads=[measure.title for measure in measures],
        rows=[(row, _cells(row, measures, earlier), best[row.name]) for row in rows],
        drawings=drawings,
        problems=problems(rows, skipped),
        compared=compared if earlier is not None else None,
        gone=[] if earlier is None else earlier.removed(rows),
        frame={"left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM},
    )


def _cells(row: Row, measures: Sequence[Measure], earlier: Earlier | None) -> list[Cell]:
    differences = [""] * len(measures) if earlier is None else earlier.differences(row, measures)
    return [_cell(row, m, difference) for m, difference in zip(measures, differences, strict=True)]


def _cell(row: Row, measure: Measure, difference: str) -> Cell:
    value = measure.value(row.record)
    if value is None:
        return Cell("", "", difference)
    order = "Infinity" if value == math.inf else "-Infinity" if value == -math.inf else repr(value)
    return Cell(measure.text(value), order, difference)


def _draw(model: str, rows: Sequence[Row], cost: Measure) -> Drawing | None:
    """Lay a drawing out; None without a job that has both values."""
    points = points_of(rows, cost)
    if not points:
        return None
    best = unbeaten(points)
    costs = [spent for spent, _ in points.values()]
    finite = [gain for _, gain in points.values() if math.isfinite(gain)]
    low_x, high_x, step_x = _scale([*costs, 0.0])
    low_y, high_y, step_y = _scale([*finite, 0.0])

    def position(spent: float, gain: float) -> tuple[float, float]:
        x = _LEFT + (_RIGHT - _LEFT) * (spent - low_x) / (high_x - low_x)
        if gain == math.inf:
            return round(x, 1), _TOP
        share = 0.0 if gain == -math.inf else (gain - low_y) / (high_y - low_y)
        return round(x, 1), round(_BOTTOM - share * (_BOTTOM - _TOP - _EQUAL), 1)

    drawn_points = [
        Point(
            name, *position(*point), f"{cost.text(point[0])}, {SQNR.text(point[1])}", name in best
        )
        for name, point in points.items()
    ]
    line = sorted((p.x, p.y) for p in drawn_points if p.best)
    equal = [(float(_TOP), "equal")] if len(finite) < len(points) else []
    return Drawing(
        model,
        cost.title,
        tuple(sorted(drawn_points, key=lambda point: point.best)),
        tuple(_stairs(line)),
        tuple((position(v, 0.0)[0], cost.text(v)) for v in _ticks(low_x, high_x, step_x)),
        (*((position(0.0, v)[1], f"{v:g} dB") for v in _ticks(low_y, high_y, step_y)), *equal),
    )


def _scale(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the ends of a scale that includes all values, and the distance of its ticks."""
    low, high = min(values), max(values)
    distance = (high - low or 1.0) / _TICKS
    size = 10 ** math.floor(math.log10(distance))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= distance)
    return math.floor(low / step) * step, math.ceil(high / step) * step or step, step


def _ticks(low: float, high: float, step: float) -> list[float]:
    return [low + n * step for n in range(round((high - low) / step) + 1)]


def _stairs(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line of steps that rises only at ``corners``, since no job lies between them."""
    line = list(corners[:1])
    for x, y in corners[1:]:
        line += [(x, line[-1][1]), (x, y)]
    return line
