"""The records of a report as plain data: nodes, partitions, mutable buffers, obstacles."""

from __future__ import annotations

from dataclasses import dataclass

from coreml_delegate.exported.source_lines import SourceLine
from coreml_delegate.ops import Reason
from coreml_delegate.runtime.precision.report import PrecisionReport

_STATE_DTYPE = "float16"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One operation and its backend.

    Attributes:
        name: Node name in the graph.
        op: Op target, for example ``aten.conv2d.default``.
        inputs: Names of the operations whose results it uses.
        arguments: Dtype and shape of each tensor argument, as ``float32[1, 8, 30, 30]``.
        results: Dtype and shape of each result.
        module: Path of its ``nn.Module``, empty for the root or if unknown.
        module_class: Class of that module, empty if unknown.
        source: Innermost line of the user's code that produced it, or None if unknown.
        partition: Delegation tag, or None if it stays on the CPU.
        reason: Why it stays on the CPU, or None if it is delegated.
        flops: Estimated operations, see ``ops.flops``.
        weight_bytes: Size of its parameters and constants.
        cpu_obstacle: Why ExecuTorch's runtime does not run it on the CPU either, or None.
        debug_handle: ExecuTorch's debug handle, or None.
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
        tag: Delegation tag, numbered in execution order; partitions in branches of control flow
            come last, with the path of the branch as prefix.
        target: Its deployment target, for example ``iOS17``.
        demanded_by: The causes of that target.
        nodes: Number of operations.
        ops: Count of each op, most frequent first.
        flops: Estimated operations.
        weight_bytes: Parameters and constants inside.
        state_bytes: Mutable buffers that are its states.
        inputs: Number of inputs.
        input_bytes: Size of the inputs.
        outputs: Number of outputs.
        output_bytes: Size of the outputs.
        flexible: Inputs of several shapes, with ranges of sizes as ``[1..8, 4]``, or enumerated
            shapes.
        shared_by: Of several methods, the methods that share its weights, including its own. Empty
            before it is lowered, and if it is a separate model.
        not_shared: With several methods, why it is a separate model; empty if it is not.
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
        partition: Delegation tag of the partition that has it as a state, or None if it is passed
            in and out.
        reason: Why it is no state; empty for a state.
        initial: Its initial value: ``zero``, ``constant`` (the model has the value, which reads
            return in the first run) or ``stored`` (the ``.pte`` has it); ``unknown`` if the value
            is not at hand, which does not affect the result.
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
        """Where it is stored, as readable text."""
        if not self.is_state:
            return f"passed in and out: {self.reason}"
        storage = "" if self.dtype == _STATE_DTYPE else f", kept as {_STATE_DTYPE}"
        initial = ", at first a constant" if self.initial == "constant" else ""
        return f"state of {self.partition}{storage}{initial}"


@dataclass(frozen=True, slots=True)
class FoldReport:
    """One large value that was folded from constants.

    Attributes:
        name: Of the constant in the program.
        tensor: Its dtype and shape.
        growth: Its size in bytes, minus that of the constants it replaces.
    """

    name: str
    tensor: str
    growth: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Undelegated calls: of one op for one kind of reason, or by one option of the user.

    Attributes:
        ops: Distinct op targets, in graph order.
        reasons: Distinct reasons, all of one kind, in graph order.
        nodes: The calls, by name.
        flops: Estimated operations of these calls.
        partitions_if_lifted: Number of partitions if these calls were supported.
        partitions_merged: Reduction of the number of partitions in that case.
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
        """The op, or the common reason of several ops."""
        return self.ops[0] if len(self.ops) == 1 else str(self.reasons[0])


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """A documented cause of trouble on a device, found in a lowered program.

    Attributes:
        consequence: Its consequence, as readable text.
        places: The first locations, as readable text.
        others: Number of further locations.
        got: The offending value.
        reason: The explanation of the sources.
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
    """The delegated share of bytes or FLOPs."""

    delegated: int
    total: int

    @property
    def ratio(self) -> float:
        """Delegated share, 0 to 1 (1 for a total of 0)."""
        return self.delegated / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """All operations of one program, and its partitions.

    Attributes:
        partitions: The partitions in the order in which they run.
        obstacles: Obstacles to delegation; first the obstacle whose support would merge most
            partitions and delegate most estimated FLOPs.
        first_split: Name of the first node, in graph order, on the CPU between delegated nodes;
            None without such a node.
        weights: Bytes of parameters and constants that delegates take.
        buffers: The mutable buffers, in the order of the signature.
        folds: Values folded while lowering that make the program at least a megabyte larger.
        precision: The accuracy in fp16, if it was measured.
    """

    nodes: tuple[NodeReport, ...]
    partitions: tuple[PartitionReport, ...]
    obstacles: tuple[Obstacle, ...]
    first_split: str | None
    weights: Coverage
    buffers: tuple[BufferReport, ...] = ()
    folds: tuple[FoldReport, ...] = ()
    precision: PrecisionReport | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """Delegation tags in the order in which the partitions run."""
        return tuple(partition.tag for partition in self.partitions)

    @property
    def delegated(self) -> tuple[NodeReport, ...]:
        """The operations that Core ML runs."""
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
        """The delegated share of operations, 0 to 1 (1 for an empty graph)."""
        return Coverage(len(self.delegated), len(self.nodes)).ratio

    @property
    def flops(self) -> Coverage:
        """The delegated share of estimated floating-point operations."""
        return Coverage(sum(n.flops for n in self.delegated), sum(n.flops for n in self.nodes))

    def node(self, name: str) -> NodeReport:
        """Return the operation with this name.

        Raises:
            KeyError: There is no such operation.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)
