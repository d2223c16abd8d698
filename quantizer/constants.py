"""What of a graph is known before it runs."""

from __future__ import annotations

from torch.fx import Graph, Node


def constants_of(graph: Graph) -> frozenset[Node]:
    """The parameters and buffers of a graph, and what is computed from such alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        computed = node.op == "call_function" and bool(sources)
        if node.op == "get_attr" or (computed and found.issuperset(sources)):
            found.add(node)
    return frozenset(found)
