"""Grouping by stages: the fewest groups of accepted calls that keep the graph acyclic.

Two accepted calls cannot share a partition if a path between them leads through a refused one: the
partition would have to run both before and after it. So every call gets a stage, the largest number
of times that a path to it passes from accepted to refused calls. Calls of one stage share a
partition. No path leaves a stage and returns to it, hence the partitions form no cycle; and a path
that passes through every stage needs a partition for each, hence no partitioning has fewer. Both
passes look at every edge once.

Stages count from the inputs, which is as early as a call can run. Many calls may as well run later,
such as those on constants alone; a second pass, from the outputs, moves a call to the stage of its
first user wherever fewer bytes enter partitions that way.
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
    """Group the accepted calls of a graph; return the groups in the order in which they run.

    Args:
        graph: In topological order, as every fx graph.
        refused: The calls that cannot be delegated. A ``getitem`` is refused with its source, and
            only with it.
        constants: Placeholders that every partition has inside, so that they cross no boundary.
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


def count_groups(graph: Graph, refused: Collection[Node]) -> int:
    """Return how many groups ``group_calls`` makes."""
    earliest = _earliest(graph, refused)
    return len({stage for node, stage in earliest.items() if _is_accepted(node, refused)})


def _earliest(graph: Graph, refused: Collection[Node]) -> dict[Node, int]:
    """Return the stage of every accepted call; of a refused one the first that may follow it."""
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
    """The stage of every node, and the values that each stage reads from outside.

    Attributes:
        refused: Calls that are in no partition.
        constants: Values that are inside every partition.
        of: The stage of every node.
        readers: How many accepted calls of a stage read a value, by value and stage.
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
        """Return whether a node is a call that goes into a partition."""
        return _is_accepted(node, self.refused)

    def delay(self, call: Node) -> None:
        """Move a call, with its parts, to the stage of its first user if that saves bytes."""
        unit = list(_with_parts(call))
        members = set(unit)
        users = {u for node in unit for u in node.users if u.op != "output"} - members
        early = self.of[call]
        # A refused call must find the value there before the first stage that may come after it.
        late = min((self.of[u] - (u in self.refused) for u in users), default=early)
        if late <= early:
            return
        if is_size(call):  # a size cannot cross from another partition to its users
            self._move(unit, early, late)
            return
        if not any(self.readers[node, late] for node in unit):
            return
        saved = sum(bytes_of(node) for node in unit if self.readers[node, late])
        saved += sum(
            bytes_of(value)
            for value in self._values(call)
            if not self._is_inside(value, early) and self.readers[value, early] == 1
        )
        added = sum(
            bytes_of(value)
            for value in self._values(call)
            if not self._is_inside(value, late) and not self.readers[value, late]
        )
        if added <= saved:
            self._move(unit, early, late)

    def _move(self, unit: Iterable[Node], early: int, late: int) -> None:
        for node in unit:
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
