"""Analysis of a sort's comparator: its keys, and their directions.

JAX compares tensors in lexicographic order: ``a0 < b0 or (a0 == b0 and (a1 < b1 or ...))``.
It makes all NaN equal, and both zeros, by selects before the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coreml_delegate.graph.node import Closure, Node, Value
from coreml_delegate.graph.operations.elementwise import MIRRORED

# A stable sort keeps the order of equal elements, so that LE and GE are LT and GT.
_ASCENDING = {"LT": True, "LE": True, "GT": False, "GE": False}


@dataclass(frozen=True, slots=True)
class SortKey:
    """A tensor that decides on the order.

    Attributes:
        operand: Index among the sort's operands.
        ascending: Whether smaller elements go first.
        splits_zeros: Whether -0 is smaller than 0.
    """

    operand: int
    ascending: bool
    splits_zeros: bool


@dataclass(frozen=True, slots=True)
class _Argument:
    index: int
    merges_zeros: bool


def sort_keys(closure: Closure) -> tuple[SortKey, ...] | None:
    """Return the keys of a comparator, the first key first; None for other functions.

    A comparator takes two elements of each operand, and returns whether the first go before.
    """
    indices = {parameter: n for n, parameter in enumerate(closure.parameters)}
    (result,) = closure.results
    if result.node.name == "constant":
        return None if bool(result.node["array"]) else ()
    return _keys(result, indices)


def _keys(flag: Value, indices: dict[Value, int]) -> tuple[SortKey, ...] | None:
    node = flag.node
    if node.name == "compare":
        comparison = _comparison(node, indices)
        if comparison is None or comparison[1] not in _ASCENDING:
            return None
        operand, direction, splits_zeros = comparison
        return (SortKey(operand, _ASCENDING[direction], splits_zeros),)
    for first, condition, next_flag in _alternatives(node):
        keys = _lexicographic(first, condition, next_flag, indices)
        if keys is not None:
            return keys
    return None


def _alternatives(node: Node) -> list[tuple[Value, Value, Value]]:
    """Return readings of a node as ``first or (condition and next)``: (first, condition, next)."""
    if node.name == "or":
        readings: list[tuple[Value, Value, Value]] = []
        one, other = node.operands
        for first, next_flag in ((one, other), (other, one)):
            if next_flag.node.name == "and":
                one_part, other_part = next_flag.node.operands
                readings += [(first, one_part, other_part), (first, other_part, one_part)]
        return readings
    if node.name == "select":
        condition, next_flag, first = node.operands
        return [(first, condition, next_flag)]
    return []


def _lexicographic(
    first: Value, condition: Value, next_flag: Value, indices: dict[Value, int]
) -> tuple[SortKey, ...] | None:
    if condition.node.name != "compare":
        return None
    keys, equality = _keys(first, indices), _comparison(condition.node, indices)
    if keys is None or equality is None or len(keys) != 1:
        return None
    if equality[:2] != (keys[0].operand, "EQ"):
        return None
    next_keys = _keys(next_flag, indices)
    return None if next_keys is None else (*keys, *next_keys)


def _comparison(node: Node, indices: dict[Value, int]) -> tuple[int, str, bool] | None:
    """Return (operand, direction, splits_zeros) of a comparison of an operand's two elements."""
    left, right = (_argument(operand, indices) for operand in node.operands)
    if left is None or right is None or left.index // 2 != right.index // 2:
        return None
    if left.index == right.index:
        return None
    direction = node["direction"]
    if left.index > right.index:
        direction = MIRRORED[direction]
    is_float = node.operands[0].dtype.is_float
    splits = is_float and node["total_order"] and not (left.merges_zeros and right.merges_zeros)
    return left.index // 2, direction, splits


def _argument(value: Value, indices: dict[Value, int]) -> _Argument | None:
    """Return the argument whose order a value has, or None."""
    if value in indices:
        return _Argument(indices[value], False)
    node = value.node
    if node.name == "convert":
        (operand,) = node.operands
        is_wider = np.can_cast(operand.dtype.numpy, value.dtype.numpy, "safe")
        return _argument(operand, indices) if is_wider else None
    if node.name != "select":
        return None
    condition, replacement, other = node.operands
    argument = _argument(other, indices)
    if argument is None or condition.node.name != "compare" or replacement.node.name != "constant":
        return None
    constant = replacement.node["array"]
    direction = condition.node["direction"]
    compared = [_argument(operand, indices) for operand in condition.node.operands]
    if constant.ndim or compared[0] is None or compared[0].index != argument.index:
        return None
    if direction == "NE" and np.isnan(constant) and compared[1] == compared[0]:
        return argument  # all NaN are equal
    second = condition.node.operands[1].node
    is_zero = second.name == "constant" and not np.any(second["array"])
    if direction == "EQ" and is_zero and constant == 0:
        return _Argument(argument.index, True)
    return None
