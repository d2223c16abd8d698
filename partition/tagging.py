"""From groups of calls to delegation tags on the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

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
