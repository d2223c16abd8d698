"""Estimated floating-point operations of a call, to compare nodes.

A multiply-add counts as two. Counted is the arithmetic that the op defines, on any device: moving
data costs nothing, a function of one element costs one operation. The record of an op names its
estimator.

A dynamic dimension counts with the size that the program was traced with; one that is known only at
run time counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import OpCall, overload_of, tensors_of
from coreml_delegate.patches.torch import schema_of

Estimator = Callable[[OpCall], int]


def _elements_of(call: OpCall, *names: str) -> int:
    tensors = (call.tensor(name) for name in names)
    return next((elements(tensor) for tensor in tensors if tensor is not None), 0)


def result_elements(call: OpCall) -> int:
    """Number of elements of the first result."""
    return next((elements(t) for t in tensors_of(call.node.meta.get("val"))), 0)


def nothing(_: OpCall) -> int:
    """0: the op moves or creates data."""
    return 0


def unknown(call: OpCall) -> int:
    """Estimate for an op without a record: 0 for a view, else one operation per result element."""
    schema = schema_of(overload_of(call.node.target))
    is_view = any(r.alias_info is not None for r in (() if schema is None else schema.returns))
    return 0 if is_view else result_elements(call)


def per_result(operations: int) -> Estimator:
    """Return an estimator: ``operations`` per element of the result."""
    return lambda call: operations * result_elements(call)


def per_input(operations: int) -> Estimator:
    """Return an estimator: ``operations`` per element of the first argument."""
    return lambda call: operations * _elements_of(call, "self", "input", "x")


def contraction(operand: str, dimension: int, bias: str | None = None) -> Estimator:
    """Return an estimator: two operations per result element and summed element."""

    def estimate(call: OpCall) -> int:
        tensor = call.tensor(operand)
        if tensor is None:
            return 0
        has_bias = bias is not None and call.tensor(bias) is not None
        return result_elements(call) * (2 * extent(tensor.shape[dimension]) + has_bias)

    return estimate


ONE_PER_RESULT = per_result(1)

SOFTMAX_FLOPS = 5
"""Per element: maximum, subtraction, exponential, sum, division."""

WITHOUT_RECORD: Mapping[str, Estimator] = MappingProxyType(
    {
        **dict.fromkeys(("baddbmm", "addbmm"), contraction("batch1", -1, bias="self")),
        **dict.fromkeys(("dot", "mv"), contraction("self", -1)),
        "std": per_input(3),
        "index_add": per_input(1),
        **dict.fromkeys(("lift_fresh", "contiguous", "detach", "as_strided", "unfold"), nothing),
        **dict.fromkeys(("sym_numel", "sym_stride", "_local_scalar_dense", "item"), nothing),
        **dict.fromkeys(("masked_select", "nonzero"), nothing),
        **dict.fromkeys(("eye", "new_full", "ones", "rand", "zeros"), nothing),
    }
)
"""Ops that are never delegated, by name without namespace, overload and ``_copy``."""


def elements(tensor: torch.Tensor) -> int:
    """Number of elements of a real or fake tensor."""
    return math.prod(extent(size) for size in tensor.shape)


def extent(size: Any) -> int:
    """Return a dimension as a number: its traced size, or 1, if it is symbolic."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else None
        return int(hint) if isinstance(hint, int) else 1
    return int(size)


def bytes_of(node: Node) -> int:
    """Bytes of a node's results, in the dtypes of the graph."""
    return sum(elements(t) * t.element_size() for t in tensors_of(node.meta.get("val")))
