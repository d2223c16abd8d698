"""Looking through nodes that only rearrange a tensor, to what it is made of.

What a graph computes is often hidden behind reshapes, transpositions and repetitions. A ``Place``
follows the dimensions of an outer tensor through them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from coreml_delegate.graph.node import Node, Scope, Value
from coreml_delegate.graph.tensor_types import DType

_REARRANGING = frozenset({"broadcast_in_dim", "convert", "identity", "reshape", "transpose"})
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "divide": operator.truediv,
    "multiply": operator.mul,
    "negate": operator.neg,
    "sqrt": math.sqrt,
    "subtract": operator.sub,
}
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "EQ": operator.eq,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "NE": operator.ne,
}
_DEPTH = 10  # of the nodes that are compared to find two values alike
_MOST_FACTORS = 8

Known = TypeVar("Known")

# What is known of values, which never change.
_NUMBERS: WeakKeyDictionary[Value, float | None] = WeakKeyDictionary()
_FACTORS: WeakKeyDictionary[Value, tuple[float, list[Value]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Place:
    """A value, and where the dimensions of an outer tensor are in it.

    Attributes:
        value: The value.
        axes: For each dimension of the outer tensor that of the value, or None where the value is
            repeated or was reduced.
        scope: Of the nodes that may be looked through.
    """

    value: Value
    axes: tuple[int | None, ...]
    scope: Scope

    @classmethod
    def of(cls, value: Value, scope: Scope) -> Place:
        """Return the place of a whole value."""
        return cls(value, tuple(range(value.rank)), scope)

    @property
    def node(self) -> Node | None:
        """The node that computes the value, if it may be looked at."""
        return self.value.node if self.value.node.scope is self.scope else None

    @property
    def name(self) -> str:
        """Name of that node's operation, or nothing."""
        return self.node.name if self.node is not None else ""

    def at(self, value: Value) -> Place:
        """Return the same place in an operand of a node that computes each element by itself."""
        if not value.rank:
            return Place(value, (None,) * len(self.axes), self.scope)
        sizes = zip(value.shape, self.value.shape, strict=True)
        repeated = {n for n, (size, whole) in enumerate(sizes) if size == 1 != whole}
        axes = tuple(None if axis in repeated else axis for axis in self.axes)
        return Place(value, axes, self.scope)

    def keeps_order(self) -> bool:
        """Whether no dimensions have changed places on the way from the outer tensor."""
        axes = [n for n in self.axes if n is not None and self.value.shape[n] != 1]
        return axes == sorted(axes)

    def stripped(self) -> Place:
        """Return the place behind all nodes that only rearrange."""
        place = self
        while place.node is not None:
            inner = _inner_axes(place.node)
            if inner is None:
                return place
            axes = tuple(None if axis is None else inner[axis] for axis in place.axes)
            place = Place(place.node.operands[0], axes, self.scope)
        return place

    def unreduced(self) -> Place | None:
        """Return the place in the operand of a reduction; None for another node."""
        node = self.node
        if (
            node is None
            or not node.name.startswith("reduce_")
            or "dimensions" not in node.attributes
        ):
            return None
        (operand,) = node.operands
        kept = [n for n in range(operand.rank) if n not in node["dimensions"]]
        axes = tuple(None if axis is None else kept[axis] for axis in self.axes)
        return Place(operand, axes, self.scope)

    def is_reduction_of(self, whole: Place, dimensions: tuple[int, ...]) -> bool:
        """Whether this is where ``whole`` is, without the dimensions of it that are reduced.

        Args:
            whole: A place with the same outer tensor.
            dimensions: The dimensions of this place's value that a reduction removes.
        """
        one, other = self.stripped(), whole.stripped()
        if not alike(one.value, other.value):
            return False
        behind = Place.of(self.value, self.scope).stripped().axes
        moved = {behind[dimension] for dimension in dimensions}
        reduced: set[int] = set()
        for mine, its in zip(one.axes, other.axes, strict=True):
            if its is None or other.value.shape[its] == 1:
                continue
            if mine is None:
                reduced.add(its)
            elif mine != its:
                return False
        sizes = one.value.shape
        return reduced == {axis for axis in moved if axis is not None and sizes[axis] != 1}


def _inner_axes(node: Node) -> tuple[int | None, ...] | None:
    """Return for each dimension of a node's result that of its operand; None for what computes."""
    if node.name == "identity":
        return tuple(range(node.operands[0].rank))
    if node.name == "transpose":
        return tuple(node["permutation"])
    if node.name == "broadcast_in_dim":
        return _broadcast_axes(node)
    return _reshape_axes(node) if node.name == "reshape" else None


def _broadcast_axes(node: Node) -> tuple[int | None, ...]:
    axes: list[int | None] = [None] * node.type.rank
    for axis, outer in enumerate(node["broadcast_dimensions"]):
        if node.operands[0].shape[axis] == node.type.shape[outer]:
            axes[outer] = axis
    return tuple(axes)


def _reshape_axes(node: Node) -> tuple[int | None, ...] | None:
    """Return the dimensions where a reshape only adds or removes sizes of 1."""
    before, after = node.operands[0].shape, node.type.shape
    kept = [n for n, size in enumerate(before) if size != 1]
    if [before[n] for n in kept] != [size for size in after if size != 1]:
        return None
    axes = iter(kept)
    return tuple(None if size == 1 else next(axes) for size in after)


def alike(one: Value, other: Value, depth: int = _DEPTH) -> bool:
    """Whether two values are one, or are computed in the same way of the same values."""
    if one is other:
        return True
    a, b = one.node, other.node
    if not depth or a.name != b.name or one.type != other.type or one.index != other.index:
        return False
    if a.name in ("argument", "parameter") or a.closures or len(a.operands) != len(b.operands):
        return False
    return _alike_attributes(a.attributes, b.attributes) and all(
        alike(x, y, depth - 1) for x, y in zip(a.operands, b.operands, strict=True)
    )


def _alike_attributes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[name])
        if isinstance(value, np.ndarray)
        else value == other[name]
        for name, value in one.items()
    )


def _resolved(
    value: Value,
    known: WeakKeyDictionary[Value, Known],
    operands: Callable[[Value], Sequence[Value]],
    combine: Callable[[Value], Known],
) -> Known:
    """Return a property of a value, combined from the same property of its operands.

    Each value is visited once, however many paths lead to it: those through a recurrence double
    with each step. Paths may be longer than Python's stack.
    """
    pending = [] if value in known else [value]
    while pending:
        missing = [operand for operand in operands(pending[-1]) if operand not in known]
        if missing:
            pending.extend(missing)
        else:
            last = pending.pop()
            known[last] = combine(last)
    return known[value]


def number(value: Value) -> float | None:
    """Return the number that all elements of a value are, if it is known."""
    return _resolved(value, _NUMBERS, _decisive, _combined_number)


def _decisive(value: Value) -> Sequence[Value]:
    """Return the operands whose numbers decide the number of a value."""
    node = value.node
    decide = node.name in _REARRANGING or (node.name in _ARITHMETIC and value.dtype.is_float)
    return node.operands if decide else ()


def _combined_number(value: Value) -> float | None:
    node = value.node
    if node.name == "constant":
        return _number_of(value.dtype, node["array"])
    operands = [_NUMBERS[operand] for operand in _decisive(value)]
    known = [operand for operand in operands if operand is not None]
    if not operands or len(known) != len(operands):
        return None
    if node.name in _REARRANGING:
        return known[0]
    try:
        return _ARITHMETIC[node.name](*known)
    except (ArithmeticError, ValueError):
        return None


def _number_of(dtype: DType, array: Any) -> float | None:
    if dtype in (DType.BOOL, DType.UINT32) or not array.size:
        return None
    first = array.reshape(-1)[0]
    return float(first) if bool(np.all(array == first)) else None


def truth(value: Value) -> bool | None:
    """Return whether a comparison of numbers holds, if they are known."""
    node = value.node
    if node.name in _REARRANGING and value.dtype is node.operands[0].dtype:
        return truth(node.operands[0])
    if node.name != "compare":
        return None
    one, other = (number(operand) for operand in node.operands)
    return None if one is None or other is None else _COMPARISONS[node["direction"]](one, other)


def is_number(value: Value, expected: float) -> bool:
    """Whether all elements of a value are a number, to the precision of its element type."""
    found = number(value)
    tolerance = 1e-3 if value.dtype.storage_dtype == "fp16" else 1e-6
    return found is not None and (
        found == expected or math.isclose(found, expected, rel_tol=tolerance)
    )


def factors(value: Value, scope: Scope) -> tuple[float, list[Value]]:
    """Return the constant factor and the other factors that a value is the product of.

    A product of more factors than any pattern has is one factor.
    """
    if value.node.scope is not scope or not value.dtype.is_float:
        return 1.0, [value]
    return _resolved(value, _FACTORS, _divisible, _combined_factors)


def _divisible(value: Value) -> Sequence[Value]:
    """Return the operands in the scope of a value that have the same factors as the value."""
    node = value.node
    count = {"multiply": 2, "negate": 1, "divide": 1, "square": 1}.get(node.name, 0)
    return [
        operand
        for operand in node.operands[:count]
        if operand.node.scope is node.scope and value.dtype.is_float
    ]


def _combined_factors(value: Value) -> tuple[float, list[Value]]:
    found = _product_of(value)
    return found if len(found[1]) <= _MOST_FACTORS else (1.0, [value])


def _product_of(value: Value) -> tuple[float, list[Value]]:
    node = value.node
    if node.name == "multiply":
        return _product(node)
    if node.name == "negate":
        constant, others = factors(node.operands[0], node.scope)
        return -constant, others
    if node.name == "divide":
        divisor = number(node.operands[1])
        if divisor:
            constant, others = factors(node.operands[0], node.scope)
            return constant / divisor, others
    if node.name == "square":
        constant, others = factors(node.operands[0], node.scope)
        return constant * constant, others * 2
    return 1.0, [value]


def _product(node: Node) -> tuple[float, list[Value]]:
    constant, others = 1.0, list[Value]()
    for operand in node.operands:
        known = number(operand)
        if known is not None:
            constant *= known
        elif operand.shape != node.type.shape:  # repeated: it is a factor as it is
            others.append(operand)
        else:
            inner, more = factors(operand, node.scope)
            constant *= inner
            others += more
    return constant, others
