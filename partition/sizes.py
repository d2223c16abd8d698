"""Sizes of tensors in a graph, in elements and bytes.

A dynamic dimension counts with the size that the program was traced with; one that is known only at
run time counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's ``meta["val"]``, which may be a tuple of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def elements(tensor: torch.Tensor) -> int:
    """Number of elements of a real or fake tensor."""
    return math.prod(extent(size) for size in tensor.shape)


def extent(size: Any) -> int:
    """A dimension as a number."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else None
        return int(hint) if isinstance(hint, int) else 1
    return int(size)


def bytes_of(node: Node) -> int:
    """Bytes of a node's results, in the dtypes of the graph."""
    return sum(elements(t) * t.element_size() for t in tensors_of(node.meta.get("val")))
