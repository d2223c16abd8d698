"""From groups of calls to delegation tags on the graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir.backend.utils import tag_constant_data
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


def remove_tags(program: ExportedProgram) -> None:
    """Leave the graph as it was before it was tagged."""
    for node in program.graph.nodes:
        node.meta.pop(_TAG, None)


@dataclass(frozen=True, slots=True)
class DataOwnership:
    """Which data Core ML is given; the rest is passed to it.

    Attributes:
        constants: Parameters, buffers that nothing mutates, and lifted constants.
        mutable_buffers: Buffers that one partition alone uses.
    """

    constants: bool = True
    mutable_buffers: bool = True


def tag_data(program: ExportedProgram, ownership: DataOwnership) -> None:
    """Give parameters, constants and mutable buffers to the partition that uses them."""
    # ExecuTorch takes them out of these tables, one of which is still the exported program's own.
    tables: Any = program
    tables._constants = copy.copy(program.constants)
    tables._state_dict = copy.copy(program.state_dict)
    if ownership.constants:
        tag_constant_data(program)
    if ownership.mutable_buffers:
        _tag_states(program)


def _tag_states(program: ExportedProgram) -> None:
    """Give a buffer to a partition if it alone reads, writes and sees it.

    A state is private to one partition: others cannot read it, and its new value is no output.
    """
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    returned: Any = program.graph.output_node().args[0]
    results = [node.name for node in returned if isinstance(node, Node)]
    new_values = {key: name for name, key in signature.buffers_to_mutate.items()}
    for name, key in signature.inputs_to_buffers.items():
        if key not in new_values or not nodes[name].users:
            continue
        new_value = nodes[new_values[key]]
        involved = {*nodes[name].users, new_value, *new_value.users} - {program.graph.output_node()}
        tags = {tag_of(node) for node in involved}
        if len(tags) == 1 and None not in tags and results.count(new_value.name) == 1:
            nodes[name].meta[_TAG] = tags.pop()


def states_of(program: ExportedProgram) -> dict[str, dict[Node, Node]]:
    """By tag the mutable buffers that a partition keeps, each with its new value."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    new_values = {key: nodes[name] for name, key in signature.buffers_to_mutate.items()}
    found: dict[str, dict[Node, Node]] = {}
    for name, key in signature.inputs_to_buffers.items():
        tag = tag_of(nodes[name])
        if key in new_values and tag is not None:
            found.setdefault(tag, {})[nodes[name]] = new_values[key]
    return found
