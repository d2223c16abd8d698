"""Grouping of accepted calls, compared with torch's partitioner and with known answers."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from coreml_delegate.partition.grouping.stages import Group, count_groups, group_calls

ADD = torch.ops.aten.add.Tensor
RELU = torch.ops.aten.relu.default
ASINH = torch.ops.aten.asinh.default
SPLIT = torch.ops.aten.split.Tensor
GETITEM = operator.getitem


class Sketch:
    """A graph made by hand; the calls of ``asinh`` are refused."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, elements: int = 1) -> Node:
        return self._sized(self.graph.placeholder(f"x{len(self.graph.nodes)}"), elements)

    def call(self, target: Any, *args: Any, elements: int = 1) -> Node:
        return self._sized(self.graph.call_function(target, args), elements)

    def groups(self, *results: Node, constants: tuple[Node, ...] = ()) -> list[Group]:
        self.graph.output(results)
        return group_calls(self.graph, self.refused, constants=constants)

    @property
    def refused(self) -> set[Node]:
        return set(self.graph.find_nodes(op="call_function", target=ASINH))

    def _sized(self, node: Node, elements: int) -> Node:
        node.meta["val"] = torch.empty(elements, device="meta")
        return node


class Accepts(OperatorSupportBase):
    def is_node_supported(self, submodules: Mapping[str, Any], node: Node) -> bool:
        return node.op == "call_function" and node.target is not ASINH


def random_sketch(seed: int, size: int = 40) -> Sketch:
    choose, sketch = random.Random(seed), Sketch()
    values = [sketch.input() for _ in range(3)]
    for _ in range(size):
        target = ASINH if choose.random() < 0.3 else ADD
        # Mostly recent values, so that chains grow long, and now and then any.
        near = choose.choices(values[-5:], k=1) + choose.choices(values, k=1)
        values.append(sketch.call(target, *near, elements=choose.randint(1, 9)))
    sketch.graph.output(tuple(values[-4:]))
    return sketch


def is_acyclic(graph: Graph, groups: list[Group]) -> bool:
    """Return whether the graph is acyclic with every group as one node, by Kahn's algorithm."""
    unit = {node: -1 - n for n, group in enumerate(groups) for node in group}
    unit |= {node: n for n, node in enumerate(graph.nodes) if node not in unit}
    edges = {(unit[i], unit[n]) for n in graph.nodes for i in n.all_input_nodes}
    edges = {(a, b) for a, b in edges if a != b}
    left = set(unit.values())
    while free := {u for u in left if not any(b == u and a in left for a, b in edges)}:
        left -= free
    return not left


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_have_no_more_groups_than_by_torch(seed: int) -> None:
    sketch = random_sketch(seed)
    refused = sketch.refused
    groups = group_calls(sketch.graph, refused)
    covered = [node for group in groups for node in group]
    accepted = [n for n in sketch.graph.nodes if n.op == "call_function" and n not in refused]
    assert len(covered) == len(set(covered))
    assert set(covered) == set(accepted)
    assert is_acyclic(sketch.graph, groups)
    module = GraphModule({}, sketch.graph)
    proposed = CapabilityBasedPartitioner(
        module, Accepts(), allows_single_node_partition=True
    ).propose_partitions()
    assert len(groups) <= len(proposed)
    assert len(groups) == count_groups(sketch.graph, refused)
    assert group_calls(sketch.graph, refused) == groups


@pytest.mark.parametrize("seed", range(30))
def test_no_acyclic_grouping_has_fewer_groups(seed: int) -> None:
    """A path with n stretches of accepted calls needs n partitions."""
    sketch = random_sketch(seed)
    refused, changes = sketch.refused, {}
    for node in sketch.graph.nodes:
        accepted = node.op == "call_function" and node not in refused
        before = [changes[n] for n in node.all_input_nodes] or [(0, False)]
        runs = max(runs + (accepted and not inside) for runs, inside in before)
        changes[node] = (runs, accepted)
    assert len(group_calls(sketch.graph, refused)) == max(runs for runs, _ in changes.values())


@pytest.mark.parametrize("seed", range(10))
def test_calls_are_in_graph_order_and_groups_in_run_order(seed: int) -> None:
    sketch = random_sketch(seed)
    place = {node: n for n, node in enumerate(sketch.graph.nodes)}
    groups = group_calls(sketch.graph, sketch.refused)
    assert all([place[n] for n in group] == sorted(place[n] for n in group) for group in groups)
    seen: set[Node] = set()
    for group in groups:
        earlier = seen | set(group)
        inputs = {i for node in group for i in node.all_input_nodes if i in place}
        accepted = {i for i in inputs if i.op == "call_function" and i not in sketch.refused}
        assert accepted <= earlier
        seen = earlier


def test_independent_branches_share_a_group() -> None:
    sketch = Sketch()
    x = sketch.input()
    direct, around = sketch.call(RELU, x), sketch.call(RELU, sketch.call(ASINH, x))
    assert sketch.groups(direct, around) == [(direct, around)]


def test_a_refused_call_in_between_splits_the_graph() -> None:
    sketch = Sketch()
    before = sketch.call(RELU, sketch.input())
    after = sketch.call(ADD, sketch.call(ASINH, before), before)
    assert sketch.groups(after) == [(before,), (after,)]


def test_calls_on_constants_join_the_group_that_uses_them() -> None:
    sketch = Sketch()
    x, weight = sketch.input(), sketch.input(1000)
    before = sketch.call(RELU, x)
    turned = sketch.call(RELU, sketch.call(RELU, weight, elements=1000), elements=1000)
    after = sketch.call(ADD, sketch.call(ASINH, before), turned)
    first, second = sketch.groups(after, constants=(weight,))
    assert first == (before,)
    assert second == (turned.args[0], turned, after)


def test_a_call_stays_early_if_its_result_has_fewer_bytes() -> None:
    sketch = Sketch()
    before = sketch.call(RELU, sketch.input(1000), elements=1000)
    small = sketch.call(RELU, before, elements=1)
    after = sketch.call(ADD, sketch.call(ASINH, small), small)
    assert sketch.groups(after) == [(before, small), (after,)]


def test_parts_of_a_call_join_its_group() -> None:
    sketch = Sketch()
    x, table = sketch.input(), sketch.input(1)
    pieces = sketch.call(SPLIT, table, 1)
    one, two = (sketch.call(GETITEM, pieces, n) for n in (0, 1))
    before = sketch.call(RELU, x)
    late = sketch.call(ADD, sketch.call(ASINH, before), one)
    later = sketch.call(ADD, late, two)
    assert sketch.groups(later, constants=(table,)) == [(before,), (pieces, one, two, late, later)]


def test_grouping_a_long_chain_takes_linear_time() -> None:
    """Torch's partitioner takes quadratic time, and would not end within the test run."""
    sketch = Sketch()
    value = sketch.input()
    for n in range(20_000):
        value = sketch.call(ASINH if n % 50 == 49 else RELU, value)
    assert len(sketch.groups(value)) == 400


def test_a_graph_without_accepted_calls_has_no_groups() -> None:
    sketch = Sketch()
    assert sketch.groups(sketch.call(ASINH, sketch.input())) == []
    assert count_groups(sketch.graph, sketch.refused) == 0
