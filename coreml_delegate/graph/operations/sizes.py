"""Arithmetic of sizes: what is known of integer tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy

from coreml_delegate.graph.node import Value
from coreml_delegate.graph.tensor_types import Dim, TensorType, simplify


def _quotient(x: Any, y: Any) -> Any:
    """Return a quotient without its fraction; None if a sign may be negative, or y may be 0."""
    if not (_is_at_least(x, 0) and _is_at_least(y, 1)):
        return None
    return sympy.floor(sympy.sympify(x) / y)


def _rest(x: Any, y: Any) -> Any:
    return sympy.Mod(x, y) if _is_at_least(x, 0) and _is_at_least(y, 1) else None


def _is_at_least(size: Dim, least: int) -> bool:
    return bool(sympy.sympify(size - least).is_nonnegative)


def _clamped(low: Any, x: Any, high: Any) -> Any:
    return sympy.Min(sympy.Max(low, x), high)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": _quotient,
    "remainder": _rest,
    "maximum": sympy.Max,
    "minimum": sympy.Min,
    "clamp": _clamped,
    "negate": lambda x: -x,
    "abs": sympy.Abs,
    "convert": lambda x: x,
}


def fold(name: str, type: TensorType, *operands: Value) -> tuple[Dim, ...] | None:
    """Return the elements of a result where they are sizes; None where they are not known.

    Args:
        name: Of an elementwise operation.
        type: Of its result.
        operands: Its operands.
    """
    if not type.dtype.is_integer or type.rank > 1 or name not in _FUNCTIONS:
        return None
    parts: list[tuple[Dim, ...]] = []
    for operand in operands:
        if operand.known is None:
            return None
        parts.append(operand.known)
    count = type.shape[0] if type.rank else 1
    if not isinstance(count, int):
        return None
    repeated = [part * count if len(part) == 1 else part for part in parts]
    found = [_FUNCTIONS[name](*elements) for elements in zip(*repeated, strict=True)]
    if any(size is None for size in found):
        return None
    sizes = tuple(simplify(size) for size in found)
    bounds = np.iinfo(type.dtype.numpy if type.dtype.bits < 32 else np.int32)
    least = 0 if type.dtype.is_unsigned else bounds.min
    # What wraps is no size.
    if any(isinstance(size, int) and not least <= size <= bounds.max for size in sizes):
        return None
    return sizes
