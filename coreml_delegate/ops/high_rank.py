"""Calls on tensors of more than five dimensions, made on tensors of fewer.

Between such calls a tensor need not exist in its shape; where it crosses the boundary of a
partition it would have to, see ``ops.boundary``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import MAX_RANK, OpCall, target_name
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
