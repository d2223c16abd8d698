"""Symbolic sizes, computed from shapes or from tensors, which cannot cross partition boundaries.

Delegates only take tensors. Sizes that depend on each other stay together: all calls that compute
or use them are in one partition, or all are undelegated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.ops.sizes import is_size
from coreml_delegate.partition.grouping.stages import Group


def stranded_sizes(graph: Graph, groups: Iterable[Group]) -> dict[Node, Reason]:
    """Return the calls that need a size from outside of their group, each with the reason.

    Args:
        graph: The whole graph.
        groups: The groups of calls that can be delegated.
    """
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    reasons: dict[Node, Reason] = {}
    for sizes in _related_sizes(node for node in graph.nodes if is_size(node)):
        users = [user for size in sizes for user in size.users]
        groups_of_calls = {group_of.get(node) for node in (*sizes, *users)}
        reason = (
            _outside(sizes, users, group_of)
            if len(groups_of_calls) > 1
            else _data_dependent(users) or _unused(sizes, users)
        )
        if reason is not None:
            reasons.update((node, reason) for node in (*sizes, *users) if node in group_of)
    return reasons


def _outside(sizes: Sequence[Node], users: Iterable[Node], group_of: dict[Node, int]) -> Reason:
    return Reason(
        ReasonCode.SYMBOLIC,
        f"size {sizes[0].name} is needed outside of the partition as well, "
        f"by {_outsider(sizes, users, group_of)}",
        remedy="Let only one module use it, or export with fixed sizes",
    )


def _data_dependent(users: Iterable[Node]) -> Reason | None:
    """Return why a number from a tensor that is the size of another tensor is refused, or None."""
    for user in users:
        for tensor in tensors_of(user.meta.get("val")):
            if free_unbacked_symbols(tensor.shape):
                shape = ", ".join(map(str, tensor.shape))
                return Reason(
                    ReasonCode.SYMBOLIC, f"the shape [{shape}] of {user.name} depends on values"
                )
    return None


def _unused(sizes: Sequence[Node], users: Iterable[Node]) -> Reason | None:
    if any(True for user in users for _ in tensors_of(user.meta.get("val"))):
        return None
    return Reason(ReasonCode.USE, f"no tensor is computed from {sizes[0].name}")


def _related_sizes(sizes: Iterable[Node]) -> Iterator[list[Node]]:
    """Yield lists of interdependent sizes."""
    group_of: dict[Node, list[Node]] = {}
    for node in sizes:
        merged = [node]
        for related in {id(g): g for n in node.all_input_nodes if (g := group_of.get(n))}.values():
            merged = [*related, *merged]
        group_of.update((member, merged) for member in merged)
    yield from {id(group): group for group in group_of.values()}.values()


def _outsider(sizes: Collection[Node], users: Iterable[Node], group_of: dict[Node, int]) -> str:
    """Return the name of a node outside of the group that needs a size."""
    group = next((group_of[node] for node in (*users, *sizes) if node in group_of), None)
    other = next(node for node in (*users, *sizes) if group_of.get(node) != group)
    return "the caller" if other.op == "output" else other.name
