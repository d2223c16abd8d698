"""Symbolic sizes, computed from shapes or taken out of tensors: they cross no partition boundary.

A delegate is passed tensors alone. Sizes that depend on each other stay together: all calls that
compute them and all calls that use them are in one partition, or none is.
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
    """Return the calls that need a size across the boundary of a group, each with the reason.

    Args:
        graph: The whole graph.
        groups: The groups of calls that can be delegated.
    """
    home = {node: number for number, group in enumerate(groups) for node in group}
    found: dict[Node, Reason] = {}
    for sizes in _related_sizes(node for node in graph.nodes if is_size(node)):
        users = [user for size in sizes for user in size.users]
        places = {home.get(node) for node in (*sizes, *users)}
        reason = (
            _outside(sizes, users, home)
            if len(places) > 1
            else _data_dependent(users) or _unused(sizes, users)
        )
        if reason is not None:
            found.update((node, reason) for node in (*sizes, *users) if node in home)
    return found


def _outside(sizes: Sequence[Node], users: Iterable[Node], home: dict[Node, int]) -> Reason:
    return Reason(
        ReasonCode.SYMBOLIC,
        f"size {sizes[0].name} is needed outside of the partition as well, "
        f"by {_outsider(sizes, users, home)}",
        remedy="Let one module use it alone, or export with fixed sizes",
    )


def _data_dependent(users: Iterable[Node]) -> Reason | None:
    """Return why a number out of a tensor that says how large another is cannot be inside."""
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
    """Yield the sizes in lists, those together that are computed from each other."""
    group_of: dict[Node, list[Node]] = {}
    for node in sizes:
        merged = [node]
        for other in {id(g): g for n in node.all_input_nodes if (g := group_of.get(n))}.values():
            merged = [*other, *merged]
        group_of.update((member, merged) for member in merged)
    yield from {id(group): group for group in group_of.values()}.values()


def _outsider(sizes: Collection[Node], users: Iterable[Node], home: dict[Node, int]) -> str:
    """Return the name of a node outside of the group that needs one of the sizes."""
    first = next((home[node] for node in (*users, *sizes) if node in home), None)
    other = next(node for node in (*users, *sizes) if home.get(node) != first)
    return "the caller" if other.op == "output" else other.name
