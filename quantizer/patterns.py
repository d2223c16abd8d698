"""Quantization patterns of the op records, by the ATen ops of ``torch.export``.

Ops are named by ``functional_name``: in-place variants share the record of their functional op.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from coreml_delegate.ops import COMPOSITES, RECORDS
from coreml_delegate.ops.call import OpCall, target_name
from coreml_delegate.ops.quantization import IN_FLOAT, Pattern, Quantization, Tail

BY_OP: Mapping[str, Quantization] = MappingProxyType(
    {
        op.target: op.quantization
        for op in (*RECORDS.values(), *COMPOSITES)
        if op.quantization != IN_FLOAT
    }
)
"""Quantization of each op that is quantized or fused, by functional name."""

BATCH_NORM = "aten.batch_norm.default"


def functional_name(node: Node) -> str:
    """Return the op name of a call without a trailing underscore (``relu_`` becomes ``relu``)."""
    namespace, _, qualified = target_name(node.target).partition(".")
    op, _, overload = qualified.partition(".")
    return f"{namespace}.{op.rstrip('_') or op}.{overload}"


def quantization_of(node: Node) -> Quantization:
    """Return the quantization of a call's op."""
    return BY_OP.get(functional_name(node), IN_FLOAT)


def tail_of(node: Node) -> Tail | None:
    """Return the call's kind as a fused op, or None if it cannot be fused."""
    return quantization_of(node).tail


def is_not_negative(node: Node) -> bool:
    """Whether the op's result is never negative for any input."""
    bound = quantization_of(node).lower_bound
    value = OpCall.of(node).arguments.get(bound) if isinstance(bound, str) else bound
    return isinstance(value, int | float) and value >= 0


def pattern_of(call: OpCall, constants: Collection[Node]) -> Pattern | None:
    """Return the pattern of a call, or None; all patterns but the last need a constant matrix.

    Args:
        call: The call.
        constants: Constant nodes of the graph.
    """
    patterns = quantization_of(call.node).patterns
    fitting = (p for p in patterns[:-1] if _is_matrix(call.arguments[p.weight or ""], constants))
    return next(fitting, patterns[-1] if patterns else None)


def _is_matrix(value: Any, constants: Collection[Node]) -> bool:
    return value in constants and value.meta["val"].dim() == 2
