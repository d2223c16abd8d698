"""Limits on tensors whose sizes a program computes from values.

A few bytes of a program, or of an input, can ask for more memory than the machine has, which on
many systems ends the process. Sizes that follow from the shapes of inputs are known, or bounded by
the declared input shapes, and need no check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    element_type,
    f32,
    fail_if,
    ints,
    output,
    rank,
    shape_of,
)
from coreml_delegate.runtime.engines.openvino.values import Tensor

# Node type -> indices of the inputs whose values determine the sizes of the output.
_SIZED_BY: Final[Mapping[str, tuple[int, ...]]] = {
    "Broadcast": (1,),
    "Interpolate": (1, 2),
    "NonZero": (0,),
    "OneHot": (1,),
    "Pad": (1, 2),
    "RandomUniform": (0,),
    "Range": (0, 1, 2),
    "Tile": (1,),
}


def require_room(
    control: Tensor, sizes: Tensor, like: Tensor | None = None, repeats_for: Tensor | None = None
) -> Tensor:
    """Return ``control``, whose computation fails if a tensor would be too large.

    Args:
        control: The value that determines the tensor's sizes; returned unchanged if it depends only
            on shapes.
        sizes: Numbers whose product is the number of elements, a vector or a scalar.
        like: A tensor with the same element type; None for four bytes per element.
        repeats_for: A tensor whose number of elements is another factor.
    """
    factors = () if repeats_for is None else (shape_of(repeats_for),)
    if not any(map(_depends_on_values, (control, *factors))):
        return control
    nbytes = 4 if like is None else max(element_type(like).bitwidth // 8, 1)
    elements = ops.absolute(f32(sizes))
    if rank(sizes):
        elements = ops.reduce_prod(elements, ints(0))
    if repeats_for is not None:
        elements = ops.multiply(elements, ops.reduce_prod(f32(shape_of(repeats_for)), ints(0)))
    most = ops.constant(np.float32(limits.MAX_COMPUTED // nbytes))
    # Not ``greater``: it is false for NaN, the count of a range with a step of zero.
    too_large = ops.logical_not(ops.less_equal(elements, most))
    reason = f"a tensor of a computed size takes more than {limits.MAX_COMPUTED} bytes"
    return fail_if(too_large, control, reason)


def _depends_on_values(value: Tensor) -> bool:
    """Whether a value depends on the values of inputs, not only on their shapes."""
    if constant_data(value) is not None:
        return False
    pending: list[tuple[Any, bool]] = [(output(value), False)]
    seen: set[tuple[str, int, bool]] = set()
    while pending:
        source, is_shape = pending.pop()
        node = source.get_node()
        key = node.get_name(), source.get_index(), is_shape
        if key in seen:
            continue
        seen.add(key)
        kind = node.get_type_name()
        if kind == "Parameter" and not is_shape:
            return True
        if is_shape and not source.get_partial_shape().is_dynamic:
            continue
        inputs = [port.get_source_output() for port in node.inputs()]
        if is_shape:
            pending += [(inputs[n], False) for n in _SIZED_BY.get(kind, ()) if n < len(inputs)]
        pending += [(port_value, is_shape or kind == "ShapeOf") for port_value in inputs]
    return False
