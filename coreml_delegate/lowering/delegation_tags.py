"""Delegation tags, which assign nodes to partitions, and the partitions of a tagged program.

ExecuTorch cuts each partition out of the program before it asks the backend for a blob. This module
cuts them out of a copy in the same way, so that their conversion is proved while partitioning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executorch.exir.backend.utils import (
    _maybe_duplicate_constant_nodes,  # pyright: ignore[reportPrivateUsage]  # no other access
)
from executorch.exir.lowered_backend_module import (
    create_exported_program_from_submodule,
    create_submodule_from_nodes,
)
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.lowering.subgraph import without_memory
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.edits import all_nodes
from coreml_delegate.patches.torch import replace_in_signature, set_parts

_TAG = "delegation_tag"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def tag_of(node: Node) -> str | None:
    """Return the delegation tag of a node, None outside of partitions."""
    return node.meta.get(_TAG)


def set_tag(node: Node, tag: str) -> None:
    """Assign a node to the partition with this tag."""
    node.meta[_TAG] = tag


def remove_tags(program: ExportedProgram) -> None:
    """Remove all tags from the graph and its branches."""
    for node in all_nodes(program):
        node.meta.pop(_TAG, None)


def tag_constants(program: ExportedProgram) -> None:
    """Assign every constant that partitions use to one of them, if ExecuTorch can copy it.

    ExecuTorch gives each user but the first a copy of a constant, if the constant is a direct
    argument. Users that have it in a list (``cat``, ``index``, control flow, the output) keep the
    original: they are made the first users, and have to be in one partition. If they are in
    several, the constant stays outside and is passed in: with users in two partitions it would
    connect these, perhaps in a cycle.

    Args:
        program: Its calls are tagged; the order of the users of constants may change.
    """
    for node in stored_nodes(program):
        tags = [tag for user in node.users if (tag := tag_of(user)) is not None]
        list_users = [user for user in node.users if _takes_in_list(user, node)]
        if not tags or len({tag_of(user) for user in list_users}) > 1:
            continue
        set_tag(node, tags[0])
        for user in [user for user in node.users if user not in list_users] if list_users else ():
            node.users[user] = node.users.pop(user)


def _takes_in_list(user: Node, value: Node) -> bool:
    nodes: list[Node] = []
    lists = [a for a in (*user.args, *user.kwargs.values()) if not isinstance(a, Node)]
    map_arg(lists, nodes.append)
    return value in nodes


def cut_partitions(
    program: ExportedProgram,
    tags: Sequence[str],
    state: Mapping[str, torch.Tensor],
    *,
    constants_inside: bool,
) -> dict[str, ExportedProgram]:
    """Return the partitions by tag, cut out of a copy of the program as ExecuTorch does.

    Args:
        program: The tagged program; its parameters and buffers may be fake.
        tags: The partitions to cut out.
        state: Real values of parameters and buffers by name; zeros that take no memory replace
            missing values.
        constants_inside: Whether partitions contain the constants that they use.
    """
    owner = copy_program(program, state)
    if constants_inside:
        _split_shared_constants(owner, tags)
    graph_module: Any = owner.graph_module
    partitions: dict[str, ExportedProgram] = {}
    for tag in tags:
        nodes = [node for node in graph_module.graph.nodes if tag_of(node) == tag]
        with replace_in_signature(graph_module, owner):
            submodule, call = create_submodule_from_nodes(graph_module, nodes, tag)
        submodule.graph.output_node().meta = graph_module.graph.output_node().meta
        partitions[tag], _, _ = create_exported_program_from_submodule(
            submodule, owner, tag, call, False
        )
    return partitions


def copy_program(program: ExportedProgram, state: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return a program with a copied graph and tables, and with real parameters and buffers.

    Args:
        program: Its parameters and buffers may be fake.
        state: See ``cut_partitions``.
    """
    state_dict = {**program.state_dict, **state}
    root = copy.deepcopy(program.graph_module)
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict={key: without_memory(state_dict[key]) for key in program.state_dict},
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        constants=dict(program.constants),
        verifiers=[program.verifier],
    )


def _split_shared_constants(owner: ExportedProgram, tags: Sequence[str]) -> None:
    """Give each user of a shared constant a separate placeholder, as ExecuTorch does.

    ExecuTorch's function copies the value for each. The copies are unused, so the program has
    tensors without elements during the call.
    """
    tables = {"state_dict": owner.state_dict, "constants": owner.constants}
    set_parts(owner, {name: _empty_tensors(table) for name, table in tables.items()})
    tag_constants(owner)  # a copied graph has the users in another order
    for tag in tags:
        _maybe_duplicate_constant_nodes(owner, tag)
    set_parts(owner, tables)


def _empty_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of the same class without elements; other values unchanged."""
    return {
        key: type(value)(torch.empty(0)) if type(value) in _TENSORS else value
        for key, value in values.items()
    }
