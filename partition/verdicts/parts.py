"""Parts of calls: nodes that stay in the partition of the call that they belong to."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from coreml_delegate.ops import Reason, part_of
from coreml_delegate.ops.boundary import boundary_obstacles
from coreml_delegate.ops.call import DEQUANTIZE, GETITEM, target_name
from coreml_delegate.ops.sizes import is_check


def is_part(node: Node) -> bool:
    """Return whether a node belongs to the call whose result it takes.

    It is a ``getitem``, dequantizes integers that cannot leave a partition, or checks a number that
    cannot leave a partition.
    """
    if node.op != "call_function":
        return False
    name = target_name(node.target)
    if name == GETITEM:
        return True
    source = node.args[0] if name in DEQUANTIZE or is_check(node) else None
    return isinstance(source, Node) and source.op == "call_function"


def owning_call(node: Node) -> Node:
    """Return the call that a part, perhaps of a part, belongs to; other nodes unchanged."""
    while is_part(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def refuse_results(refused: Mapping[Node, Reason]) -> dict[Node, Reason]:
    """Return the refused calls and the calls that cannot be delegated without them.

    The latter are ``getitem`` calls, or share a tensor that cannot cross a boundary.
    """
    reasons = {
        **refused,
        **{
            user: part_of(call, reason)
            for call, reason in refused.items()
            for user in call.users
            if target_name(user.target) == GETITEM
        },
    }
    graph = next((node.graph for node in refused), None)
    return reasons if graph is None else reasons | boundary_obstacles(graph, reasons)
