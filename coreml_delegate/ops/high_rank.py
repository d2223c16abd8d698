"""Tensors of more than five dimensions: where they may be, and the calls that do without them.

Between calls that are made on merged dimensions such a tensor need not exist in its shape. It needs
to where it crosses the boundary of a partition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import GETITEM, MAX_RANK, OpCall, Reason, ReasonCode, target_name
from coreml_delegate.ops.edits import (
    ATEN,
    become,
    insert,
    set_arguments,
    shape_of,
    value_of,
)
from coreml_delegate.ops.merging import Merge, order_of, whole_sizes

_VIEW = "aten.view_copy.default"


def has_high_rank(call: OpCall) -> bool:
    """Return whether an argument or a result of a call has more than five dimensions."""
    tensors = [*(tensor for _, tensor in call.tensors()), *call.outputs()]
    return any(tensor.dim() > MAX_RANK for tensor in tensors)


def high_rank_obstacles(
    nodes: Iterable[Node], refused: Mapping[Node, Reason]
) -> dict[Node, Reason]:
    """Return the calls that share a tensor of more than five dimensions with one on the CPU.

    Args:
        nodes: Of a graph, in its order.
        refused: The calls that are known not to be delegated.

    Returns:
        The further calls, each with the reason.
    """
    found: dict[Node, Reason] = {}
    values = [(v, _touching(v)) for v in nodes if _rank(v) > MAX_RANK]
    before = -1
    while before != len(found):
        before = len(found)
        for value, touching in values:
            outside = [n for n in touching if n.op != "call_function" or n in refused or n in found]
            if not outside:
                continue
            text = f"{value.name!r} has rank {_rank(value)} and crosses the boundary of a partition"
            at = f" at {outside[0].name!r}; Core ML takes at most {MAX_RANK}"
            reason = Reason(ReasonCode.RANK, text + at)
            found |= {n: reason for n in touching if n not in outside}
    return found


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _touching(value: Node) -> list[Node]:
    """Return the calls that make or take a tensor."""
    whole = [value.args[0]] if target_name(value.target) == GETITEM else []
    return [*(n for n in whole if isinstance(n, Node)), value, *value.users]


def merge_dimensions(node: Node, merge: Merge) -> None:
    """Make a call on tensors of five dimensions or fewer, and view the result in its shape.

    Args:
        node: A call, after those whose results it takes.
        merge: Of its record.
    """
    call = OpCall.of(node)
    steps = merge(call)
    if not steps:
        sizes = call.arguments.get("size", call.arguments.get("shape"))
        sizes = whole_sizes(shape_of(node)) if sizes is None else sizes
        become(node, ATEN.view_copy.default, _viewed(node.args[0]), sizes)
        return
    if "dim0" in call.arguments:
        become(node, ATEN.permute_copy.default, node.args[0], order_of(call))
    made: Node | None = None
    for step in steps:
        given = OpCall.of(node).arguments
        changed: dict[str, Any] = dict(step.arguments)
        for name, shapes in step.shapes.items():
            tensors = given[name] if made is None else made
            several = isinstance(tensors, list | tuple)
            views = [
                _view(node, tensor, shape)
                for tensor, shape in zip(tensors if several else [tensors], shapes, strict=True)
            ]
            changed[name] = views if several else views[0]
        set_arguments(node, **changed)
        made = insert(node, node.target, *node.args, **node.kwargs)
    if isinstance(value := node.meta["val"], torch.Tensor):
        become(node, ATEN.view_copy.default, made, whole_sizes(value.shape))
        return
    for user in list(node.users):
        item = insert(user, operator.getitem, made, user.args[1])
        become(user, ATEN.view_copy.default, item, whole_sizes(shape_of(user)))
    node.graph.erase_node(node)


def _view(node: Node, tensor: Node, shape: Iterable[Any]) -> Node:
    """Return a tensor in another shape, before ``node``."""
    source = _viewed(tensor)
    if list(map(str, shape_of(source))) == list(map(str, shape)):
        return source
    return insert(node, ATEN.view_copy.default, source, whole_sizes(list(shape)))


def _viewed(tensor: Any) -> Any:
    """Return the tensor of five dimensions or fewer that a tensor of more is a view of."""
    while (
        value_of(tensor).dim() > MAX_RANK
        and tensor.op == "call_function"
        and target_name(tensor.target) == _VIEW
    ):
        tensor = tensor.args[0]
    return tensor
