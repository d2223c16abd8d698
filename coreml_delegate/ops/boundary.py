"""Tensors that may not cross the boundary of a partition: of high rank, and not row-major.

Inside a partition neither matters: calls are made on merged dimensions, and Core ML knows no
strides. At its boundary a tensor has at most five dimensions, and is row-major.

A tensor has another layout if it is an input with that layout, if a memory format demands it, if a
call on the CPU gives it to its result, or if it is computed from such a tensor. Views of ATen
dialect have strides too, but ExecuTorch makes copies of them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.export import default_decompositions
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coreml_delegate.ops.call import (
    GETITEM,
    MAX_RANK,
    Reason,
    ReasonCode,
    overload_of,
    target_name,
)
from coreml_delegate.patches.torch import OpOverload


def boundary_obstacles(
    graph: Graph, refused: Mapping[Node, Reason], inputs: Collection[str] = ()
) -> dict[Node, Reason]:
    """Return the calls that cannot be delegated because their neighbours are not.

    Args:
        graph: In ATen or edge dialect, with fake tensors in ``meta["val"]``.
        refused: The calls that are known not to be delegated.
        inputs: Names of the placeholders that are passed at run time.

    Returns:
        The further calls, each with the reason.
    """
    reasons: dict[Node, Reason] = {}
    while True:
        count = len(reasons)
        for value, code, text, remedy in _tensors_that_cannot_cross(
            graph, {**refused, **reasons}, inputs
        ):
            calls = _producers_and_users(value)
            outside = [n for n in calls if n.op != "call_function" or n in refused or n in reasons]
            if outside:
                leaves = f" and leaves the partition at {outside[0].name!r}"
                where = "" if outside[0] is value else leaves
                reason = Reason(code, f"{text}{where}, {_ACCEPTED[code]}", remedy)
                reasons |= {node: reason for node in calls if node not in outside}
        if len(reasons) == count:
            return reasons


def shared_across_partitions(
    graph: Graph, groups: Iterable[Collection[Node]]
) -> dict[Node, Reason]:
    """Return calls in several groups that share a tensor which cannot cross a boundary."""
    group_of = {node: n for n, group in enumerate(groups) for node in group}
    reasons: dict[Node, Reason] = {}
    for value, code, text, remedy in _tensors_that_cannot_cross(graph, (), ()):
        calls = _producers_and_users(value)
        groups_of_calls = {group_of.get(node) for node in calls}
        if len(groups_of_calls) > 1:
            reason = Reason(code, f"{text} and is shared by several partitions", remedy)
            reasons |= {node: reason for node in calls if node in group_of}
    return reasons


_ACCEPTED = {
    ReasonCode.RANK: f"Core ML takes at most {MAX_RANK}",
    ReasonCode.LAYOUT: "Core ML is row-major",
}
_REMEDY = "Call .contiguous() on it, in the model or before the export"


def _tensors_that_cannot_cross(
    graph: Graph, on_cpu: Collection[Node], inputs: Collection[str]
) -> Iterator[tuple[Node, ReasonCode, str, str | None]]:
    """Yield the tensors that may not cross a boundary, and why."""
    strided: set[Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        is_input = node.op == "placeholder" and node.name in inputs
        if value.dim() > MAX_RANK and (is_input or node.op == "call_function"):
            yield node, ReasonCode.RANK, f"{node.name!r} has rank {value.dim()}", None
        # The parts of a call that will be decomposed have layouts of their own.
        is_cpu_result = node in on_cpu and not (_is_view(node) or _will_be_decomposed(node))
        has_strided_input = any(source in strided for source in node.all_input_nodes)
        may_be_strided = is_input or has_strided_input or is_cpu_result or _demands_layout(node)
        if may_be_strided and _dim_order(node) is not None:
            strided.add(node)
            text = f"{node.name!r} has dim order {_dim_order(node)}"
            yield node, ReasonCode.LAYOUT, text, _REMEDY


def _producers_and_users(value: Node) -> list[Node]:
    """Return the calls that produce or use a tensor."""
    producers = [value.args[0]] if target_name(value.target) == GETITEM else []
    return [*(node for node in producers if isinstance(node, Node)), value, *value.users]


@functools.cache
def _decomposable_ops() -> frozenset[Any]:
    return frozenset(default_decompositions())


def _will_be_decomposed(node: Node) -> bool:
    """Whether a node is the result of a call in ATen dialect that ExecuTorch decomposes."""
    call = node.args[0] if target_name(node.target) == GETITEM else node
    return isinstance(call, Node) and call.target in _decomposable_ops()


def _is_view(node: Node) -> bool:
    overload = overload_of(node.target)
    return isinstance(overload, OpOverload) and overload.is_view


def _demands_layout(node: Node) -> bool:
    formats = node.kwargs.get("memory_format"), node.kwargs.get("dim_order")
    return any(f is not None for f in formats)


def _dim_order(node: Node) -> tuple[int, ...] | None:
    """The dim order of the node's result, None if it is row-major or no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return None if is_row_major(value) else tuple(value.dim_order())


def is_row_major(value: torch.Tensor) -> bool:
    """Whether strides are row-major; strides of dimensions of size 1 do not count.

    Transposing a dimension of size 1 moves nothing, but changes ``dim_order``.
    """
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size <= 1:
            continue
        # A plain comparison of symbolic sizes would fix them.
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True
