"""A long graph in sections to open one at a time, in an order in which they can run.

A section is a stretch of one partition, or of calls on the CPU. As each depends on earlier ones
alone, sections form no cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coreml_delegate.partition.report.records import NodeReport

FEW, MANY = 40, 120  # operations in a section that may end, and must
_DEPTH = 2


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
    """Divide a graph.

    Args:
        nodes: In graph order.
    """
    return [
        Section(_title(part), part[0].partition, tuple(part))
        for stretch in _stretches(nodes)
        for part in _parts(stretch)
    ]


def _stretches(nodes: Sequence[NodeReport]) -> Iterator[list[NodeReport]]:
    """The partitions whole, and between them what must run on the CPU first."""
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
    """What runs as one: a partition, or a call on the CPU."""
    units: dict[str, list[NodeReport]] = {}
    for node in nodes:
        unit = f"cpu {node.name}" if node.partition is None else f"delegate {node.partition}"
        units.setdefault(unit, []).append(node)
    return units


def _parts(stretch: list[NodeReport]) -> Iterator[list[NodeReport]]:
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


def _title(nodes: Sequence[NodeReport]) -> str:
    prefixes = list(dict.fromkeys(_prefix(node) or "root" for node in nodes))
    return prefixes[0] if len(prefixes) == 1 else f"{prefixes[0]} to {prefixes[-1]}"
