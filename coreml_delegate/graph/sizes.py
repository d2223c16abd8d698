"""Symbolic arithmetic of integer tensors whose elements are sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy

from coreml_delegate.graph.node import Value
from coreml_delegate.graph.tensor_types import Dim, DType, TensorType, simplify

MOST_KNOWN = 16
"""The largest number of elements that are kept for shape arithmetic."""


def _quotient(x: Any, y: Any) -> Any:
    """Return ``floor(x / y)``; None if an operand may be negative, or y may be 0."""
    if not (_is_at_least(x, 0) and _is_at_least(y, 1)):
        return None
    return sympy.floor(sympy.sympify(x) / y)


def _remainder(x: Any, y: Any) -> Any:
    return sympy.Mod(x, y) if _is_at_least(x, 0) and _is_at_least(y, 1) else None


def _is_at_least(size: Dim, least: int) -> bool:
    return bool(sympy.sympify(size - least).is_nonnegative)


def _clamp(low: Any, x: Any, high: Any) -> Any:
    return sympy.Min(sympy.Max(low, x), high)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": _quotient,
    "remainder": _remainder,
    "maximum": sympy.Max,
    "minimum": sympy.Min,
    "clamp": _clamp,
    "negate": lambda x: -x,
    "abs": sympy.Abs,
    "convert": lambda x: x,
}
"""Functions of sizes by elementwise operation; their results are None if they are no sizes."""


def fold(name: str, type: TensorType, *operands: Value) -> tuple[Dim, ...] | None:
    """Return the elements of an elementwise operation's result if they are sizes, else None."""
    if not type.dtype.is_integer or type.rank > 1 or name not in FUNCTIONS:
        return None
    parts: list[tuple[Dim, ...]] = []
    for operand in operands:
        if operand.elements is None:
            return None
        parts.append(operand.elements)
    count = type.shape[0] if type.rank else 1
    if not isinstance(count, int):
        return None
    repeated = [part * count if len(part) == 1 else part for part in parts]
    expressions = [FUNCTIONS[name](*elements) for elements in zip(*repeated, strict=True)]
    if any(size is None for size in expressions):
        return None
    sizes = tuple(simplify(size) for size in expressions)
    bounds = np.iinfo(type.dtype.numpy if type.dtype.bits < 32 else np.int32)
    least = 0 if type.dtype.is_unsigned else bounds.min
    # A number that wraps is not a size.
    if any(isinstance(size, int) and not least <= size <= bounds.max for size in sizes):
        return None
    return sizes


def known_elements(
    function: Callable[..., Any], *values: Value, dtype: DType | None = None
) -> tuple[Dim, ...] | None:
    """Return the elements of an integer result of at most 16, which may be a shape, or None.

    The function takes an object array for each value, and returns the array of the result, whose
    element type is ``dtype``, by default that of the first value.
    """
    element = dtype or values[0].dtype
    if not element.is_integer:
        return None
    arrays: list[Any] = []
    for value in values:
        if value.elements is None or not value.type.is_static:
            return None
        array = np.empty(len(value.elements), object)
        array[:] = value.elements
        arrays.append(array.reshape(value.type.static_shape))
    result = np.asarray(function(*arrays), object)
    return tuple(result.reshape(-1)) if result.size <= MOST_KNOWN else None
