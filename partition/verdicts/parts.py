"""Parts of calls: nodes that go wherever the call goes whose result they take."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from coreml_delegate.ops import Reason, part_of
from coreml_delegate.ops.boundary import boundary_obstacles
from coreml_delegate.ops.call import DEQUANTIZE, GETITEM, target_name
from coreml_delegate.ops.sizes import is_check


def is_part(node: Node) -> bool:
    """Return whether a node goes where the call goes whose result it takes.

    It takes one of several results, makes floats of integers that leave no partition, or checks a
    number that leaves none.
    """
    if node.op != "call_function":
        return False
    name = target_name(node.target)
    if name == GETITEM:
        return True
    source = node.args[0] if name in DEQUANTIZE or is_check(node) else None
    return isinstance(source, Node) and source.op == "call_function"


def whole_call(node: Node) -> Node:
    """Return the call that a node is a part of, directly or by other parts; else the node."""
    while is_part(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def refuse_results(refused: Mapping[Node, Reason]) -> dict[Node, Reason]:
    """Return the refused calls with those that cannot be delegated without them.

    These take one of several results, or share a tensor that may not cross a boundary.
    """
    found = {
        **refused,
        **{
            user: part_of(call, reason)
            for call, reason in refused.items()
            for user in call.users
            if target_name(user.target) == GETITEM
        },
    }
    graph = next((node.graph for node in refused), None)
    return found if graph is None else found | boundary_obstacles(graph, found)
