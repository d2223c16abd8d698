"""Delegation tags: which partition a node is in, and the partitions cut out of a tagged program.

ExecuTorch cuts each partition out of the program before it asks the backend for a blob. Here they
are cut the same way, out of a copy, so that their conversion can be proved while partitioning.
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
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from coreml_delegate.conversion.subgraph import without_memory
from coreml_delegate.ops.constants import stored_nodes

_TAG = "delegation_tag"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def tag_of(node: Node) -> str | None:
    """Return the tag of the partition that a node is in; None outside of all."""
    return node.meta.get(_TAG)


def set_tag(node: Node, tag: str) -> None:
    """Put a node into the partition with this tag."""
    node.meta[_TAG] = tag


def remove_tags(program: ExportedProgram) -> None:
    """Leave the graph, and those of its branches, as they were before they were tagged."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop(_TAG, None)


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
        bound = [user for user in node.users if _takes_in_a_list(user, node)]
        if not tags or len({tag_of(user) for user in bound}) > 1:
            continue
        set_tag(node, tags[0])
        for user in [user for user in node.users if user not in bound] if bound else ():
            node.users[user] = node.users.pop(user)


def _takes_in_a_list(user: Node, value: Node) -> bool:
    held: list[Node] = []
    lists = [a for a in (*user.args, *user.kwargs.values()) if not isinstance(a, Node)]
    map_arg(lists, held.append)
    return value in held


def cut_partitions(
    program: ExportedProgram,
    tags: Sequence[str],
    state: Mapping[str, torch.Tensor],
    *,
    constants_inside: bool,
) -> dict[str, ExportedProgram]:
    """Return the partitions by tag, cut out of a copy of the program as ExecuTorch will cut them.

    Args:
        program: The tagged program; its parameters and buffers may be fake.
        tags: The partitions to cut out.
        state: Real values of parameters and buffers by name; zeros that take no memory stand in for
            those that are missing.
        constants_inside: Whether partitions have the constants that they use inside.
    """
    owner = _copy_program(program, state)
    if constants_inside:
        _split_shared_constants(owner, tags)
    graph_module: Any = owner.graph_module
    found: dict[str, ExportedProgram] = {}
    for tag in tags:
        nodes = [node for node in graph_module.graph.nodes if tag_of(node) == tag]
        with graph_module._set_replace_hook(owner.graph_signature.get_replace_hook()):
            submodule, call = create_submodule_from_nodes(graph_module, nodes, tag)
        submodule.graph.output_node().meta = graph_module.graph.output_node().meta
        found[tag], _, _ = create_exported_program_from_submodule(
            submodule, owner, tag, call, False
        )
    return found


def _copy_program(program: ExportedProgram, state: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return a program with a graph of its own, and with real parameters and buffers."""
    held = {**program.state_dict, **state}
    root = copy.deepcopy(program.graph_module)
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict={key: without_memory(held[key]) for key in program.state_dict},
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _split_shared_constants(owner: ExportedProgram, tags: Sequence[str]) -> None:
    """Give each user of a shared constant a placeholder of its own, as ExecuTorch will.

    ExecuTorch copies the value for each of them. Nothing reads these copies, so for as long as that
    takes the program is given tensors without elements.
    """
    tables: Any = owner
    state, constants = tables._state_dict, tables._constants
    tables._state_dict, tables._constants = _empty_tensors(state), _empty_tensors(constants)
    tag_constants(owner)  # the copy of a graph has the users in another order
    for tag in tags:
        _maybe_duplicate_constant_nodes(owner, tag)
    tables._state_dict, tables._constants = state, constants


def _empty_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of the same kind without elements; other values as they are."""
    return {
        key: type(value)(torch.empty(0)) if type(value) in _TENSORS else value
        for key, value in values.items()
    }
