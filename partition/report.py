"""``DelegationReport``: what was delegated, what was not, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.op_rules import Reason
from coreml_delegate.op_rules.rule import target_name


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The verdict on one operation.

    Attributes:
        name: Node name in the graph.
        op: Op target, for example ``aten.conv2d.default``.
        results: Dtype and shape of each result, for example ``float32[1, 8, 30, 30]``.
        module: Path of the ``nn.Module`` it comes from, empty if unknown.
        partition: Delegation tag, or None if it stays on the CPU.
        reason: Why it stays on the CPU, or None if it is delegated.
    """

    name: str
    op: str
    results: tuple[str, ...]
    module: str
    partition: str | None
    reason: Reason | None

    @property
    def delegated(self) -> bool:
        """Whether Core ML runs it."""
        return self.partition is not None


@dataclass(frozen=True, slots=True)
class DelegationReport:
    """The verdicts on every operation of one program, in graph order."""

    nodes: tuple[NodeReport, ...]

    @property
    def partitions(self) -> tuple[str, ...]:
        """Delegation tags in order of first use."""
        return tuple(dict.fromkeys(n.partition for n in self.nodes if n.partition is not None))

    @property
    def delegated(self) -> tuple[NodeReport, ...]:
        """The operations Core ML runs."""
        return tuple(n for n in self.nodes if n.delegated)

    @property
    def undelegated(self) -> tuple[NodeReport, ...]:
        """The operations that stay on the CPU."""
        return tuple(n for n in self.nodes if not n.delegated)

    @property
    def coverage(self) -> float:
        """Share of operations that are delegated, 0 to 1 (1 for a graph without any)."""
        return len(self.delegated) / len(self.nodes) if self.nodes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "summary": {
                "nodes": len(self.nodes),
                "delegated": len(self.delegated),
                "coverage": round(self.coverage, 6),
                "partitions": list(self.partitions),
            },
            "nodes": [asdict(node) | {"delegated": node.delegated} for node in self.nodes],
        }

    def to_json(self) -> str:
        """The report as JSON; equal reports give equal text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_table(self) -> str:
        """The report for a terminal: a summary, partitions by op, then every obstacle."""
        lines = [
            f"{len(self.delegated)} of {len(self.nodes)} nodes delegated "
            f"({self.coverage:.1%}) in {len(self.partitions)} partition(s)"
        ]
        for tag in self.partitions:
            counts = Counter(n.op for n in self.nodes if n.partition == tag)
            lines.append(f"  {tag}: {sum(counts.values())} nodes")
            lines += _columns((op, str(count)) for op, count in _ranked(counts))
        if self.undelegated:
            lines.append("  on the CPU:")
            why = Counter((n.op, str(n.reason)) for n in self.undelegated)
            lines += _columns((op, str(count), reason) for (op, reason), count in _ranked(why))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_table()


def node_report(node: Node, partition: str | None, reason: Reason | None) -> NodeReport:
    """The record of one node."""
    return NodeReport(
        name=node.name,
        op=target_name(node.target),
        results=tuple(_describe(node.meta.get("val"))),
        module=_module_path(node),
        partition=partition,
        reason=reason,
    )


def _describe(value: Any) -> Iterable[str]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _describe(item)
    elif isinstance(value, torch.Tensor):
        dims = ", ".join(str(d) for d in value.shape)
        yield f"{str(value.dtype).removeprefix('torch.')}[{dims}]"
    else:
        yield type(value).__name__


def _module_path(node: Node) -> str:
    # torch.export keeps, outermost first, {key: (path, class)}.
    stack = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    return str(entries[-1][0]) if entries else ""


def _ranked(counts: Counter[Any]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    if not table:
        return []
    width = max(len(row[0]) for row in table)
    return ["    " + "  ".join((row[0].ljust(width), row[1].rjust(4), *row[2:])) for row in table]
