"""From verdicts to delegation tags on the graph."""

from __future__ import annotations

from typing import Any

from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from coreml_delegate.partition.operator_support import CoreMLOperatorSupport

_TAG = "delegation_tag"


def tag_partitions(program: ExportedProgram, support: CoreMLOperatorSupport) -> list[str]:
    """Tag the largest subgraphs of supported nodes that keep the graph acyclic.

    Returns:
        The tags, in order of their first node.
    """
    proposed = CapabilityBasedPartitioner(
        program.graph_module, support, allows_single_node_partition=True
    ).propose_partitions()
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    # Numbered by position, so that tags do not depend on how torch enumerates partitions.
    groups = sorted(
        (sorted(p.nodes, key=order.__getitem__) for p in proposed),
        key=lambda nodes: order[nodes[0]],
    )
    tags: list[str] = []
    for nodes in groups:
        tag = f"coreml_{len(tags)}"
        tags.append(tag)
        for node in nodes:
            node.meta[_TAG] = tag
    return tags


def tag_data(program: ExportedProgram, *, constants: bool, mutable_buffers: bool) -> None:
    """Give parameters, constants and mutable buffers to the partition that uses them."""
    if constants:
        tag_constant_data(program)
    if mutable_buffers:
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
        tags = {node.meta.get(_TAG) for node in involved}
        if len(tags) == 1 and None not in tags and results.count(new_value.name) == 1:
            nodes[name].meta[_TAG] = tags.pop()
