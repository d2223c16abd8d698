"""Quantization patterns of the op records, by the ATen ops of ``torch.export``.

Op names are those of ``functional_name``: in-place variants have the record of their op.
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
"""How each op that is quantized or fused is treated, by its functional name."""

BATCH_NORM = "aten.batch_norm.default"


def functional_name(node: Node) -> str:
    """Return ``aten.relu.default`` for a call of it or of ``aten.relu_.default``."""
    namespace, _, rest = target_name(node.target).partition(".")
    op, _, overload = rest.partition(".")
    return f"{namespace}.{op.rstrip('_') or op}.{overload}"


def quantization_of(node: Node) -> Quantization:
    """Return how the op of a call is quantized."""
    return BY_OP.get(functional_name(node), IN_FLOAT)


def tail_of(node: Node) -> Tail | None:
    """Return the kind of op that a call is when fused behind another, or None."""
    return quantization_of(node).tail


def is_not_negative(node: Node) -> bool:
    """Whether the op's result is never negative, whatever its input."""
    bound = quantization_of(node).lower_bound
    value = OpCall.of(node).arguments.get(bound) if isinstance(bound, str) else bound
    return isinstance(value, int | float) and value >= 0


def pattern_of(call: OpCall, constants: Collection[Node]) -> Pattern | None:
    """Return the pattern of a call, or None; of several, the first takes a constant matrix.

    Args:
        call: The call.
        constants: Nodes of the graph that are known before it runs.
    """
    patterns = quantization_of(call.node).patterns
    fitting = (p for p in patterns[:-1] if _is_matrix(call.arguments[p.weight or ""], constants))
    return next(fitting, patterns[-1] if patterns else None)


def _is_matrix(value: Any, constants: Collection[Node]) -> bool:
    return value in constants and value.meta["val"].dim() == 2
