"""``DelegationReport``: the records of one program, checks, and output formats.

``DelegationReport.to_dict`` and ``to_json`` give one object::

    schema_version  1; raised when a field is removed or changes its meaning, not when one is added
    summary         nodes, delegated, coverage (of nodes, 0 to 1), partitions (tags in the order in
                    which they run), first_split (name of a node, or null), weights and flops (each
                    delegated, total, coverage)
    partitions      list of PartitionReport; ops as an object of counts
    obstacles       list of Obstacle, most rewarding first; code beside its fields
    buffers         list of BufferReport, one for each mutable buffer
    folds           list of FoldReport
    precision       PrecisionReport, with before_db, after_db, is_reached and share, or null
    nodes           list of NodeReport in graph order; delegated beside its fields

Sizes are in bytes. Reasons have code, text and remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coreml_delegate.errors import (
    LoweringError,
    MissingKernelError,
    UnsupportedOperatorError,
)
from coreml_delegate.formats.text import to_json
from coreml_delegate.lowering.store import Sharing
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import GETITEM
from coreml_delegate.partition.report.page import to_html
from coreml_delegate.partition.report.records import (
    Coverage,
    DeviceFinding,
    ProgramRecord,
)
from coreml_delegate.partition.report.table import to_table

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class DelegationReport(ProgramRecord):
    """The report on one program: delegated calls, undelegated calls, and the reasons.

    For its attributes see ``ProgramRecord``.
    """

    def with_sharing(self, sharing: Mapping[str, Sharing]) -> DelegationReport:
        """Return the report with the methods that share weights; itself if nothing changes.

        Args:
            sharing: By delegation tag, of the partitions that are lowered.
        """
        partitions = tuple(
            replace(p, shared_by=s.methods, not_shared=s.reason) if (s := sharing.get(p.tag)) else p
            for p in self.partitions
        )
        return self if partitions == self.partitions else replace(self, partitions=partitions)

    def require_complete(self) -> None:
        """Check that nothing stays on the CPU.

        Raises:
            UnsupportedOperatorError: A call stays; lists every obstacle.
        """
        # A getitem stays with its call, for the same reason.
        undelegated = [node for node in self.undelegated if node.op != GETITEM]
        if undelegated:
            raise UnsupportedOperatorError(
                f"Core ML cannot take {len(undelegated)} node(s) of the graph",
                got="; ".join(_summarize((node.name, node.reason) for node in undelegated)),
                remedy="Change the model, or lower with lower_full_graph=False and strict=False to "
                "run them on the CPU",
            )

    def require_lowerable(self) -> None:
        """Check that ExecuTorch can lower the calls that stay on the CPU.

        Raises:
            LoweringError: It cannot lower one; lists every operator with cause and remedy.
        """
        unlowerable = [
            node
            for node in self.without_kernel
            if node.cpu_obstacle is not None and node.cpu_obstacle.code is not ReasonCode.KERNEL
        ]
        if unlowerable:
            raise LoweringError(
                f"ExecuTorch cannot lower {len(unlowerable)} operation(s) that stay on the CPU",
                got="; ".join(_summarize((node.name, node.cpu_obstacle) for node in unlowerable)),
            )

    def require_kernels(self) -> None:
        """Check that ExecuTorch's runtime has a kernel for every call that stays on the CPU.

        Raises:
            MissingKernelError: It lacks one; lists every operator with cause and remedy.
        """
        nodes = self.without_kernel
        if nodes:
            raise MissingKernelError(
                f"no device loads the program: it has {len(nodes)} operation(s) that neither Core "
                "ML nor ExecuTorch's runtime runs",
                got="; ".join(_summarize((node.name, node.cpu_obstacle) for node in nodes)),
                remedy="If the app registers kernels for them, pass --allow-missing-kernels",
            )

    def require_precision(self) -> None:
        """Check that the measured outputs reach their ratio of signal to error.

        Raises:
            PrecisionError: They miss it; lists the operations that lose most.
        """
        if self.precision is not None:
            self.precision.require()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": {
                "nodes": len(self.nodes),
                "delegated": len(self.delegated),
                "coverage": round(self.coverage, 6),
                "partitions": list(self.tags),
                "first_split": self.first_split,
                "weights": _coverage(self.weights),
                "flops": _coverage(self.flops),
            },
            "partitions": [asdict(p) | {"ops": dict(p.ops)} for p in self.partitions],
            "obstacles": [asdict(o) | {"code": o.code} for o in self.obstacles],
            "buffers": [asdict(b) for b in self.buffers],
            "folds": [asdict(f) for f in self.folds],
            "precision": None if self.precision is None else self.precision.to_dict(),
            "nodes": [asdict(n) | {"delegated": n.delegated} for n in self.nodes],
        }

    def to_json(self) -> str:
        """Return the report as JSON; equal reports give equal text."""
        return to_json(self.to_dict(), indent=2, sort_keys=True)

    def to_table(self) -> str:
        """Return the report for a terminal: a summary, partitions by op, then every obstacle."""
        return to_table(self)

    def to_html(
        self,
        title: str = "Delegation to Core ML",
        *,
        device: Sequence[DeviceFinding] | None = None,
        processors: Sequence[str] = (),
    ) -> str:
        """Return the report as one HTML page that works offline, with a clickable graph.

        Args:
            title: Title of the page.
            device: Findings of ``coreml-delegate check`` in the lowered program; None omits the
                section.
            processors: Lines of this section on the processors that run the partitions.
        """
        return to_html(self, title, device, processors)

    def __str__(self) -> str:
        return self.to_table()


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return asdict(coverage) | {"coverage": round(coverage.ratio, 6)}


def _summarize(obstacles: Iterable[tuple[str, Reason | None]]) -> Iterable[str]:
    """Yield every reason with the number and names of its nodes, and its remedy."""
    grouped: dict[tuple[str, str | None], list[str]] = {}
    for name, reason in obstacles:
        if reason is not None:
            grouped.setdefault((str(reason), reason.remedy), []).append(name)
    ranked = sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0][0]))
    for (text, remedy), names in ranked:
        advice = f" [{remedy}]" if remedy else ""
        yield f"{len(names)} x {text}{advice}: {', '.join(names)}"
