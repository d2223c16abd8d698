"""From verdicts to delegation tags on the graph."""

from __future__ import annotations

from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from torch.export import ExportedProgram
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
        tag_mutated_buffer(program)
