"""The report for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from coreml_delegate.ops.call import GETITEM
from coreml_delegate.partition.report.records import (
    NodeReport,
    PartitionReport,
    ProgramRecord,
)

_MAX_GAINS = 3  # obstacles that are listed at the end
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_INDENT = " " * 4


def quantity(count: int, unit: str) -> str:
    """Return a number with its unit in decimal prefixes: ``2.4 MB``, ``12 FLOPs``."""
    for factor, prefix in _PREFIXES:
        if count >= factor:
            return f"{count / factor:.1f} {prefix}{unit}"
    return f"{count} {unit}"


def to_table(report: ProgramRecord) -> str:
    """Return the report for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: ProgramRecord) -> Iterator[str]:
    yield (
        f"{len(report.delegated)} of {len(report.nodes)} nodes delegated "
        f"({report.coverage:.1%}) in {len(report.partitions)} partition(s)"
    )
    yield (
        f"  {report.weights.ratio:.1%} of {quantity(report.weights.total, 'B')} of weights, "
        f"{report.flops.ratio:.1%} of {quantity(report.flops.total, 'FLOPs')} (estimated)"
    )
    for partition in report.partitions:
        yield _partition(partition)
        if partition.not_shared:
            yield f"{_INDENT}shares no weights with other methods: {partition.not_shared}"
        for name, shapes in partition.flexible:
            yield f"{_INDENT}takes {name} {shapes}"
        yield from _columns((op, str(count)) for op, count in partition.ops)
    if report.buffers:
        yield "  mutable buffers:"
        yield from _columns((b.name, b.tensor, b.fate) for b in report.buffers)
    if report.folds:
        yield "  computed from constants while lowering, and stored:"
        yield from _columns(
            (fold.name, fold.tensor, f"{quantity(fold.growth, 'B')} more") for fold in report.folds
        )
    if report.precision is not None:
        yield from (f"  {line}" for line in report.precision.lines())
    if report.undelegated:
        yield "  on the CPU:"
        yield from _on_the_cpu(report.undelegated)
    yield from _advice(report)


def _partition(partition: PartitionReport) -> str:
    facts = [
        f"{partition.nodes} nodes",
        quantity(partition.flops, "FLOPs"),
        f"{quantity(partition.weight_bytes, 'B')} of weights",
        f"{quantity(partition.input_bytes, 'B')} in",
        f"{quantity(partition.output_bytes, 'B')} out",
    ]
    if partition.state_bytes:
        facts.append(f"{quantity(partition.state_bytes, 'B')} of state")
    if partition.demanded_by:
        facts.append(f"{partition.target} for {', '.join(partition.demanded_by)}")
    else:
        facts.append(f"{partition.target} or later")
    if partition.shared_by:
        facts.append(f"one model for {', '.join(partition.shared_by)}")
    return f"  {partition.tag}: {', '.join(facts)}"


def _on_the_cpu(nodes: Sequence[NodeReport]) -> Iterator[str]:
    first_nodes: dict[tuple[str, str], NodeReport] = {}
    # A getitem stays with its call, for the same reason.
    calls = [node for node in nodes if node.op != GETITEM]
    for node in calls:
        first_nodes.setdefault((node.op, str(node.reason)), node)
    counts = Counter((node.op, str(node.reason)) for node in calls)
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = _columns((op, str(count), reason) for (op, reason), count in rows)
    for line, (key, count) in zip(lines, rows, strict=True):
        yield line
        node = first_nodes[key]
        if node.place:
            yield f"{_INDENT}  {'first ' if count > 1 else ''}at {node.place}"
        for reason in filter(None, (node.reason, node.cpu_obstacle)):
            if reason is node.cpu_obstacle:
                yield f"{_INDENT}  the CPU does not run it either: {reason}"
            if reason.remedy:
                yield f"{_INDENT}  -> {reason.remedy}"


def _advice(report: ProgramRecord) -> Iterator[str]:
    if report.first_split is not None:
        node = report.node(report.first_split)
        where = f" at {node.place}" if node.place else ""
        yield f"  first split by {node.name}{where}"
    gains = [o for o in report.obstacles if o.partitions_merged > 0][:_MAX_GAINS]
    if gains:
        yield "  most partitions would merge if these were supported:"
        yield from _columns(
            (
                obstacle.title,
                str(len(obstacle.nodes)),
                f"{obstacle.partitions_merged} fewer, {quantity(obstacle.flops, 'FLOPs')} more",
            )
            for obstacle in gains
        )


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    if not table:
        return []
    width = max(len(row[0]) for row in table)
    return [_INDENT + "  ".join((row[0].ljust(width), row[1].rjust(4), *row[2:])) for row in table]
