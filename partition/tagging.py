"""From groups of calls to delegation tags on the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.partition.grouping import Group

_TAG = "delegation_tag"


def tag_groups(program: ExportedProgram, groups: Sequence[Group]) -> list[str]:
    """Tag the calls of each group, numbered in the order of the groups.

    Attributes that only calls of one group use (submodules, literals) go with them. Tags of an
    earlier grouping are removed.

    Returns:
        The tags.
    """
    remove_tags(program)
    tags: list[str] = []
    for group in groups:
        tag = f"coreml_{len(tags)}"
        tags.append(tag)
        for node in group:
            node.meta[_TAG] = tag
    for node in program.graph.find_nodes(op="get_attr"):
        users = {tag_of(user) for user in node.users}
        if len(users) == 1 and None not in users:
            node.meta[_TAG] = users.pop()
    return tags


def tag_constants(program: ExportedProgram) -> None:
    """Put every constant that partitions use into one of them, if each can have it to itself.

    ExecuTorch leaves a constant to its first user and gives each other user a copy, but only where
    the constant is an argument by itself. Users that have it in a list (``cat``, ``index``, control
    flow, the output) keep the original: they come first, and have to be in one place. If they are
    in several, the constant stays outside and is passed in: with users in two partitions it would
    tie these together, perhaps in a cycle.

    Args:
        program: Its calls are tagged; the order of the users of constants may change.
    """
    for node in stored_nodes(program):
        tags = [tag for user in node.users if (tag := tag_of(user)) is not None]
        bound = [user for user in node.users if _has_in_a_list(user, node)]
        if not tags or len({tag_of(user) for user in bound}) > 1:
            continue
        put_into(node, tags[0])
        for user in [user for user in node.users if user not in bound] if bound else ():
            node.users[user] = node.users.pop(user)


def _has_in_a_list(user: Node, value: Node) -> bool:
    held: list[Node] = []
    lists = [a for a in (*user.args, *user.kwargs.values()) if not isinstance(a, Node)]
    map_arg(lists, held.append)
    return value in held


def tag_of(node: Node) -> str | None:
    """The tag of the partition a node is in."""
    return node.meta.get(_TAG)


def put_into(node: Node, tag: str) -> None:
    """Put a node into the partition of that tag."""
    node.meta[_TAG] = tag


def remove_tags(program: ExportedProgram) -> None:
    """Leave the graph as it was before it was tagged."""
    for node in program.graph.nodes:
        node.meta.pop(_TAG, None)


@dataclass(frozen=True, slots=True)
class DataOwnership:
    """Which data Core ML is given; the rest is passed to it.

    Attributes:
        constants: Parameters, buffers that nothing mutates, and lifted constants.
        mutable_buffers: See ``partition.buffers``.
    """

    constants: bool = True
    mutable_buffers: bool = True
