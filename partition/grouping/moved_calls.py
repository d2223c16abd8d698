"""Calls that move to the CPU in a program for the neural engine, by the rules of ``device_check``.

Core ML would run them on the CPU as well, in the middle of its model. ExecuTorch's kernels run them
before or after the model, which then stays on the neural engine. A call for which ExecuTorch has no
kernel does not move, nor a call that would split the model: Core ML's own transfers cost no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from coreml_delegate.ops import Reason, ReasonCode, flops_of, record_of
from coreml_delegate.ops.call import OpCall, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.flops import bytes_of, tensors_of
from coreml_delegate.partition.grouping.stages import Group, group_calls
from coreml_delegate.partition.verdicts.cpu_kernels import runs_on_cpu
from coreml_delegate.partition.verdicts.parts import is_part, refuse_results
from coreml_delegate.targets import LARGEST_DIMENSION

_CHEAP = 16
"""FLOPs for each element of the result up to which a call is no work for the neural engine."""

TRIFLE = 0.001
"""Share of all FLOPs up to which calls are not worth a transfer to the neural engine."""

TRIFLE_BYTES = 2**12
"""Bytes of a weight from which its call does not move."""


def moved_calls(program: ExportedProgram, refused: Collection[Node]) -> dict[Node, Reason]:
    """Return further calls to leave to the CPU in a program for the neural engine.

    A call that would fail there always moves; other calls move if that splits no partition.

    Args:
        program: In ATen or edge dialect.
        refused: The calls that are refused already.
    """
    constants = _constants(program)
    split = _Split(program, refused, constants)
    calls = [
        node
        for node in program.graph.nodes
        if node.op == "call_function" and node not in refused and node not in constants
    ]
    calls = list(filter(_may_leave, calls))
    failing = {node: text for node in calls if (text := _failure(node, constants))}
    leaving = {
        node: text for node in calls if (text := _obstacle(node, constants)) and node not in failing
    }
    moved = failing | _without_splits(split, failing, leaving)
    for node in _at_the_ends(program, {*refused, *moved}, constants):
        moved[node] = f"a dimension above {LARGEST_DIMENSION:,} before or after the model"
    reasons = {
        node: Reason(ReasonCode.DEVICE, f"{text}: {_WHY}", _REMEDY) for node, text in moved.items()
    }
    for node in split.only_for_the_cpu(moved.keys()):
        reasons[node] = Reason(ReasonCode.DEVICE, "only calls on the CPU need it", _REMEDY)
    return refuse_results(reasons)


_WHY = "the neural engine does not run it"
_REMEDY = "Lower for no device to have Core ML run it"


def _constants(program: ExportedProgram) -> Set[Node]:
    """Return the stored constants, and the calls that compute with constants only."""
    constants = set(stored_nodes(program))
    for node in program.graph.nodes:
        if node.op == "call_function" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return constants


def _may_leave(node: Node) -> bool:
    return node.op == "call_function" and not is_part(node) and runs_on_cpu(node)


def _failure(node: Node, constants: Set[Node]) -> str | None:
    record = record_of(target_name(node.target))
    return None if record is None else record.fails_on_neural_engine(OpCall.of(node, constants))


def _obstacle(node: Node, constants: Set[Node]) -> str | None:
    """Return why the neural engine does not run a call; None if it may."""
    record = record_of(target_name(node.target))
    by_op = None if record is None else record.leaves_neural_engine(OpCall.of(node, constants))
    return by_op or _index_arithmetic(node) or _computed_size(node)


def _index_arithmetic(node: Node) -> str | None:
    used = (tensor for tensor in OpCall.of(node).outputs() if not tensor.is_floating_point())
    dtype = next((tensor.dtype for tensor in used), None)
    return None if dtype is None else f"arithmetic in {str(dtype).removeprefix('torch.')}"


def _computed_size(node: Node) -> str | None:
    new = _unbacked(node).difference(*map(_unbacked, node.all_input_nodes))
    return "a result whose size depends on values" if new else None


def _unbacked(node: Node) -> frozenset[object]:
    return frozenset(s for t in tensors_of(node.meta.get("val")) for s in free_unbacked_symbols(t))


@dataclass(slots=True)
class _Split:
    """The partitions of a program without calls that move.

    Attributes:
        flops: Estimated operations of each node.
        light: Calls of little work that can leave, from the end of the program on.
    """

    program: ExportedProgram
    refused: Collection[Node]
    constants: Set[Node]
    flops: Mapping[Node, int] = field(init=False)
    light: Sequence[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.flops = {node: flops_of(node) for node in self.program.graph.nodes}
        most = TRIFLE * sum(self.flops.values())
        self.light = [
            node
            for node in reversed(self.program.graph.nodes)
            if self.flops[node] <= most
            and node not in self.refused
            and node.users
            and _may_leave(node)
            and not _has_weights(node, self.constants)
        ]

    def count(self, moved: Set[Node]) -> int:
        """Return the number of partitions of more than a trifle.

        Calls on constants do not count: they are computed wherever they are read.
        """
        outside = {*self.refused, *moved, *self.only_for_the_cpu(moved), *self.constants}
        groups = group_calls(self.program.graph, outside, constants=self.constants)
        return len(groups) - len(trifles(groups, self.constants, self.flops.__getitem__))

    def only_for_the_cpu(self, moved: Set[Node]) -> list[Node]:
        """Return calls of little work whose results only calls read that have moved to the CPU.

        Of calls on constants, one reader on the CPU is enough: they take no input.
        """
        on_cpu = set(moved)
        calls: list[Node] = []
        for node in self.light:
            is_enough = any if node in self.constants else all
            if node not in on_cpu and is_enough(user in on_cpu for user in node.users):
                on_cpu.add(node)
                calls.append(node)
        return calls


def _without_splits(
    split: _Split, failing: Mapping[Node, str], leaving: Mapping[Node, str]
) -> dict[Node, str]:
    """Return the calls that can leave without another partition.

    If not all can, they leave from the start of the program on, then from its end.
    """
    count = split.count(failing.keys())
    if split.count(failing.keys() | leaving.keys()) <= count:
        return dict(leaving)
    moved: dict[Node, str] = {}
    moved_at_attempt: dict[Node, int] = {}
    nodes = list(leaving)
    for order in (nodes, nodes[::-1]):
        for node in order:
            # Another attempt fails as well, if no call has moved since.
            if node not in moved and moved_at_attempt.get(node) != len(moved):
                moved_at_attempt[node] = len(moved)
                now = split.count(failing.keys() | moved.keys() | {node})
                if now <= count:
                    moved[node], count = leaving[node], now
    return moved


def trifles(
    groups: Sequence[Group], constants: Collection[Node], flops: Callable[[Node], int] = flops_of
) -> list[Group]:
    """Return the groups of almost no work and no weights for which the CPU has all kernels.

    Args:
        groups: The groups of a program.
        constants: Its stored constants.
        flops: Returns the estimated operations of a call.
    """
    work = [sum(map(flops, group)) for group in groups]
    most = TRIFLE * sum(work)
    return [
        group
        for group, own_work in zip(groups, work, strict=True)
        if own_work <= most
        and all(is_part(node) or runs_on_cpu(node) for node in group)
        and not any(_has_weights(node, constants) for node in group)
    ]


def _has_weights(node: Node, constants: Collection[Node]) -> bool:
    weights = (value for value in node.all_input_nodes if value in constants)
    return any(value.op == "placeholder" and bytes_of(value) > TRIFLE_BYTES for value in weights)


def _at_the_ends(
    program: ExportedProgram, refused: Set[Node], constants: Set[Node]
) -> Iterator[Node]:
    """Yield cheap calls on large dimensions that no delegated call precedes, or follows."""
    on_cpu = set(refused)
    nodes = list(program.graph.nodes)
    for order, neighbours in (
        (nodes, lambda node: node.all_input_nodes),
        (reversed(nodes), lambda node: node.users),
    ):
        for node in order:
            if node in on_cpu or node in constants or not _is_cheap(node):
                continue
            if all(_is_outside(n, on_cpu, constants) for n in neighbours(node)):
                on_cpu.add(node)
                yield node


def _is_outside(node: Node, on_cpu: Set[Node], constants: Set[Node]) -> bool:
    return node.op != "call_function" or node in on_cpu or node in constants


def _is_cheap(node: Node) -> bool:
    """Return whether a call has a kernel, a result of a large dimension, and little work."""
    results = list(tensors_of(node.meta.get("val"))) if _may_leave(node) else []
    sizes = [size for tensor in results for size in tensor.shape if isinstance(size, int)]
    count = sum(tensor.numel() for tensor in results if not _is_symbolic(tensor))
    return max(sizes, default=0) > LARGEST_DIMENSION and flops_of(node) <= _CHEAP * count


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)
