"""Tensors that may not cross the boundary of a partition: of high rank, and not row-major.

Inside a partition neither matters: calls are made on merged dimensions, and Core ML knows no
strides. At its boundary a tensor has at most five dimensions, and is row-major.

A tensor has another layout if it is an input with that layout, if a memory format demands it, if a
call on the CPU gives it to its result, or if it is computed from such a tensor. Views of ATen
dialect have strides too, but ExecuTorch makes copies of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch._ops import OpOverload
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


def boundary_obstacles(
    graph: Graph, refused: Mapping[Node, Reason], inputs: Collection[str] = ()
) -> dict[Node, Reason]:
    """Return the calls that cannot be delegated because others are not.

    Args:
        graph: In ATen or edge dialect, with fake tensors in ``meta["val"]``.
        refused: The calls that are known not to be delegated.
        inputs: Names of the placeholders that are passed at run time.

    Returns:
        The further calls, each with the reason.
    """
    found: dict[Node, Reason] = {}
    while True:
        before = len(found)
        for value, code, text, remedy in _tensors_that_cannot_cross(
            graph, {**refused, **found}, inputs
        ):
            touching = _producers_and_users(value)
            outside = [n for n in touching if n.op != "call_function" or n in refused or n in found]
            if outside:
                leaves = f" and leaves the partition at {outside[0].name!r}"
                where = "" if outside[0] is value else leaves
                reason = Reason(code, f"{text}{where}, {_WANTED[code]}", remedy)
                found |= {node: reason for node in touching if node not in outside}
        if len(found) == before:
            return found


def shared_across_partitions(
    graph: Graph, groups: Iterable[Collection[Node]]
) -> dict[Node, Reason]:
    """Return the calls that share a tensor which may cross no boundary, and lie in several groups.

    Args:
        graph: In edge dialect.
        groups: The calls of each partition.
    """
    group_of = {node: n for n, group in enumerate(groups) for node in group}
    found: dict[Node, Reason] = {}
    for value, code, text, remedy in _tensors_that_cannot_cross(graph, (), ()):
        touching = _producers_and_users(value)
        together = {group_of.get(node) for node in touching}
        if len(together) > 1:
            reason = Reason(code, f"{text} and is shared by several partitions", remedy)
            found |= {node: reason for node in touching if node in group_of}
    return found


_WANTED = {
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
        comes_in = node.op == "placeholder" and node.name in inputs
        if value.dim() > MAX_RANK and (comes_in or node.op == "call_function"):
            yield node, ReasonCode.RANK, f"{node.name!r} has rank {value.dim()}", None
        from_cpu = node in on_cpu and not _is_view(node)
        follows = any(source in strided for source in node.all_input_nodes)
        if (comes_in or follows or from_cpu or _demands(node)) and _order(node) is not None:
            strided.add(node)
            yield node, ReasonCode.LAYOUT, f"{node.name!r} has dim order {_order(node)}", _REMEDY


def _producers_and_users(value: Node) -> list[Node]:
    """Return the calls that make or take a tensor."""
    whole = [value.args[0]] if target_name(value.target) == GETITEM else []
    return [*(node for node in whole if isinstance(node, Node)), value, *value.users]


def _is_view(node: Node) -> bool:
    overload = overload_of(node.target)
    return isinstance(overload, OpOverload) and overload.is_view


def _demands(node: Node) -> bool:
    formats = node.kwargs.get("memory_format"), node.kwargs.get("dim_order")
    return any(f is not None for f in formats)


def _order(node: Node) -> tuple[int, ...] | None:
    """The dim order of the node's result, None if it is row-major or no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return None if is_row_major(value) else tuple(value.dim_order())


def is_row_major(value: torch.Tensor) -> bool:
    """Whether the last dimension is the innermost, and so on, whatever strides have those of one.

    A transposed dimension of one element moves nothing, but ``dim_order`` tells of it.
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
