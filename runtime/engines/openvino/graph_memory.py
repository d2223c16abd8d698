"""No graph may ask for more memory than it can have, as far as its shapes tell."""

from __future__ import annotations

import math
from typing import Any

from coreml_delegate.runtime.engines.memory import require

_FREE_BYTES = 1 << 28
"""Nodes that touch no more are not looked at further."""


def require_memory(model: Any) -> None:
    """Refuse a model with a node whose operands and results do not fit into memory at once.

    Sizes known only at run time are left to OpenVINO.

    Args:
        model: ``openvino.Model``.

    Raises:
        ExecutionError: There is such a node.
    """
    for node in model.get_ops():
        values = [*node.outputs(), *(port.get_source_output() for port in node.inputs())]
        needed = sum(map(_nbytes, values))
        if needed > _FREE_BYTES:
            require(needed, f"{node.get_type_name()} {node.get_friendly_name()!r}")


def _nbytes(value: Any) -> int:
    shape = value.get_partial_shape()
    if shape.is_dynamic:
        return 0
    return math.prod(shape.to_shape()) * value.get_element_type().bitwidth // 8
