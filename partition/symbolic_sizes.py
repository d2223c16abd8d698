"""Numbers computed from shapes, which cross no boundary of a partition.

A delegate is passed tensors alone. Sizes that depend on each other stay together: all that compute
them and all calls that use them are in one partition, or none is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch.fx import Graph, Node

from coreml_delegate.op_rules import Reason, ReasonCode
from coreml_delegate.op_rules.sizes import is_size
from coreml_delegate.partition.grouping import Group


def stranded_sizes(graph: Graph, groups: Iterable[Group]) -> dict[Node, Reason]:
    """The calls that would need a size across the boundary of a group, each with the reason.

    Args:
        graph: The whole graph.
        groups: Of calls that can be delegated.
    """
    home = {node: number for number, group in enumerate(groups) for node in group}
    found: dict[Node, Reason] = {}
    for sizes in _related(node for node in graph.nodes if is_size(node)):
        users = [user for size in sizes for user in size.users]
        places = {home.get(node) for node in (*sizes, *users)}
        if len(places) == 1:
            continue
        reason = Reason(
            ReasonCode.SYMBOLIC,
            f"size {sizes[0].name} is needed outside of the partition as well, "
            f"by {_outsider(sizes, users, home)}",
            remedy="Let one module use it alone, or export with fixed sizes",
        )
        found.update((node, reason) for node in (*sizes, *users) if node in home)
    return found


def _related(sizes: Iterable[Node]) -> Iterator[list[Node]]:
    """Sizes, in groups of those that are computed from each other."""
    group_of: dict[Node, list[Node]] = {}
    for node in sizes:
        merged = [node]
        for other in {id(g): g for n in node.all_input_nodes if (g := group_of.get(n))}.values():
            merged = [*other, *merged]
        group_of.update((member, merged) for member in merged)
    yield from {id(group): group for group in group_of.values()}.values()


def _outsider(sizes: Collection[Node], users: Iterable[Node], home: dict[Node, int]) -> str:
    """A name for what keeps them apart."""
    first = next((home[node] for node in (*users, *sizes) if node in home), None)
    other = next(node for node in (*users, *sizes) if home.get(node) != first)
    return "the caller" if other.op == "output" else other.name
