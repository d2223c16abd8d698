"""Obstacles: what splits a graph into partitions, and the gain if it were supported."""

from __future__ import annotations

from torch.fx import Graph, Node

from coreml_delegate.ops import ReasonCode, flops_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.partition.grouping.decision import Decision
from coreml_delegate.partition.grouping.stages import count_groups
from coreml_delegate.partition.report.records import Obstacle
from coreml_delegate.partition.verdicts.parts import is_part, whole_call

# Calls refused for these reasons are in a partition that was possible, and beyond a limit.
_BEYOND_LIMITS = frozenset({ReasonCode.PARTITION_SIZE, ReasonCode.PARTITION_LIMIT})
# What the user asked for is one obstacle, of whatever ops the calls are.
_ASKED_FOR = _BEYOND_LIMITS | {ReasonCode.SKIPPED}


def first_split(graph: Graph, decision: Decision) -> str | None:
    """Return the first node on the CPU, in graph order, on a path between two delegated ones."""
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


def find_obstacles(graph: Graph, decision: Decision) -> tuple[Obstacle, ...]:
    """Return what keeps calls on the CPU, first the obstacle whose support would gain most."""
    grouped: dict[tuple[str, ReasonCode], list[Node]] = {}
    for node in graph.nodes:
        if node in decision.refused:
            # A part of a refused call is refused for that reason, and supported with the call.
            source = whole_call(node)
            reason = decision.refused[source]
            asked_for = reason.code in _ASKED_FOR
            kind = reason.text if asked_for else target_name(source.target)
            grouped.setdefault((kind, reason.code), []).append(node)
    possible = decision.refused.keys() - {
        node for node, reason in decision.refused.items() if reason.code in _BEYOND_LIMITS
    }
    now = count_groups(graph, possible)
    found = [
        _obstacle(nodes, decision, count_groups(graph, possible - set(nodes)), now)
        for nodes in grouped.values()
    ]
    return tuple(sorted(found, key=lambda o: (-o.partitions_merged, -o.flops, o.ops, o.code)))


def _obstacle(nodes: list[Node], decision: Decision, if_supported: int, now: int) -> Obstacle:
    whole = [node for node in nodes if not is_part(node)]
    return Obstacle(
        ops=tuple(dict.fromkeys(target_name(node.target) for node in whole)),
        reasons=tuple(dict.fromkeys(decision.refused[node] for node in whole)),
        nodes=tuple(node.name for node in whole),
        flops=sum(map(flops_of, whole)),
        partitions_if_lifted=if_supported,
        partitions_merged=now - if_supported,
    )
