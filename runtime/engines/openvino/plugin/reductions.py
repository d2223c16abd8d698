"""Workarounds for reductions that OpenVINO 2026.4 fuses wrongly with the ops around them.

The CPU plugin fuses elementwise ops with a reduction before them. If [A, B, C] is reduced along A
or C, it then reads a constant of B numbers as one number: ``x.mean(2) + bias[None]``, as after
pooling over time.

After a reduction without ``keep_dims``, it removes a reshape or transpose that keeps the order of
elements, as to a column, and the result has the wrong shape. A transpose before the reduction is
removed too: OpenVINO first moves it behind the reduction, past other reductions as well.

A reshape that adds dimensions of size 1 before a reduction with ``keep_dims`` is moved behind it,
and adds them at axes counted as if the reduced dimensions were gone: ``x.unsqueeze(2).mean(0,
keepdim=True)`` of [2, 3, 4] has the shape [1, 1, 3, 4].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import constant_data, constant_ints, ints
from coreml_delegate.runtime.engines.openvino.plugin.quantized import (
    FUSED_WITH_REDUCTIONS,
    REDUCTIONS,
)

_MOVES = frozenset({"Reshape", "Transpose"})
_PASSED = REDUCTIONS | {"Convert", "FakeQuantize"}
_FUSED = FUSED_WITH_REDUCTIONS | {"BatchNormInference"}
_RANK = 3


def mend_reductions(model: Any) -> None:
    """Rewrite the reductions of ``model`` that the plugin would fuse wrongly, in place.

    The plugin reads constants right if the reduced tensor has a fourth dimension, of size 1. A
    squeeze between reduction and reshape keeps the shape. A reshape stays before a reduction that
    also reduces the dimensions of size 1.
    """
    for node in list(model.get_ops()):
        if node.get_type_name() not in REDUCTIONS:
            continue
        _reduce_later_size_one_axes(node)
        if _is_misread(node):
            _add_dimension(node)
        elif _loses_shape(node):
            _separate_squeeze(node)


def _is_misread(reduction: Any) -> bool:
    """Whether ops fused with ``reduction`` have a constant that is read as one number."""
    sizes = reduction.get_input_partial_shape(0)
    axes = constant_ints(reduction.input_value(1))
    if sizes.rank.is_dynamic or len(sizes) != _RANK or axes is None:
        return False
    if {axis % _RANK for axis in axes} not in ({0}, {2}):
        return False
    value = reduction.output(0)
    while (readers := list(value.get_target_inputs())) and len(readers) == 1:
        reader = readers[0].get_node()
        if reader.get_type_name() not in _FUSED:
            return False
        ports = range(reader.get_input_size())
        operands = [reader.input_value(i) for i in ports if i != readers[0].get_index()]
        constants = [_constant(operand) for operand in operands]
        if any(constant is None for constant in constants):
            return False
        if any(np.size(constant) > 1 for constant in constants):
            return True
        value = reader.output(0)
    return False


def _reduce_later_size_one_axes(reduction: Any) -> None:
    """Also reduce later dimensions of size 1, where ``keep_dims`` keeps all of them anyway."""
    sizes, axes = reduction.get_input_partial_shape(0), constant_ints(reduction.input_value(1))
    if sizes.rank.is_dynamic or not axes or not reduction.get_attributes()["keep_dims"]:
        return
    reduced = {axis % len(sizes) for axis in axes}
    later = [n for n, size in enumerate(sizes) if n > min(reduced) and size == 1]
    if not reduced.issuperset(later):
        over = ints(sorted({*reduced, *later}))
        reduction.input(1).replace_source_output(over.output(0))


def _loses_shape(reduction: Any) -> bool:
    """Whether the plugin may remove a reshape or transpose around ``reduction``."""
    if reduction.get_attributes()["keep_dims"]:
        return False
    readers = [r.get_node().get_type_name() for r in reduction.output(0).get_target_inputs()]
    return not _MOVES.isdisjoint(readers) or _is_transposed(reduction.input_value(0))


def _is_transposed(value: Any) -> bool:
    """Whether ``value`` is a transpose, or ops on one that OpenVINO moves it past."""
    node = value.get_node()
    while node.get_type_name() in _PASSED:
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Transpose"


def _separate_squeeze(reduction: Any) -> None:
    """Replace ``reduction`` by one with ``keep_dims`` and a squeeze."""
    readers = reduction.output(0).get_target_inputs()
    reduction.set_attribute("keep_dims", True)
    reduction.validate_and_infer_types()
    narrow = ops.squeeze(reduction, reduction.input_value(1)).output(0)
    for reader in readers:
        reader.replace_source_output(narrow)


def _constant(value: Any) -> Any:
    """Return the content of a constant, cast or not; None for any other value."""
    node = value.get_node()
    return constant_data(node.input_value(0) if node.get_type_name() == "Convert" else value)


def _add_dimension(reduction: Any) -> None:
    """Reduce ``x[..., None]`` instead of ``x``."""
    (axis,) = {axis % _RANK for axis in constant_ints(reduction.input_value(1)) or ()}
    wide = ops.unsqueeze(reduction.input_value(0), ints(_RANK))
    readers = reduction.output(0).get_target_inputs()
    reduction.input(0).replace_source_output(wide.output(0))
    reduction.input(1).replace_source_output(ints([axis]).output(0))
    is_kept = reduction.get_attributes()["keep_dims"]
    reduction.set_attribute("keep_dims", False)
    reduction.validate_and_infer_types()
    narrow = ops.squeeze(reduction, ints(-1))
    narrow = (ops.unsqueeze(narrow, ints(axis)) if is_kept else narrow).output(0)
    for reader in readers:
        reader.replace_source_output(narrow)
