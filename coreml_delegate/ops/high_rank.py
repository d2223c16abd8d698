"""Calls on tensors of more than five dimensions, made on tensors of fewer.

Between such calls a tensor exists only in a merged shape; it cannot cross the boundary of a
partition, see ``ops.boundary``.
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
from coreml_delegate.ops.merging import Merge, order_of, view_sizes

_VIEW = "aten.view_copy.default"


def has_high_rank(call: OpCall) -> bool:
    """Return whether an argument or a result of a call has more than five dimensions."""
    tensors = [*(tensor for _, tensor in call.tensors()), *call.outputs()]
    return any(tensor.dim() > MAX_RANK for tensor in tensors)


def merge_dimensions(node: Node, merge: Merge) -> None:
    """Make a call on tensors of at most five dimensions, and view the result in its shape."""
    call = OpCall.of(node)
    steps = merge(call)
    if not steps:
        sizes = call.arguments.get("size", call.arguments.get("shape"))
        sizes = view_sizes(shape_of(node)) if sizes is None else sizes
        become(node, ATEN.view_copy.default, _skip_views(node.args[0]), sizes)
        return
    if "dim0" in call.arguments:
        become(node, ATEN.permute_copy.default, node.args[0], order_of(call))
    result: Node | None = None
    for step in steps:
        arguments = OpCall.of(node).arguments
        changes: dict[str, Any] = dict(step.arguments)
        for name, shapes in step.shapes.items():
            tensors = arguments[name] if result is None else result
            is_list = isinstance(tensors, list | tuple)
            views = [
                _view_as(node, tensor, shape)
                for tensor, shape in zip(tensors if is_list else [tensors], shapes, strict=True)
            ]
            changes[name] = views if is_list else views[0]
        set_arguments(node, **changes)
        result = insert(node, node.target, *node.args, **node.kwargs)
    if isinstance(value := node.meta["val"], torch.Tensor):
        become(node, ATEN.view_copy.default, result, view_sizes(value.shape))
        return
    for user in list(node.users):
        item = insert(user, operator.getitem, result, user.args[1])
        become(user, ATEN.view_copy.default, item, view_sizes(shape_of(user)))
    node.graph.erase_node(node)


def _view_as(node: Node, tensor: Node, shape: Iterable[Any]) -> Node:
    """Return a view of a tensor, inserted before ``node``."""
    source = _skip_views(tensor)
    if list(map(str, shape_of(source))) == list(map(str, shape)):
        return source
    return insert(node, ATEN.view_copy.default, source, view_sizes(list(shape)))


def _skip_views(tensor: Any) -> Any:
    """Return the source, of at most five dimensions, of a view of higher rank."""
    while (
        value_of(tensor).dim() > MAX_RANK
        and tensor.op == "call_function"
        and target_name(tensor.target) == _VIEW
    ):
        tensor = tensor.args[0]
    return tensor
