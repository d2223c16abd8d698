"""``DelegationReport``: what was delegated, what was not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coreml_delegate.conversion.blob_cache import Sharing
from coreml_delegate.errors import LoweringError, UnsupportedOperatorError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import GETITEM

_STATE_DTYPE = "float16"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's model.

    Attributes:
        file: As Python names it.
        line: Counted from 1.
        function: The function it is in.
        code: The line itself, empty if unknown.
    """

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The verdict on one operation.

    Attributes:
        name: Node name in the graph.
        op: Op target, for example ``aten.conv2d.default``.
        inputs: The operations whose results it takes, by name.
        arguments: Dtype and shape of each tensor it takes, for example ``float32[1, 8, 30, 30]``.
        results: Dtype and shape of each result.
        module: Path of the ``nn.Module`` it comes from, empty for the root or if unknown.
        module_class: Class of that module, empty if unknown.
        source: Innermost line of the user's own code that it comes from, or None if unknown.
        partition: Delegation tag, or None if it stays on the CPU.
        reason: Why it stays on the CPU, or None if it is delegated.
        flops: Estimated operations, see ``ops.flops``.
        weight_bytes: Size of the parameters and constants that it takes.
        cpu_obstacle: Why ExecuTorch's own runtime does not run it on the CPU either, or None.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    module: str
    module_class: str
    source: SourceLine | None
    partition: str | None
    reason: Reason | None
    flops: int
    weight_bytes: int
    cpu_obstacle: Reason | None = None

    @property
    def delegated(self) -> bool:
        """Whether Core ML runs it."""
        return self.partition is not None

    @property
    def place(self) -> str:
        """Where in the user's model it comes from, for a reader; empty if unknown."""
        module = f"{self.module or 'root'} ({self.module_class.rpartition('.')[2]})"
        return ", ".join(
            text for text in (module if self.module_class else "", str(self.source or "")) if text
        )


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """One delegate. Sizes are in bytes, in the dtypes of the program before conversion.

    Attributes:
        tag: Delegation tag, numbered in the order in which the delegates run.
        target: Its deployment target, ``iOS17`` or as it may be.
        demanded_by: What needs no less; see ``partition.deployment``.
        nodes: How many operations it has.
        ops: How many of each op, most frequent first.
        flops: Estimated operations.
        weight_bytes: Parameters and constants inside.
        state_bytes: Mutable buffers that it keeps.
        inputs: How many values enter it.
        input_bytes: Their size.
        outputs: How many values leave it.
        output_bytes: Their size.
        flexible: What enters in other than one shape, each with its sizes, as ``[1..8, 4]``, or
            its enumerated shapes.
        shared_by: With several methods, those that store its weights once, its own among them.
            Empty before it is lowered, and if it is a model by itself.
        not_shared: With several methods, why it is a model by itself; empty if it is not.
    """

    tag: str
    target: str
    demanded_by: tuple[str, ...]
    nodes: int
    ops: tuple[tuple[str, int], ...]
    flops: int
    weight_bytes: int
    state_bytes: int
    inputs: int
    input_bytes: int
    outputs: int
    output_bytes: int
    flexible: tuple[tuple[str, str], ...] = ()
    shared_by: tuple[str, ...] = ()
    not_shared: str = ""


@dataclass(frozen=True, slots=True)
class BufferReport:
    """What becomes of one mutable buffer.

    Attributes:
        name: In the module.
        dtype: Its dtype, for example ``float32``.
        shape: Its sizes.
        nbytes: Its size in bytes, in its own dtype.
        partition: Delegation tag of the partition whose state it is, or None if it is passed in and
            out.
        reason: Why it is no state; empty if it is one.
        initial: How it starts: ``zero``, ``constant`` (the model has the value, which the state
            reads as in the first run) or ``stored`` (the ``.pte`` has it); ``unknown`` if the value
            is not at hand, which is treated right all the same.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    nbytes: int
    partition: str | None
    reason: str
    initial: str

    @property
    def is_state(self) -> bool:
        """Whether it is a Core ML state."""
        return self.partition is not None

    @property
    def tensor(self) -> str:
        """Its dtype and shape."""
        return f"{self.dtype}[{', '.join(self.shape)}]"

    @property
    def fate(self) -> str:
        """What becomes of it, as a reader is told."""
        if not self.is_state:
            return f"passed in and out: {self.reason}"
        kept = "" if self.dtype == _STATE_DTYPE else f", kept as {_STATE_DTYPE}"
        first = ", at first a constant" if self.initial == "constant" else ""
        return f"state of {self.partition}{kept}{first}"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Calls that stay on the CPU alike: of one op for one kind of reason, or at the user's wish.

    Attributes:
        ops: Op targets, each once, in graph order.
        reasons: The reasons, all of one kind, each once, in graph order.
        nodes: The calls, by name.
        flops: Estimated operations of these calls.
        partitions_if_lifted: How many partitions would be possible, were these calls accepted.
        partitions_merged: How many fewer that is than are possible now.
    """

    ops: tuple[str, ...]
    reasons: tuple[Reason, ...]
    nodes: tuple[str, ...]
    flops: int
    partitions_if_lifted: int
    partitions_merged: int

    @property
    def code(self) -> str:
        """The kind of reason."""
        return self.reasons[0].code.value

    @property
    def title(self) -> str:
        """The op, or the reason that calls of several ops have in common."""
        return self.ops[0] if len(self.ops) == 1 else str(self.reasons[0])


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of something is delegated.

    Attributes:
        delegated: The amount that is.
        total: All of it.
    """

    delegated: int
    total: int

    @property
    def ratio(self) -> float:
        """Share, 0 to 1 (1 of nothing)."""
        return self.delegated / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class DelegationReport:
    """The verdicts on every operation of one program.

    Attributes:
        nodes: In graph order.
        partitions: In the order in which they run.
        obstacles: What keeps nodes on the CPU; first what, lifted, would merge most partitions and
            delegate most estimated FLOPs.
        first_split: The first node in graph order that stays on the CPU between delegated ones, by
            name; None if nothing splits the graph.
        weights: Bytes of parameters and constants that delegates take.
        buffers: The mutable buffers, in the order of the signature.
    """

    nodes: tuple[NodeReport, ...]
    partitions: tuple[PartitionReport, ...]
    obstacles: tuple[Obstacle, ...]
    first_split: str | None
    weights: Coverage
    buffers: tuple[BufferReport, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Delegation tags in the order in which the partitions run."""
        return tuple(partition.tag for partition in self.partitions)

    @property
    def delegated(self) -> tuple[NodeReport, ...]:
        """The operations Core ML runs."""
        return tuple(n for n in self.nodes if n.delegated)

    @property
    def undelegated(self) -> tuple[NodeReport, ...]:
        """The operations that stay on the CPU."""
        return tuple(n for n in self.nodes if not n.delegated)

    @property
    def without_kernel(self) -> tuple[NodeReport, ...]:
        """The operations that neither Core ML nor ExecuTorch's own runtime runs."""
        return tuple(n for n in self.undelegated if n.cpu_obstacle is not None)

    @property
    def coverage(self) -> float:
        """Share of operations that are delegated, 0 to 1 (1 for a graph without any)."""
        return Coverage(len(self.delegated), len(self.nodes)).ratio

    @property
    def flops(self) -> Coverage:
        """Estimated floating-point operations that are delegated."""
        return Coverage(sum(n.flops for n in self.delegated), sum(n.flops for n in self.nodes))

    def node(self, name: str) -> NodeReport:
        """The verdict on the operation of that name.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def with_sharing(self, sharing: Mapping[str, Sharing]) -> DelegationReport:
        """The report with what became of its partitions' weights; itself if that is nothing new.

        Args:
            sharing: By delegation tag.
        """
        partitions = tuple(
            replace(p, shared_by=s.methods, not_shared=s.reason) if (s := sharing.get(p.tag)) else p
            for p in self.partitions
        )
        return self if partitions == self.partitions else replace(self, partitions=partitions)

    def require_complete(self) -> None:
        """Insist that nothing stays on the CPU.

        Raises:
            UnsupportedOperatorError: Something does; lists every obstacle.
        """
        # Parts of results share the fate and the reason of the call they are of.
        left = [node for node in self.undelegated if node.op != GETITEM]
        if left:
            raise UnsupportedOperatorError(
                f"Core ML cannot take {len(left)} node(s) of the graph",
                got="; ".join(_listed((node.name, node.reason) for node in left)),
                remedy="Change the model, or lower with lower_full_graph=False and strict=False to "
                "run them on the CPU",
            )

    def require_lowerable(self) -> None:
        """Insist that ExecuTorch can lower what stays on the CPU.

        Raises:
            LoweringError: It cannot; lists every operator with cause and remedy.
        """
        left = [
            node
            for node in self.without_kernel
            if node.cpu_obstacle is not None and node.cpu_obstacle.code is not ReasonCode.KERNEL
        ]
        if left:
            raise LoweringError(
                f"ExecuTorch cannot lower {len(left)} operation(s) that stay on the CPU",
                got="; ".join(_listed((node.name, node.cpu_obstacle) for node in left)),
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; see ``report.document``."""
        from coreml_delegate.partition.report.document import to_dict

        return to_dict(self)

    def to_json(self) -> str:
        """The report as JSON; equal reports give equal text."""
        from coreml_delegate.partition.report.document import to_json

        return to_json(self)

    def to_table(self) -> str:
        """The report for a terminal: a summary, partitions by op, then every obstacle."""
        from coreml_delegate.partition.report.table import to_table

        return to_table(self)

    def to_html(self, title: str = "Delegation to Core ML") -> str:
        """The report as one HTML page that needs nothing else, with the graph to click through."""
        from coreml_delegate.partition.report.page import to_html

        return to_html(self, title)

    def __str__(self) -> str:
        return self.to_table()


def _listed(obstacles: Iterable[tuple[str, Reason | None]]) -> Iterable[str]:
    """Every reason with the number and names of the nodes that have it, and its remedy."""
    grouped: dict[tuple[str, str | None], list[str]] = {}
    for name, reason in obstacles:
        if reason is not None:
            grouped.setdefault((str(reason), reason.remedy), []).append(name)
    ranked: Mapping[tuple[str, str | None], list[str]] = dict(
        sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0][0]))
    )
    for (text, remedy), names in ranked.items():
        advice = f" [{remedy}]" if remedy else ""
        yield f"{len(names)} x {text}{advice}: {', '.join(names)}"
