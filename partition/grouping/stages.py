"""Grouping by stages: the fewest groups of accepted calls that keep the graph acyclic.

Two accepted calls cannot share a partition if a path between them leads through a refused call: the
partition would have to run both before and after it. So every call gets a stage, the largest number
of transitions from accepted to refused calls on a path to it. Calls of one stage share a partition.
No path leaves a stage and returns to it, hence the partitions form no cycle; and a path through
every stage needs a partition per stage, hence no partitioning has fewer. Both passes visit every
edge once.

Stages count from the inputs, the earliest time for a call. Many calls can run later, such as calls
with only constant arguments; a second pass, from the outputs, moves a call to the stage of its
first user if fewer bytes then enter partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from coreml_delegate.ops.flops import bytes_of
from coreml_delegate.ops.sizes import is_size
from coreml_delegate.partition.verdicts.parts import is_part

Group = tuple[Node, ...]
"""The calls of one partition, in graph order."""


def group_calls(
    graph: Graph, refused: Collection[Node], *, constants: Collection[Node] = ()
) -> list[Group]:
    """Group the accepted calls of a graph; return the groups in execution order.

    Args:
        graph: In topological order, as every fx graph.
        refused: The calls that cannot be delegated. A ``getitem`` is refused if and only if its
            source is.
        constants: Placeholders inside every partition, which cross no boundary.
    """
    stages = _Stages(frozenset(refused), frozenset(constants), _earliest(graph, refused))
    for node in reversed(graph.nodes):
        if stages.is_accepted(node) and not is_part(node):
            stages.delay(node)
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if stages.is_accepted(node):
            groups.setdefault(stages.of[node], []).append(node)
    return [tuple(groups[stage]) for stage in sorted(groups)]


def cut(group: Group, constants: Collection[Node], limit: int) -> list[Group]:
    """Cut a group where its constants exceed a size; the parts run one after the other.

    Args:
        group: In graph order.
        constants: The constants of the program.
        limit: Most bytes of the constants of a part, unless one call has more.
    """
    parts: list[list[Node]] = []
    inside, total = set[Node](), 0
    for node in group:
        new = {value for value in node.all_input_nodes if value in constants} - inside
        count = sum(map(bytes_of, new))
        if not parts or (total + count > limit and not is_part(node)):
            parts.append([])
            new = {value for value in node.all_input_nodes if value in constants}
            inside, total, count = set(), 0, sum(map(bytes_of, new))
        parts[-1].append(node)
        inside |= new
        total += count
    return [tuple(part) for part in parts]


def count_groups(graph: Graph, refused: Collection[Node]) -> int:
    """Return the number of groups of ``group_calls``."""
    earliest = _earliest(graph, refused)
    return len({stage for node, stage in earliest.items() if _is_accepted(node, refused)})


def _earliest(graph: Graph, refused: Collection[Node]) -> dict[Node, int]:
    """Return the stage of every accepted call, and the first stage after every refused call."""
    stages: dict[Node, int] = {}
    for node in graph.nodes:
        if _is_accepted(node, refused):
            stages[node] = max((stages[n] for n in node.all_input_nodes), default=0)
        else:
            before = (stages[n] + _is_accepted(n, refused) for n in node.all_input_nodes)
            stages[node] = max(before, default=0)
    return stages


def _is_accepted(node: Node, refused: Collection[Node]) -> bool:
    return node.op == "call_function" and node not in refused


@dataclass(slots=True)
class _Stages:
    """The stage of every node, and the outer values that each stage reads.

    Attributes:
        refused: Calls that are in no partition.
        constants: Values that are inside every partition.
        of: The stage of every node.
        readers: Number of accepted calls that read a value, by value and stage of the call.
    """

    refused: frozenset[Node]
    constants: frozenset[Node]
    of: dict[Node, int]
    readers: Counter[tuple[Node, int]] = field(default_factory=Counter[tuple[Node, int]])

    def __post_init__(self) -> None:
        for node in self.of:
            if self.is_accepted(node):
                self.readers.update((value, self.of[node]) for value in node.all_input_nodes)

    def is_accepted(self, node: Node) -> bool:
        """Return whether a node is a call in a partition."""
        return _is_accepted(node, self.refused)

    def delay(self, call: Node) -> None:
        """Move a call, with its parts, to the stage of its first user if that saves bytes."""
        call_and_parts = list(_with_parts(call))
        members = set(call_and_parts)
        users = {u for node in call_and_parts for u in node.users if u.op != "output"} - members
        current = self.of[call]
        # A refused user needs the value before the first stage after it.
        late = min((self.of[u] - (u in self.refused) for u in users), default=current)
        if late <= current:
            return
        if is_size(call):  # a size cannot cross from another partition to its users
            self._move(call_and_parts, current, late)
            return
        if not any(self.readers[node, late] for node in call_and_parts):
            return
        saved = sum(bytes_of(node) for node in call_and_parts if self.readers[node, late])
        saved += sum(
            bytes_of(value)
            for value in self._values(call)
            if not self._is_inside(value, current) and self.readers[value, current] == 1
        )
        added = sum(
            bytes_of(value)
            for value in self._values(call)
            if not self._is_inside(value, late) and not self.readers[value, late]
        )
        if added <= saved:
            self._move(call_and_parts, current, late)

    def _move(self, nodes: Iterable[Node], early: int, late: int) -> None:
        for node in nodes:
            self.of[node] = late
            for value in node.all_input_nodes:
                self.readers[value, early] -= 1
                self.readers[value, late] += 1

    def _values(self, call: Node) -> Iterator[Node]:
        return (value for value in call.all_input_nodes if value not in self.constants)

    def _is_inside(self, value: Node, stage: int) -> bool:
        return self.is_accepted(value) and self.of[value] == stage


def _with_parts(call: Node) -> Iterator[Node]:
    yield call
    for user in call.users:
        if is_part(user):
            yield from _with_parts(user)
