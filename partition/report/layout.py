"""A drawing of a directed acyclic graph in layers, top to bottom.

Every box stands one layer below the lowest box it depends on. Within a layer, boxes are ordered by
where their neighbours stand, swept down and up a few times. All passes are linear in the edges but
for sorting the layers, so thousands of boxes take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

BOX_WIDTH, BOX_HEIGHT = 176, 34
_GAP_X, _GAP_Y, _MARGIN = 20, 26, 16
_SWEEPS = 4
_BULGE, _MOST_BULGE = 14, 120


@dataclass(frozen=True, slots=True)
class Box:
    """A placed box: key, and its upper left corner in pixels."""

    key: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection as an SVG path, with the keys of its ends."""

    start: str
    end: str
    path: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph laid out; sizes in pixels."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float


def draw(inputs: Mapping[str, Sequence[str]]) -> Drawing:
    """Lay out a graph.

    Args:
        inputs: Keys of the boxes that each box depends on, in topological order; keys that are no
            box are ignored.
    """
    known = {key: [i for i in dict.fromkeys(found) if i in inputs] for key, found in inputs.items()}
    layer = _layers(known)
    rows = _ordered(known, layer)
    width = max((len(row) for row in rows), default=0) * (BOX_WIDTH + _GAP_X) + 2 * _MARGIN
    boxes = {box.key: box for n, row in enumerate(rows) for box in _placed(row, n, width)}
    edges = tuple(
        Edge(start, end, _path(boxes[start], boxes[end], layer[end] - layer[start]))
        for end, starts in known.items()
        for start in starts
    )
    height = len(rows) * (BOX_HEIGHT + _GAP_Y) + 2 * _MARGIN
    return Drawing(tuple(boxes[key] for key in known), edges, width + _MOST_BULGE, height)


def _layers(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    layer: dict[str, int] = {}
    for key, found in inputs.items():
        layer[key] = max((layer[i] + 1 for i in found), default=0)
    return layer


def _ordered(inputs: Mapping[str, Sequence[str]], layer: Mapping[str, int]) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    outputs: dict[str, list[str]] = {key: [] for key in inputs}
    for key, found in inputs.items():
        rows[layer[key]].append(key)
        for i in found:
            outputs[i].append(key)
    place = {key: float(n) for row in rows for n, key in enumerate(row)}
    for sweep in range(_SWEEPS):
        neighbours, order = (inputs, rows) if sweep % 2 == 0 else (outputs, rows[::-1])
        for row in order:
            row.sort(key=lambda key: fmean(place[n] for n in neighbours[key] or (key,)))
            place.update((key, n - (len(row) - 1) / 2) for n, key in enumerate(row))
    return rows


def _placed(row: Sequence[str], number: int, width: float) -> list[Box]:
    left = (width - len(row) * (BOX_WIDTH + _GAP_X) + _GAP_X) / 2
    y = _MARGIN + number * (BOX_HEIGHT + _GAP_Y)
    return [Box(key, left + n * (BOX_WIDTH + _GAP_X), y) for n, key in enumerate(row)]


def _path(start: Box, end: Box, span: int) -> str:
    """Down to the next layer, or around the layers between on the right."""
    if span == 1:
        x1, y1 = start.x + BOX_WIDTH / 2, start.y + BOX_HEIGHT
        x2, y2 = end.x + BOX_WIDTH / 2, end.y
        middle = (y1 + y2) / 2
        return f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    x1, y1 = start.x + BOX_WIDTH, start.y + BOX_HEIGHT / 2
    x2, y2 = end.x + BOX_WIDTH, end.y + BOX_HEIGHT / 2
    bulge = max(x1, x2) + min(_BULGE * span, _MOST_BULGE)
    return f"M{x1:g} {y1:g}C{bulge:g} {y1:g} {bulge:g} {y2:g} {x2:g} {y2:g}"
