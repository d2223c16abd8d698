"""What splits a graph into several partitions, and what lifting it would give."""

from __future__ import annotations

from torch.fx import Graph, Node

from coreml_delegate.ops import ReasonCode, flops_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.partition.decision import Decision
from coreml_delegate.partition.grouping import count_groups, is_part
from coreml_delegate.partition.report.records import Obstacle

# Calls refused for these reasons are in a partition that was possible and not wanted.
_UNWANTED = frozenset({ReasonCode.PARTITION_SIZE, ReasonCode.PARTITION_LIMIT})
# What the user asked for is one obstacle, whatever the ops.
_ASKED_FOR = _UNWANTED | {ReasonCode.SKIPPED}


def first_split(graph: Graph, decision: Decision) -> str | None:
    """The first node on the CPU, in graph order, on a path between two delegated ones."""
    delegated = {node for group in decision.partitions.values() for node in group}
    after: set[Node] = set()
    for node in graph.nodes:
        if any(n in delegated or n in after for n in node.all_input_nodes):
            after.add(node)
    before: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(n in delegated or n in before for n in node.users):
            before.add(node)
    between = (n for n in graph.nodes if n in decision.refused and n in after and n in before)
    return next((node.name for node in between), None)


def obstacles(graph: Graph, decision: Decision) -> tuple[Obstacle, ...]:
    """What keeps calls on the CPU; first what it pays most to lift."""
    grouped: dict[tuple[str, ReasonCode], list[Node]] = {}
    for node in graph.nodes:
        if node in decision.refused:
            # A part of a refused result is refused for that result's reason, and lifted with it.
            source = _whole(node)
            reason = decision.refused[source]
            asked_for = reason.code in _ASKED_FOR
            kind = reason.text if asked_for else target_name(source.target)
            grouped.setdefault((kind, reason.code), []).append(node)
    possible = decision.refused.keys() - {
        node for node, reason in decision.refused.items() if reason.code in _UNWANTED
    }
    now = count_groups(graph, possible)
    found = [
        _obstacle(nodes, decision, count_groups(graph, possible - set(nodes)), now)
        for nodes in grouped.values()
    ]
    return tuple(sorted(found, key=lambda o: (-o.partitions_merged, -o.flops, o.ops, o.code)))


def _obstacle(nodes: list[Node], decision: Decision, lifted: int, now: int) -> Obstacle:
    whole = [node for node in nodes if not is_part(node)]
    return Obstacle(
        ops=tuple(dict.fromkeys(target_name(node.target) for node in whole)),
        reasons=tuple(dict.fromkeys(decision.refused[node] for node in whole)),
        nodes=tuple(node.name for node in whole),
        flops=sum(map(flops_of, whole)),
        partitions_if_lifted=lifted,
        partitions_merged=now - lifted,
    )


def _whole(node: Node) -> Node:
    while is_part(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
