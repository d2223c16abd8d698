"""Drawings of the report's graph, in sections if it is long, each laid out in layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import fmean

from coreml_delegate.partition.report.records import NodeReport

BOX_WIDTH, BOX_HEIGHT = 176, 34
_GAP_X, _GAP_Y, _MARGIN = 20, 26, 16
_SWEEPS = 4
_BULGE, _MAX_BULGE = 14, 120

FEW, MANY = 40, 120  # operations from which a section may end, and must end
_DEPTH = 2


# Sections


@dataclass(frozen=True, slots=True)
class Section:
    """Operations drawn together.

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

    A section is a stretch of one partition, or of calls on the CPU. Each depends only on earlier
    sections, so that they form no cycle.

    Args:
        nodes: In graph order.
    """
    return [
        Section(_section_title(part), part[0].partition, tuple(part))
        for stretch in _stretches(nodes)
        for part in _split_stretch(stretch)
    ]


def _stretches(nodes: Sequence[NodeReport]) -> Iterator[list[NodeReport]]:
    """Yield the partitions, and before each the calls on the CPU that it depends on."""
    units = _units(nodes)
    unit_of = {node.name: unit for unit, members in units.items() for node in members}
    sorter = TopologicalSorter[str](dict.fromkeys(units, ()))
    for unit, members in units.items():
        inputs = (name for node in members for name in node.inputs)
        sorter.add(unit, *({unit_of[name] for name in inputs if name in unit_of} - {unit}))
    sorter.prepare()
    ready: dict[bool, deque[str]] = {delegated: deque() for delegated in (False, True)}
    on_cpu: list[NodeReport] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            ready[units[unit][0].delegated].append(unit)
        unit = (ready[False] or ready[True]).popleft()
        if units[unit][0].delegated:
            if on_cpu:
                yield on_cpu
            yield units[unit]
            on_cpu = []
        else:
            on_cpu += units[unit]
        sorter.done(unit)
    if on_cpu:
        yield on_cpu


def _units(nodes: Sequence[NodeReport]) -> Mapping[str, list[NodeReport]]:
    """Return the nodes by unit: a partition, or a call on the CPU."""
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
    """A box with its key, and its upper left corner in pixels."""

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
    """The layout of a graph; sizes in pixels."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float


def draw(inputs: Mapping[str, Sequence[str]]) -> Drawing:
    """Lay out a graph in layers, top to bottom.

    Every box is one layer below the lowest box that it depends on. Boxes of a layer are ordered by
    the mean position of their neighbours, in a few sweeps down and up. All passes but the sorting
    of layers are linear in the edges, so thousands of boxes take a fraction of a second.

    Args:
        inputs: Keys of the boxes that each box depends on, in topological order; unknown keys are
            ignored.
    """
    boxes_before = {
        key: [i for i in dict.fromkeys(keys) if i in inputs] for key, keys in inputs.items()
    }
    layer = _layers(boxes_before)
    rows = _order_layers(boxes_before, layer)
    width = max((len(row) for row in rows), default=0) * (BOX_WIDTH + _GAP_X) + 2 * _MARGIN
    boxes = {box.key: box for n, row in enumerate(rows) for box in _place_row(row, n, width)}
    edges = tuple(
        Edge(start, end, _path(boxes[start], boxes[end], layer[end] - layer[start]))
        for end, starts in boxes_before.items()
        for start in starts
    )
    height = len(rows) * (BOX_HEIGHT + _GAP_Y) + 2 * _MARGIN
    return Drawing(tuple(boxes[key] for key in boxes_before), edges, width + _MAX_BULGE, height)


def _layers(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    layer: dict[str, int] = {}
    for key, keys in inputs.items():
        layer[key] = max((layer[i] + 1 for i in keys), default=0)
    return layer


def _order_layers(inputs: Mapping[str, Sequence[str]], layer: Mapping[str, int]) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    outputs: dict[str, list[str]] = {key: [] for key in inputs}
    for key, keys in inputs.items():
        rows[layer[key]].append(key)
        for i in keys:
            outputs[i].append(key)
    position = {key: float(n) for row in rows for n, key in enumerate(row)}
    for sweep in range(_SWEEPS):
        neighbours, order = (inputs, rows) if sweep % 2 == 0 else (outputs, rows[::-1])
        for row in order:
            row.sort(key=lambda key: fmean(position[n] for n in neighbours[key] or (key,)))
            position.update((key, n - (len(row) - 1) / 2) for n, key in enumerate(row))
    return rows


def _place_row(row: Sequence[str], number: int, width: float) -> list[Box]:
    x = (width - len(row) * (BOX_WIDTH + _GAP_X) + _GAP_X) / 2
    y = _MARGIN + number * (BOX_HEIGHT + _GAP_Y)
    return [Box(key, x + n * (BOX_WIDTH + _GAP_X), y) for n, key in enumerate(row)]


def _path(start: Box, end: Box, span: int) -> str:
    """Return a line down to the next layer, or to the right around intermediate layers."""
    if span == 1:
        x1, y1 = start.x + BOX_WIDTH / 2, start.y + BOX_HEIGHT
        x2, y2 = end.x + BOX_WIDTH / 2, end.y
        middle = (y1 + y2) / 2
        return f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    x1, y1 = start.x + BOX_WIDTH, start.y + BOX_HEIGHT / 2
    x2, y2 = end.x + BOX_WIDTH, end.y + BOX_HEIGHT / 2
    bulge = max(x1, x2) + min(_BULGE * span, _MAX_BULGE)
    return f"M{x1:g} {y1:g}C{bulge:g} {y1:g} {bulge:g} {y2:g} {x2:g} {y2:g}"
