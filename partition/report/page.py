"""The report as one HTML page that works offline, with inlined styles, script and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coreml_delegate.formats.html_pages import page_template
from coreml_delegate.formats.text import decibels
from coreml_delegate.partition.report.drawing import (
    BOX_HEIGHT,
    BOX_WIDTH,
    Drawing,
    Section,
    draw,
    sections,
)
from coreml_delegate.partition.report.records import DeviceFinding, NodeReport, ProgramRecord
from coreml_delegate.partition.report.table import quantity

_PACKAGE = "coreml_delegate.partition.report"
_TEMPLATE = "page.html.j2"
_MAX_UNDIVIDED = 300  # nodes up to which the graph is one picture
_LABEL = 24  # characters of a box's label
_GOLDEN_ANGLE = 137.508  # degrees: neighbouring partitions get hues far apart


@dataclass(frozen=True, slots=True)
class Shape:
    """The contents of a box.

    Attributes:
        anchor: Fragment of the page that a click leads to.
        label: First line.
        detail: Second line.
        hint: Tooltip.
        partition: Tag, or None on the CPU.
    """

    anchor: str
    label: str
    detail: str
    hint: str
    partition: str | None


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with the contents of its boxes."""

    drawing: Drawing
    shapes: Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Panel:
    """An expandable section with its picture."""

    anchor: str
    section: Section
    picture: Picture


def to_html(
    report: ProgramRecord,
    title: str,
    device: Sequence[DeviceFinding] | None = None,
    processors: Sequence[str] = (),
) -> str:
    """Return the page."""
    anchors = {node.name: f"node-{n}" for n, node in enumerate(report.nodes)}
    divided = sections(report.nodes) if len(report.nodes) > _MAX_UNDIVIDED else []
    panels = [
        Panel(f"section-{n}", section, _nodes(section.nodes, anchors))
        for n, section in enumerate(divided)
    ]
    template = page_template(
        _PACKAGE, _TEMPLATE, quantity=quantity, decibels=decibels, label=_truncate
    )
    return template.render(
        title=title,
        report=report,
        device=device,
        processors=processors,
        split=report.node(report.first_split) if report.first_split is not None else None,
        overview=_overview(panels) if panels else _nodes(report.nodes, anchors),
        panels=panels,
        anchors=anchors,
        colours={
            tag: f"hsl({(200 + n * _GOLDEN_ANGLE) % 360:.0f} 62% 82%)"
            for n, tag in enumerate(report.tags)
        },
        details={anchors[node.name]: _details(node) for node in report.nodes},
        box_width=BOX_WIDTH,
        box_height=BOX_HEIGHT,
    )


def _truncate(text: str) -> str:
    """Return ``text`` cut to the width of a box."""
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"


def _nodes(nodes: Sequence[NodeReport], anchors: Mapping[str, str]) -> Picture:
    shapes = {
        node.name: Shape(
            anchor=anchors[node.name],
            label=_short(node.op),
            detail=node.results[0] if node.results else "",
            hint=f"{node.name}: {node.reason or node.partition}",
            partition=node.partition,
        )
        for node in nodes
    }
    return Picture(draw({node.name: node.inputs for node in nodes}), shapes)


def _overview(panels: Sequence[Panel]) -> Picture:
    panel_of = {node.name: panel.anchor for panel in panels for node in panel.section.nodes}
    inputs = {
        panel.anchor: sorted(
            {panel_of[i] for node in panel.section.nodes for i in node.inputs} - {panel.anchor},
            key=lambda anchor: int(anchor.rpartition("-")[2]),
        )
        for panel in panels
    }
    shapes = {
        panel.anchor: Shape(
            anchor=panel.anchor,
            label=panel.section.title,
            detail=f"{panel.section.partition or 'CPU'}: {len(panel.section.nodes)} nodes",
            hint=f"{panel.section.title}: open",
            partition=panel.section.partition,
        )
        for panel in panels
    }
    return Picture(draw(inputs), shapes)


def _short(op: str) -> str:
    """Return ``conv2d`` for ``aten.conv2d.default``."""
    namespace, _, qualified = op.partition(".")
    name = qualified if namespace in ("aten", "operator") else op
    return name.removesuffix(".default")


def _details(node: NodeReport) -> dict[str, Any]:
    """Return the facts for the side panel, by heading."""
    reason, obstacle = node.reason, node.cpu_obstacle
    facts: dict[str, str | None] = {
        "op": node.op,
        "runs on": "Core ML" if node.delegated else "CPU",
        "partition": node.partition,
        "why not": None if reason is None else str(reason),
        "reason code": None if reason is None else reason.code.value,
        "remedy": None if reason is None else reason.remedy,
        "why not on the CPU": None if obstacle is None else str(obstacle),
        "remedy on the CPU": None if obstacle is None else obstacle.remedy,
        "takes": "\n".join(node.arguments) or None,
        "gives": "\n".join(node.results) or None,
        "module": f"{node.module or 'root'} ({node.module_class})" if node.module_class else None,
        "source": _source(node),
        "estimated FLOPs": f"{node.flops:,}",
        "weights": quantity(node.weight_bytes, "B"),
    }
    return {"name": node.name, "facts": [[k, v] for k, v in facts.items() if v is not None]}


def _source(node: NodeReport) -> str | None:
    if node.source is None:
        return None
    line = asdict(node.source)
    return "{file}:{line}, in {function}\n{code}".format(**line).rstrip()
