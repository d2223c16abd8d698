"""Analysis of the comparator of a sort: the keys it compares, and in which direction.

JAX compares tensors in turn, the first one first: ``a0 < b0 or (a0 == b0 and (a1 < b1 or ...))``.
Of floating-point numbers, it compares all NaN as one and both zeros as one, by selects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coreml_delegate.graph.node import Closure, Node, Value

_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
# Of equal elements a stable sort takes the first one first, whatever LE and GE say.
_ASCENDING = {"LT": True, "LE": True, "GT": False, "GE": False}

_ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "argument",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bitcast_convert",
        "cbrt",
        "ceil",
        "clamp",
        "compare",
        "constant",
        "convert",
        "cos",
        "cosh",
        "cosine",
        "count_leading_zeros",
        "digamma",
        "divide",
        "erf",
        "erf_inv",
        "erfc",
        "exponential",
        "exponential_minus_one",
        "floor",
        "identity",
        "is_finite",
        "is_inf",
        "is_nan",
        "lgamma",
        "log",
        "log_plus_one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "power",
        "reduce_precision",
        "remainder",
        "round_nearest_afz",
        "round_nearest_even",
        "rsqrt",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sine",
        "sinh",
        "sqrt",
        "square",
        "subtract",
        "tan",
        "tanh",
        "xor",
    ]
)


@dataclass(frozen=True, slots=True)
class SortKey:
    """One tensor that decides on the order.

    Attributes:
        operand: Its index among the sort's operands.
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


def is_elementwise(closure: Closure) -> bool:
    """Whether a closure has only operations on each element."""
    return all(node.name in _ELEMENTWISE for node in closure.scope.nodes)


def sort_keys(closure: Closure) -> tuple[SortKey, ...] | None:
    """Return what a comparator compares, the first key first; None if it is something else.

    Args:
        closure: Takes two elements of each operand; returns whether the first ones go before.
    """
    indices = {parameter: n for n, parameter in enumerate(closure.parameters)}
    (result,) = closure.results
    if result.node.name == "constant":
        return None if bool(result.node["array"]) else ()
    return _keys(result, indices)


def _keys(flag: Value, indices: dict[Value, int]) -> tuple[SortKey, ...] | None:
    node = flag.node
    if node.name == "compare":
        found = _comparison(node, indices)
        if found is None or found[1] not in _ASCENDING:
            return None
        operand, direction, splits_zeros = found
        return (SortKey(operand, _ASCENDING[direction], splits_zeros),)
    for first, condition, rest in _alternatives(node):
        keys = _lexicographic(first, condition, rest, indices)
        if keys is not None:
            return keys
    return None


def _alternatives(node: Node) -> list[tuple[Value, Value, Value]]:
    """Return what a node may be: (comparison, condition of the rest, comparison of the rest)."""
    if node.name == "or":
        found: list[tuple[Value, Value, Value]] = []
        one, other = node.operands
        for first, rest in ((one, other), (other, one)):
            if rest.node.name == "and":
                left, right = rest.node.operands
                found += [(first, left, right), (first, right, left)]
        return found
    if node.name == "select":
        condition, rest, first = node.operands
        return [(first, condition, rest)]
    return []


def _lexicographic(
    first: Value, condition: Value, rest: Value, indices: dict[Value, int]
) -> tuple[SortKey, ...] | None:
    if condition.node.name != "compare":
        return None
    keys, equality = _keys(first, indices), _comparison(condition.node, indices)
    if keys is None or equality is None or len(keys) != 1:
        return None
    if equality[:2] != (keys[0].operand, "EQ"):
        return None
    others = _keys(rest, indices)
    return None if others is None else (*keys, *others)


def _comparison(node: Node, indices: dict[Value, int]) -> tuple[int, str, bool] | None:
    """Return operand and direction of a comparison of its two elements, and if zeros differ."""
    left, right = (_argument(operand, indices) for operand in node.operands)
    if left is None or right is None or left.index // 2 != right.index // 2:
        return None
    if left.index == right.index:
        return None
    direction = node["direction"]
    if left.index > right.index:
        direction = _FLIPPED[direction]
    is_float = node.operands[0].dtype.is_float
    splits = is_float and node["total_order"] and not (left.merges_zeros and right.merges_zeros)
    return left.index // 2, direction, splits


def _argument(value: Value, indices: dict[Value, int]) -> _Argument | None:
    """Return the argument that a value has the order of."""
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
    found = _argument(other, indices)
    if found is None or condition.node.name != "compare" or replacement.node.name != "constant":
        return None
    constant = replacement.node["array"]
    direction = condition.node["direction"]
    compared = [_argument(operand, indices) for operand in condition.node.operands]
    if constant.ndim or compared[0] is None or compared[0].index != found.index:
        return None
    if direction == "NE" and np.isnan(constant) and compared[1] == compared[0]:
        return found  # all NaN are one
    second = condition.node.operands[1].node
    is_zero = second.name == "constant" and not np.any(second["array"])
    if direction == "EQ" and is_zero and constant == 0:
        return _Argument(found.index, True)
    return None
