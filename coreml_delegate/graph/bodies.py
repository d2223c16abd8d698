"""Analysis of the bodies of reductions: known operations, and traces with tensors.

A body is a function of scalars. As its operations are elementwise, it is also traced with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, cast_bool, in_order, to_storage, wrap
from coreml_delegate.graph.emitter import Emitter
from coreml_delegate.graph.node import Closure, Value, require_elementwise
from coreml_delegate.graph.operations.elementwise import MIRRORED, OPS
from coreml_delegate.graph.tensor_types import DType, TensorType
from coreml_delegate.mil.compose import mb

KINDS = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
"""Commutative and associative operations that a body may be."""

_COMMUTATIVE = frozenset({*KINDS, "equal", "not_equal"})


def known_kinds(body: Closure) -> tuple[str, ...] | None:
    """Return the operation of each result of a body of accumulators, then as many elements.

    None if a result is not ``op(accumulator, element)``.
    """
    count = len(body.results)
    kinds: list[str] = []
    for n, result in enumerate(body.results):
        operands = result.node.operands
        own_parameters = {body.parameters[n], body.parameters[count + n]}
        if result.node.name not in KINDS or len(operands) != 2 or set(operands) != own_parameters:
            return None
        kinds.append(result.node.name)
    return tuple(kinds)


def known_extremum(body: Closure) -> str | None:
    """Return ``maximum`` or ``minimum`` for a body of argmax or argmin (lowest index on ties).

    The body takes a value and an index, and another value and index, as JAX writes it.
    """
    if len(body.results) != 2:
        return None
    names = dict(zip(body.parameters, ("value", "index", "other", "other_index"), strict=True))
    forms = tuple(_form(result, names) for result in body.results)
    is_float = body.parameters[0].dtype.is_float
    for kind, wins in (("maximum", "greater(value, other)"), ("minimum", "greater(other, value)")):
        with_nan = _sorted_call("or", wins, _sorted_call("not_equal", "value", "value"))
        tie = _sorted_call(
            "and", _sorted_call("equal", "value", "other"), "greater(other_index, index)"
        )
        for better in (with_nan, wins):
            expected = (
                f"select({better}, value, other)",
                f"select({_sorted_call('or', better, tie)}, index, other_index)",
            )
            # Without the test, the result would lose a NaN.
            if forms == expected and (better == with_nan or not is_float):
                return kind
    return None


def _form(value: Value, names: Mapping[Value, str]) -> str:
    """Return a value's expression as text, with the operands of commutative operations sorted."""
    if value in names:
        return names[value]
    node = value.node
    name = node.name
    parts = [_form(operand, names) for operand in node.operands]
    if name == "compare":
        direction = node["direction"]
        if direction in ("LT", "LE"):
            direction, parts = MIRRORED[direction], parts[::-1]
        name = OPS[direction]
    return _sorted_call(name, *parts) if name in _COMMUTATIVE else f"{name}({', '.join(parts)})"


def _sorted_call(name: str, *parts: str) -> str:
    return f"{name}({', '.join(sorted(parts))})"


def scalar_types(values: Sequence[Value]) -> list[TensorType]:
    """Return the types of elements of values."""
    return [TensorType(value.dtype, ()) for value in values]


def trace_body(
    emitter: Emitter, name: str, body: Any, types: Sequence[TensorType], returns: Any = None
) -> Closure:
    """Trace a body of an accumulator for each of ``types``, then an element for each.

    It is a function of scalars, also traced with tensors, which it combines element by element.
    Its results have the element types ``returns``, by default those of the accumulators.

    Raises:
        GraphError: It returns other types, or has operations on tensors that are not elementwise.
    """
    closure = emitter.trace(name, body, [*types, *types])
    if types[0].rank:
        require_elementwise(name, closure)
    dtypes = [type.dtype for type in types] if returns is None else returns
    closure.check([*types, *types], [types[0].with_dtype(dtype) for dtype in dtypes])
    return closure


def identity_element(kind: str, dtype: DType) -> np.generic:
    """Return e with ``kind(x, e) == x`` for every x, in the storage dtype."""
    if dtype is DType.BOOL:
        return np.bool_(kind in ("and", "minimum", "multiply"))
    number: Any = {"multiply": 1, "and": -1}.get(kind, 0)
    if kind in ("maximum", "minimum"):
        narrow = dtype.numpy if dtype.bits < 64 else np.dtype(np.int32)
        least, most = (-np.inf, np.inf) if dtype.is_float else _bounds(narrow)
        number = least if kind == "maximum" else most
    stored: np.generic = to_storage(np.asarray(number), dtype).flat[0]
    return stored


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def is_identity(kind: str, value: Value) -> bool:
    """Whether a scalar is known to be the identity element of ``kind``."""
    node = value.node
    while node.name in ("broadcast_in_dim", "broadcast", "reshape", "identity", "constant"):
        if node.name == "constant":
            return bool(node["array"] == identity_element(kind, value.dtype))
        if node.operands[0].rank:
            return False
        node = node.operands[0].node
    return False


def combine(kind: str, dtype: DType, x: Var, y: Var) -> Var:
    """Return ``kind(x, y)``, element by element; bools are stored as int32.

    Integers are combined modulo 2**32; for extrema, uint32 comes from ``Composer.ordered``.
    """
    if dtype is DType.BOOL:
        if kind == "xor":
            return mb.abs(x=mb.sub(x=x, y=y))
        kind = "maximum" if kind in ("or", "add", "maximum") else "minimum"
    op = {"add": "add", "multiply": "mul", "maximum": "maximum", "minimum": "minimum"}[kind]
    return getattr(mb, op)(x=x, y=y)


def by_kind(kind: str, dtype: DType, function: Callable[..., Var], *values: Var) -> Var:
    """Apply a function of a kind to MIL values: extrema in the order of ``dtype``, others wrap."""
    if kind in ("maximum", "minimum"):
        return in_order(function, dtype, *values)
    return wrap(function(*values), dtype)


def is_composable(kind: str, dtype: DType) -> bool:
    """Whether ``combine`` has this kind: all but the bitwise operations on integers."""
    return dtype is DType.BOOL or kind not in ("and", "or", "xor")


def call_wide(c: Composer, closure: Closure, values: Sequence[Var]) -> list[Var]:
    """Call a closure with tensors, and return its results; bools are stored as int32."""
    arguments = [
        cast_bool(parameter, var, "bool")
        for parameter, var in zip(closure.parameters, values, strict=True)
    ]
    returned = c.call(closure, arguments)
    return [
        cast_bool(value, var, "int32") for value, var in zip(closure.results, returned, strict=True)
    ]
