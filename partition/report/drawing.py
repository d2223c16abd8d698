"""The report's graph as drawings: a long graph in sections, each of them laid out in layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from coreml_delegate.partition.report.records import NodeReport

BOX_WIDTH, BOX_HEIGHT = 176, 34
_GAP_X, _GAP_Y, _MARGIN = 20, 26, 16
_SWEEPS = 4
_BULGE, _MOST_BULGE = 14, 120

FEW, MANY = 40, 120  # operations in a section that may end, and must
_DEPTH = 2


# Sections


@dataclass(frozen=True, slots=True)
class Section:
    """Operations shown together.

    Attributes:
        title: The module they come from.
        partition: Tag of the delegate, or None on the CPU.
        nodes: In an order in which they can run.
    """

    title: str
    partition: str | None
    nodes: tuple[NodeReport, ...]


def sections(nodes: Sequence[NodeReport]) -> list[Section]:
    """Return the sections of a graph, in an order in which they can run.

    A section is a stretch of one partition, or of calls on the CPU. As each depends on earlier ones
    alone, sections form no cycle.

    Args:
        nodes: In graph order.
    """
    return [
        Section(_section_title(part), part[0].partition, tuple(part))
        for stretch in _stretches(nodes)
        for part in _split_stretch(stretch)
    ]


def _stretches(nodes: Sequence[NodeReport]) -> Iterator[list[NodeReport]]:
    """Yield the partitions whole, and between them the calls on the CPU that must run first."""
    units = _units(nodes)
    unit_of = {node.name: unit for unit, members in units.items() for node in members}
    waits = {
        unit: {unit_of[i] for node in members for i in node.inputs if i in unit_of} - {unit}
        for unit, members in units.items()
    }
    followers: dict[str, list[str]] = {unit: [] for unit in units}
    for unit, before in waits.items():
        for other in before:
            followers[other].append(unit)
    missing = {unit: len(before) for unit, before in waits.items()}
    ready = {
        delegated: deque(
            u for u, n in missing.items() if n == 0 and (units[u][0].delegated is delegated)
        )
        for delegated in (False, True)
    }
    on_cpu: list[NodeReport] = []
    while ready[False] or ready[True]:
        unit = (ready[False] or ready[True]).popleft()
        if units[unit][0].delegated:
            if on_cpu:
                yield on_cpu
            yield units[unit]
            on_cpu = []
        else:
            on_cpu += units[unit]
        for other in followers[unit]:
            missing[other] -= 1
            if missing[other] == 0:
                ready[units[other][0].delegated].append(other)
    if on_cpu:
        yield on_cpu


def _units(nodes: Sequence[NodeReport]) -> Mapping[str, list[NodeReport]]:
    """Return the nodes that run as one, by unit: a partition, or a call on the CPU."""
    units: dict[str, list[NodeReport]] = {}
    for node in nodes:
        unit = f"cpu {node.name}" if node.partition is None else f"delegate {node.partition}"
        units.setdefault(unit, []).append(node)
    return units


def _split_stretch(stretch: list[NodeReport]) -> Iterator[list[NodeReport]]:
    part: list[NodeReport] = []
    for node in stretch:
        new_module = part and _prefix(node) != _prefix(part[-1])
        if len(part) >= MANY or (len(part) >= FEW and new_module):
            yield part
            part = []
        part.append(node)
    if part:
        yield part


def _prefix(node: NodeReport) -> str:
    return ".".join(node.module.split(".")[:_DEPTH])


def _section_title(nodes: Sequence[NodeReport]) -> str:
    prefixes = list(dict.fromkeys(_prefix(node) or "root" for node in nodes))
    return prefixes[0] if len(prefixes) == 1 else f"{prefixes[0]} to {prefixes[-1]}"


# Layers


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
    """Lay out a graph in layers, top to bottom.

    Every box stands one layer below the lowest box it depends on. Within a layer, boxes are ordered
    by where their neighbours stand, swept down and up a few times. All passes are linear in the
    edges but for sorting the layers, so thousands of boxes take a fraction of a second.

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
    """Return a line down to the next layer, or around the layers between on the right."""
    if span == 1:
        x1, y1 = start.x + BOX_WIDTH / 2, start.y + BOX_HEIGHT
        x2, y2 = end.x + BOX_WIDTH / 2, end.y
        middle = (y1 + y2) / 2
        return f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    x1, y1 = start.x + BOX_WIDTH, start.y + BOX_HEIGHT / 2
    x2, y2 = end.x + BOX_WIDTH, end.y + BOX_HEIGHT / 2
    bulge = max(x1, x2) + min(_BULGE * span, _MOST_BULGE)
    return f"M{x1:g} {y1:g}C{bulge:g} {y1:g} {bulge:g} {y2:g} {x2:g} {y2:g}"
