"""Rotary position embeddings, in the form that OpenVINO 2026.4's CPU plugin fuses to one kernel.

The plugin has a kernel, RoPE, for ``x * cos + concat(-b, a) * sin``, where ``a`` and ``b`` are the
halves of ``x``, and ``cos`` and ``sin`` are as wide as ``x`` (``rotate_half``; Su et al., 2021,
arXiv 2104.09864). It recognizes the form only if a split makes the halves. With two slices the
plugin runs five kernels, which took a seventh of a step of a language model with int4 weights. So
the slices become a split.

The plugin also fuses ``concat(a * cos - b * sin, b * cos + a * sin)``, with tables of half the
width, but a compiled model forgets that width when it is exported and imported, as for the cache
and for programs that run without Python. The kernel then reads beyond the tables. No issue is
known. So this form is rewritten to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    constant_ints,
    dims,
    ints,
    normalize_axis,
    replace_node,
    scalar,
)

_RANK = 4  # of the tensors that the plugin rotates
_SLICES = ("Slice", "StridedSlice")


@dataclass(frozen=True, slots=True)
class _Half:
    """Half of a tensor along its last axis.

    Attributes:
        tensor: The full tensor.
        index: 0 for the first half, 1 for the second.
        width: Size of the half along the last axis.
    """

    tensor: Any
    index: int
    width: int


def fuse_rotary_embeddings(model: Any) -> None:
    """Rewrite the rotary embeddings of ``model`` to the form that is fused, in place."""
    for node in model.get_ordered_ops():
        parts = _concatenated_pair(node)
        if parts is None:
            continue
        if (half := _matched_rotate_half(*parts)) is not None:
            rewritten = _rotate_half(half)
        elif (rotation := _matched_rotation(*parts)) is not None:
            half, cos, sin = rotation
            wide_cos, wide_sin = (ops.concat([table, table], -1) for table in (cos, sin))
            by_cos = ops.multiply(half.tensor, wide_cos)
            rewritten = ops.add(by_cos, ops.multiply(_rotate_half(half), wide_sin))
        else:
            continue
        replace_node(node, rewritten)


def _concatenated_pair(node: Any) -> tuple[Any, Any] | None:
    """Return the two values that a node concatenates along the last axis; None for other nodes."""
    if node.get_type_name() != "Concat":
        return None
    parts = node.input_values()
    if len(parts) != 2 or not _has_rank(parts[0]):
        return None
    axis = normalize_axis(node.get_attributes()["axis"], _RANK)
    return (parts[0], parts[1]) if axis == _RANK - 1 else None


def _rotate_half(half: _Half) -> Any:
    """Return ``concat(-b, a)``, where ``a`` and ``b`` are the halves of ``half.tensor``."""
    # The plugin looks for a split along an axis that is counted from the front.
    split = ops.variadic_split(half.tensor, ints(_RANK - 1), ints((half.width, half.width)))
    first, second = split.outputs()
    return ops.concat([ops.multiply(second, scalar(-1.0, second)), first], -1)


def _matched_rotate_half(second: Any, first: Any) -> _Half | None:
    """Match ``-b`` and ``a``, the halves of one tensor; return the half ``a``, or None."""
    second = _negated(second)
    if second is None or not _are_halves(first, second):
        return None
    return _half(first)


def _matched_rotation(first_part: Any, second_part: Any) -> tuple[_Half, Any, Any] | None:
    """Match ``a * cos - b * sin`` and ``b * cos + a * sin``, where a, b are halves of one tensor.

    Returns:
        (a, cos, sin); None for other values.
    """
    difference, total = _difference(first_part), _operands(second_part, "Add")
    if difference is None or total is None:
        return None
    factors = _halves(difference)
    if factors is None:
        return None
    first, second, cos, sin = factors
    factors_of = (_operands(term, "Multiply") or () for term in total)
    products = {frozenset(map(_key, pair)) for pair in factors_of}
    if products != {frozenset((_key(second), _key(cos))), frozenset((_key(first), _key(sin)))}:
        return None
    half = _half(first)
    # A table of rank 0 has no width.
    if half is None or any(dims(table)[-1:] != (half.width,) for table in (cos, sin)):
        return None
    return half, cos, sin


def _difference(value: Any) -> tuple[Any, Any] | None:
    """Match ``a - b`` or ``a + -b``; return (a, b), or None."""
    operands = _operands(value, "Subtract")
    if operands is not None:
        return operands
    for minuend, other in _both_orders(_operands(value, "Add")):
        if (subtrahend := _negated(other)) is not None:
            return minuend, subtrahend
    return None


def _negated(value: Any) -> Any | None:
    """Match ``-x`` or ``x * -1``; return ``x``, or None."""
    node = value.get_node()
    if node.get_type_name() == "Negative":
        return node.input_value(0)
    for factor, other in _both_orders(_operands(value, "Multiply")):
        data = constant_data(factor)
        if data is not None and data.size == 1 and float(data.flat[0]) == -1.0:
            return other
    return None


def _halves(difference: tuple[Any, Any]) -> tuple[Any, Any, Any, Any] | None:
    """Match ``a * cos`` and ``b * sin`` of halves a, b; return (a, b, cos, sin), or None."""
    for first, cos in _both_orders(_operands(difference[0], "Multiply")):
        for second, sin in _both_orders(_operands(difference[1], "Multiply")):
            if _are_halves(first, second):
                return first, second, cos, sin
    return None


def _are_halves(first: Any, second: Any) -> bool:
    """Whether the values are the first and the second half of one tensor."""
    halves = _half(first), _half(second)
    if halves[0] is None or halves[1] is None:
        return False
    is_same = _key(halves[0].tensor) == _key(halves[1].tensor)
    return is_same and (halves[0].index, halves[1].index) == (0, 1)


def _half(value: Any) -> _Half | None:
    """Match a split or slice that takes half of a tensor; return the half, or None."""
    node = value.get_node()
    kind = node.get_type_name()
    if (kind != "VariadicSplit" and kind not in _SLICES) or not _has_rank(value):
        return None
    tensor = node.input_value(0)
    *sizes, width = dims(value)
    if width is None or [*sizes, 2 * width] != [*dims(tensor)]:
        return None
    if kind == "VariadicSplit":
        return _Half(tensor, value.get_index(), width)
    first = constant_ints(node.input_value(1))
    if first is None:
        return None
    masks = node.get_attributes().get("begin_mask")
    start = 0 if masks is not None and masks[-1] else first[-1] % (2 * width)
    return _Half(tensor, start // width, width) if start in (0, width) else None


def _has_rank(value: Any) -> bool:
    rank = value.get_partial_shape().rank
    return rank.is_static and rank.get_length() == _RANK


def _operands(value: Any, kind: str) -> tuple[Any, Any] | None:
    """Return both operands of a node of type ``kind``; None for other nodes."""
    node = value.get_node()
    if node.get_type_name() != kind:
        return None
    x, y = node.input_values()
    return x, y


def _both_orders(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    """Return a pair in both orders; nothing for None."""
    return () if pair is None else (pair, pair[::-1])


def _key(value: Any) -> tuple[str, int]:
    """Return the name of the node and the index of its output, which identify a value."""
    return value.get_node().get_name(), value.get_index()
