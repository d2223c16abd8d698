"""The records of a report, as plain data: nodes, partitions, mutable buffers, obstacles."""

from __future__ import annotations

from dataclasses import dataclass

from coreml_delegate.ops import Reason
from coreml_delegate.source_lines import SourceLine

_STATE_DTYPE = "float16"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One operation, and where it runs.

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
        debug_handle: ExecuTorch's number of the call it comes from; None if it has none.
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
    debug_handle: int | None = None

    @property
    def delegated(self) -> bool:
        """Whether Core ML runs it."""
        return self.partition is not None

    @property
    def place(self) -> str:
        """Its module and source line in the user's model, as text; empty if unknown."""
        module = f"{self.module or 'root'} ({self.module_class.rpartition('.')[2]})"
        return ", ".join(
            text for text in (module if self.module_class else "", str(self.source or "")) if text
        )


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """One delegate. Sizes are in bytes, in the dtypes of the program before conversion.

    Attributes:
        tag: Delegation tag, numbered in the order in which the delegates run; behind the program's
            own are those of branches of control flow, with the names of the branches before.
        target: Its deployment target, for example ``iOS17``.
        demanded_by: The causes of that target; see ``grouping.deployment``.
        nodes: How many operations it has.
        ops: How many of each op, most frequent first.
        flops: Estimated operations.
        weight_bytes: Parameters and constants inside.
        state_bytes: Mutable buffers that it keeps.
        inputs: How many values enter it.
        input_bytes: Their size.
        outputs: How many values leave it.
        output_bytes: Their size.
        flexible: The inputs that may have several shapes, each with its sizes, as ``[1..8, 4]``, or
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
    """One mutable buffer: a Core ML state, or passed in and out.

    Attributes:
        name: Its name in the module.
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
        """Where it is kept, as text for a reader."""
        if not self.is_state:
            return f"passed in and out: {self.reason}"
        kept = "" if self.dtype == _STATE_DTYPE else f", kept as {_STATE_DTYPE}"
        first = ", at first a constant" if self.initial == "constant" else ""
        return f"state of {self.partition}{kept}{first}"


@dataclass(frozen=True, slots=True)
class FoldReport:
    """One large value that was computed from constants while lowering.

    Attributes:
        name: Of the constant in the program.
        tensor: Its dtype and shape.
        growth: Bytes that it adds to the program, less those of what it replaces.
    """

    name: str
    tensor: str
    growth: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Calls that stay on the CPU: of one op for one kind of reason, or by one option of the user.

    Attributes:
        ops: Op targets, each once, in graph order.
        reasons: The reasons, all of one kind, each once, in graph order.
        nodes: The calls, by name.
        flops: Estimated operations of these calls.
        partitions_if_lifted: How many partitions would be possible if these calls were supported.
        partitions_merged: By how many partitions that is fewer than are possible now.
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
class DeviceFinding:
    """A documented cause of trouble on a device, found in a lowered program.

    Attributes:
        rule: Name of the rule.
        consequence: What it leads to, for a reader.
        delegate: Names of the delegates.
        places: The first places, for a reader.
        others: How many more there are.
        got: The value found.
        reason: What the sources say.
        remedy: What the user can do, in the imperative.
        sources: Title and address of each source.
    """

    rule: str
    consequence: str
    delegate: str
    places: tuple[str, ...]
    others: int
    got: str
    reason: str
    remedy: str
    sources: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share that is delegated of bytes or FLOPs.

    Attributes:
        delegated: The delegated amount.
        total: The whole amount.
    """

    delegated: int
    total: int

    @property
    def ratio(self) -> float:
        """Share, 0 to 1 (1 of nothing)."""
        return self.delegated / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """All operations of one program, and its partitions.

    Attributes:
        nodes: The operations in graph order.
        partitions: The partitions in the order in which they run.
        obstacles: What keeps nodes on the CPU; first the obstacle that, if supported, would merge
            most partitions and delegate most estimated FLOPs.
        first_split: The first node in graph order that stays on the CPU between delegated ones, by
            name; None if nothing splits the graph.
        weights: Bytes of parameters and constants that delegates take.
        buffers: The mutable buffers, in the order of the signature.
        folds: The values computed while lowering that make the program a megabyte larger, or more.
    """

    nodes: tuple[NodeReport, ...]
    partitions: tuple[PartitionReport, ...]
    obstacles: tuple[Obstacle, ...]
    first_split: str | None
    weights: Coverage
    buffers: tuple[BufferReport, ...] = ()
    folds: tuple[FoldReport, ...] = ()

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
        """The share of operations that are delegated, 0 to 1 (1 for a graph without any)."""
        return Coverage(len(self.delegated), len(self.nodes)).ratio

    @property
    def flops(self) -> Coverage:
        """Estimated floating-point operations that are delegated."""
        return Coverage(sum(n.flops for n in self.delegated), sum(n.flops for n in self.nodes))

    def node(self, name: str) -> NodeReport:
        """Return the operation with this name.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)
