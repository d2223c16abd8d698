"""Views: values as seen through nodes that only rearrange elements.

Reshapes, transpositions and broadcasts often stand between the nodes of a pattern. A ``View``
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
_DEPTH = 10  # of nodes that ``alike`` compares
_MOST_FACTORS = 8

Property = TypeVar("Property")

# Caches: values never change.
_NUMBERS: WeakKeyDictionary[Value, float | None] = WeakKeyDictionary()
_FACTORS: WeakKeyDictionary[Value, tuple[float, list[Value]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class View:
    """A value, and the dimensions of an outer tensor in it.

    Attributes:
        value: The value.
        axes: For each dimension of the outer tensor, the dimension of the value; None where the
            value is repeated or was reduced.
        scope: Only nodes of this scope are looked through.
    """

    value: Value
    axes: tuple[int | None, ...]
    scope: Scope

    @classmethod
    def of(cls, value: Value, scope: Scope) -> View:
        """Return the view of a value that is the outer tensor itself."""
        return cls(value, tuple(range(value.rank)), scope)

    @property
    def node(self) -> Node | None:
        """The node that computes the value; None in another scope."""
        return self.value.node if self.value.node.scope is self.scope else None

    @property
    def name(self) -> str:
        """Name of the node's operation; empty without a node."""
        return self.node.name if self.node is not None else ""

    def operand(self, value: Value) -> View:
        """Return the view of an operand, if the view's node is elementwise."""
        if not value.rank:
            return View(value, (None,) * len(self.axes), self.scope)
        sizes = zip(value.shape, self.value.shape, strict=True)
        repeated = {n for n, (size, full) in enumerate(sizes) if size == 1 != full}
        axes = tuple(None if axis in repeated else axis for axis in self.axes)
        return View(value, axes, self.scope)

    def keeps_order(self) -> bool:
        """Whether the dimensions have the order of the outer tensor's dimensions."""
        axes = [n for n in self.axes if n is not None and self.value.shape[n] != 1]
        return axes == sorted(axes)

    def origin(self) -> View:
        """Return the view of the value from which rearranging nodes make this value."""
        view = self
        while view.node is not None:
            operand_axes = _operand_axes(view.node)
            if operand_axes is None:
                return view
            axes = tuple(None if axis is None else operand_axes[axis] for axis in view.axes)
            view = View(view.node.operands[0], axes, self.scope)
        return view

    def reduction_operand(self) -> View | None:
        """Return the view of a reduction's operand; None for another node."""
        node = self.node
        if (
            node is None
            or not node.name.startswith("reduce_")
            or "dimensions" not in node.attributes
        ):
            return None
        (operand,) = node.operands
        remaining = [n for n in range(operand.rank) if n not in node["dimensions"]]
        axes = tuple(None if axis is None else remaining[axis] for axis in self.axes)
        return View(operand, axes, self.scope)

    def is_reduction_of(self, outer: View, dimensions: tuple[int, ...]) -> bool:
        """Whether this view, reduced over ``dimensions`` of its value, is a reduction of ``outer``.

        Both views have the same outer tensor.
        """
        one, other = self.origin(), outer.origin()
        if not alike(one.value, other.value):
            return False
        origin_axes = View.of(self.value, self.scope).origin().axes
        reduced_axes = {origin_axes[dimension] for dimension in dimensions}
        missing: set[int] = set()
        for own_axis, outer_axis in zip(one.axes, other.axes, strict=True):
            if outer_axis is None or other.value.shape[outer_axis] == 1:
                continue
            if own_axis is None:
                missing.add(outer_axis)
            elif own_axis != outer_axis:
                return False
        sizes = one.value.shape
        return missing == {axis for axis in reduced_axes if axis is not None and sizes[axis] != 1}


def _operand_axes(node: Node) -> tuple[int | None, ...] | None:
    """Return the operand's dimension for each dimension of the result; None if a node computes."""
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
    """Return the operand's dimensions if a reshape only adds or removes sizes of 1, else None."""
    before, after = node.operands[0].shape, node.type.shape
    long_axes = [n for n, size in enumerate(before) if size != 1]
    if [before[n] for n in long_axes] != [size for size in after if size != 1]:
        return None
    axes = iter(long_axes)
    return tuple(None if size == 1 else next(axes) for size in after)


def alike(one: Value, other: Value, depth: int = _DEPTH) -> bool:
    """Whether two values are the same, or computed by the same operations from the same values."""
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


def _resolve(
    value: Value,
    cache: WeakKeyDictionary[Value, Property],
    operands: Callable[[Value], Sequence[Value]],
    combine: Callable[[Value], Property],
) -> Property:
    """Return a property of a value, combined from the same property of its operands.

    Each value is visited once, as the number of paths through a recurrence doubles with each step.
    There is no recursion, as paths may be longer than Python's stack.
    """
    pending = [] if value in cache else [value]
    while pending:
        missing = [operand for operand in operands(pending[-1]) if operand not in cache]
        if missing:
            pending.extend(missing)
        else:
            last = pending.pop()
            cache[last] = combine(last)
    return cache[value]


def number(value: Value) -> float | None:
    """Return the number that all elements of a value are equal to, or None."""
    return _resolve(value, _NUMBERS, _operands_with_number, _combine_number)


def _operands_with_number(value: Value) -> Sequence[Value]:
    """Return the operands from whose numbers a value's number is computed."""
    node = value.node
    decide = node.name in _REARRANGING or (node.name in _ARITHMETIC and value.dtype.is_float)
    return node.operands if decide else ()


def _combine_number(value: Value) -> float | None:
    node = value.node
    if node.name == "constant":
        return _number_of(value.dtype, node["array"])
    optional_numbers = [_NUMBERS[operand] for operand in _operands_with_number(value)]
    numbers = [number for number in optional_numbers if number is not None]
    if not optional_numbers or len(numbers) != len(optional_numbers):
        return None
    if node.name in _REARRANGING:
        (number,) = numbers
        # A conversion to integers cuts digits off.
        return number if value.dtype.is_float or number.is_integer() else None
    try:
        return _ARITHMETIC[node.name](*numbers)
    except (ArithmeticError, ValueError):
        return None


def _number_of(dtype: DType, array: Any) -> float | None:
    if dtype in (DType.BOOL, DType.UINT32) or not array.size:
        return None
    first = array.reshape(-1)[0]
    return float(first) if bool(np.all(array == first)) else None


def truth(value: Value) -> bool | None:
    """Return whether a comparison of known numbers holds; None for other values."""
    node = value.node
    if node.name in _REARRANGING and value.dtype is node.operands[0].dtype:
        return truth(node.operands[0])
    if node.name != "compare":
        return None
    one, other = (number(operand) for operand in node.operands)
    holds = getattr(operator, node["direction"].lower())  # such as ``operator.le``
    return None if one is None or other is None else holds(one, other)


def is_number(value: Value, expected: float) -> bool:
    """Whether all elements are ``expected``, to the precision of the element type."""
    actual = number(value)
    tolerance = 1e-3 if value.dtype.storage_dtype == "fp16" else 1e-6
    return actual is not None and (
        actual == expected or math.isclose(actual, expected, rel_tol=tolerance)
    )


def operands_of(value: Value | None, name: str, scope: Scope) -> tuple[Value, ...] | None:
    """Return the operands of ``name(...)``, if an operation of this name in a scope computes it."""
    is_match = value is not None and value.node.name == name and value.node.scope is scope
    return value.node.operands if value is not None and is_match else None


def scaled_operand(node: Node) -> tuple[Value, float] | None:
    """Return x and k of ``x * k`` or ``x / (1 / k)``, where k is a number; else None."""
    one, other = node.operands
    factor = number(other)
    if factor is None and node.name == "multiply":
        one, factor = other, number(one)
    if not factor or not math.isfinite(factor) or one.type != node.type:
        return None
    return one, (1 / factor if node.name == "divide" else factor)


def factors(value: Value, scope: Scope) -> tuple[float, list[Value]]:
    """Return a value's constant factor and its other factors.

    A product of more than eight factors, which no pattern has, is one factor.
    """
    if value.node.scope is not scope or not value.dtype.is_float:
        return 1.0, [value]
    return _resolve(value, _FACTORS, _operands_with_factors, _combine_factors)


def _operands_with_factors(value: Value) -> Sequence[Value]:
    """Return the operands in the value's scope whose factors are factors of the value."""
    node = value.node
    count = {"multiply": 2, "negate": 1, "divide": 1}.get(node.name, 0)
    return [
        operand
        for operand in node.operands[:count]
        if operand.node.scope is node.scope and value.dtype.is_float
    ]


def _combine_factors(value: Value) -> tuple[float, list[Value]]:
    product = _product_of(value)
    return product if len(product[1]) <= _MOST_FACTORS else (1.0, [value])


def _product_of(value: Value) -> tuple[float, list[Value]]:
    node = value.node
    if node.name == "multiply":
        return _product(node)
    if node.name == "negate":
        constant, values = factors(node.operands[0], node.scope)
        return -constant, values
    if node.name == "divide":
        divisor = number(node.operands[1])
        if divisor:
            constant, values = factors(node.operands[0], node.scope)
            return constant / divisor, values
    return 1.0, [value]


def _product(node: Node) -> tuple[float, list[Value]]:
    constant, values = 1.0, list[Value]()
    for operand in node.operands:
        constant_factor = number(operand)
        if constant_factor is not None:
            constant *= constant_factor
        elif operand.shape != node.type.shape:  # repeated, so not split
            values.append(operand)
        else:
            inner_constant, inner_values = factors(operand, node.scope)
            constant *= inner_constant
            values += inner_values
    return constant, values
