"""Rewrites of attention: what becomes of a query that the mask lets attend to nothing.

PyTorch gives zeros; Core ML's op divides zero by zero, and coremltools' decomposition takes a mean
that nobody asked for. Padded tokens are such queries, and a nan in one is a nan in all that follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.fx import Node

from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    arguments_of,
    become,
    constant_value,
    insert,
    value_of,
)


def _attention(node: Node) -> None:
    mask = arguments_of(node)["attn_mask"]
    if not isinstance(mask, Node) or not value_of(mask).dim() or _leaves_something(mask):
        return
    result = insert(node, node.target, *node.args, **node.kwargs)
    become(node, ATEN.masked_fill.Scalar, result, _nothing_left(node, mask), 0.0)


def _nothing_left(node: Node, mask: Node) -> Node:
    """Of each query, whether the mask takes all keys away from it."""
    is_bool = value_of(mask).dtype is torch.bool
    keeps = mask if is_bool else insert(node, ATEN.gt.Scalar, mask, -math.inf)
    number = insert(node, ATEN._to_copy.default, keeps, dtype=value_of(node).dtype)
    return insert(node, ATEN.le.Scalar, insert(node, ATEN.amax.default, number, [-1], True), 0.0)


def _leaves_something(mask: Node) -> bool:
    """Whether the mask is known, and leaves every query a key."""
    value = constant_value(mask)
    if value is None or not value.numel():
        return False
    kept = value if value.dtype is torch.bool else value > -math.inf
    return bool(kept.any(-1).all())


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {"aten.scaled_dot_product_attention.default": _attention}
)
