"""Analysis of the functions that reductions call: known operations, and forms for whole tensors.

A body is a function of scalars, but is called with tensors: as it consists of operations on each
element, it is traced again with the types of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, to_storage
from coreml_delegate.graph.emitter import Emitter
from coreml_delegate.graph.node import Closure, Value
from coreml_delegate.graph.tensor_types import DType, TensorType

KINDS = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
"""Operations that a body may be, commutative and associative."""

_COMMUTATIVE = frozenset({*KINDS, "equal", "not_equal"})
_COMPARISONS = {
    "EQ": "equal",
    "NE": "not_equal",
    "LT": "less",
    "LE": "less_equal",
    "GT": "greater",
    "GE": "greater_equal",
}
_MIRRORED = {"less": "greater", "less_equal": "greater_equal"}

_ELEMENTWISE = frozenset(  # by name: most of these families are not imported here
    part
    for line in (
        "abs negate sign ceil floor round_nearest_even round_nearest_afz sqrt rsqrt cbrt",
        "exponential exponential_minus_one log log_plus_one sine cosine tan tanh logistic erf",
        "erfc erf_inv asin acos atan sinh cosh asinh acosh atanh square lgamma digamma add",
        "subtract multiply mulhi divide power remainder maximum minimum atan2 clamp select is_nan",
        "is_inf is_finite convert reduce_precision compare equal not_equal less less_equal",
        "greater greater_equal and or xor not shift_left shift_right_logical",
        "shift_right_arithmetic popcnt count_leading_zeros bitcast_convert identity",
        "optimization_barrier constant argument",
    )
    for part in line.split()
)


def known_kinds(body: Closure) -> tuple[str, ...] | None:
    """Return the operation of each result; None if one is not just that of its own operands.

    Args:
        body: Takes accumulators, then as many elements.
    """
    count = len(body.results)
    found: list[str] = []
    for n, result in enumerate(body.results):
        operands = result.node.operands
        own = {body.parameters[n], body.parameters[count + n]}
        if result.node.name not in KINDS or len(operands) != 2 or set(operands) != own:
            return None
        found.append(result.node.name)
    return tuple(found)


def known_extremum(body: Closure) -> str | None:
    """Return ``maximum`` or ``minimum`` if a body keeps the extremum and the first index of it.

    It takes a value and an index, and another value and index, as JAX's argmax and argmin have it.
    """
    if len(body.results) != 2:
        return None
    names = dict(zip(body.parameters, ("value", "index", "other", "other_index"), strict=True))
    forms = tuple(_form(result, names) for result in body.results)
    is_float = body.parameters[0].dtype.is_float
    for kind, wins in (("maximum", "greater(value, other)"), ("minimum", "greater(other, value)")):
        with_nan = _commuted("or", wins, _commuted("not_equal", "value", "value"))
        tie = _commuted("and", _commuted("equal", "value", "other"), "greater(other_index, index)")
        for better in (with_nan, wins):
            expected = (
                f"select({better}, value, other)",
                f"select({_commuted('or', better, tie)}, index, other_index)",
            )
            # Floats without the test for NaN lose it.
            if forms == expected and (better == with_nan or not is_float):
                return kind
    return None


def _form(value: Value, names: Mapping[Value, str]) -> str:
    """Return an expression of a value, equal for operands in another order where that is equal."""
    if value in names:
        return names[value]
    node = value.node
    name = node.name
    parts = [_form(operand, names) for operand in node.operands]
    if name == "compare":
        name = _COMPARISONS[node["direction"]]
    if name in _MIRRORED:
        name, parts = _MIRRORED[name], parts[::-1]
    return _commuted(name, *parts) if name in _COMMUTATIVE else f"{name}({', '.join(parts)})"


def _commuted(name: str, *parts: str) -> str:
    return f"{name}({', '.join(sorted(parts))})"


def trace_body(
    emitter: Emitter, name: str, body: Any, values: Sequence[Value], returns: Any = None
) -> Closure:
    """Return a body of scalars: of an accumulator and an element for each of some values.

    Args:
        emitter: What adds nodes.
        name: For messages.
        body: The function.
        values: The values whose elements it combines.
        returns: Element types of its results; None for those of ``values``.

    Raises:
        GraphError: It returns something else.
    """
    scalars = [TensorType(value.dtype, ()) for value in values]
    closure = emitter.trace(name, body, [*scalars, *scalars])
    wanted = scalars if returns is None else [TensorType(dtype, ()) for dtype in returns]
    closure.check([*scalars, *scalars], wanted)
    return closure


def trace_wide(
    emitter: Emitter, name: str, body: Any, types: Sequence[TensorType], returns: Any = None
) -> Closure:
    """Return the form of a body for tensors, which are combined element by element.

    Args:
        emitter: What adds nodes.
        name: For messages.
        body: A function of scalars.
        types: Of the accumulators, and of the elements.
        returns: Element types of the results; None for those of ``types``.

    Raises:
        GraphError: The body does more than operations on each element.
    """
    closure = emitter.trace(name, body, [*types, *types])
    others = {node.name for node in closure.scope.nodes} - _ELEMENTWISE
    if others:
        raise GraphError(
            f"{name} has to consist of operations on each element",
            got=", ".join(sorted(others)),
        )
    dtypes = [type.dtype for type in types] if returns is None else returns
    closure.check([*types, *types], [types[0].with_dtype(dtype) for dtype in dtypes])
    return closure


def identity_element(kind: str, dtype: DType) -> np.generic:
    """Return what a kind of combination leaves as it is, in the storage dtype."""
    if dtype is DType.BOOL:
        return np.bool_(kind in ("and", "minimum", "multiply"))
    if kind in ("maximum", "minimum"):
        if dtype.is_float:
            number: Any = np.float32(-np.inf if kind == "maximum" else np.inf)
        else:
            narrow = dtype.numpy if dtype.bits < 64 else np.dtype(np.int32)
            bounds = np.iinfo(narrow)
            number = narrow.type(bounds.min if kind == "maximum" else bounds.max)
    else:
        number = dtype.numpy.type({"multiply": 1, "and": 0}.get(kind, 0))
        if kind == "and":
            number = ~number
            if dtype.bits == 64:
                return np.int32(-1)
    stored: np.generic = to_storage(np.asarray(number), dtype).flat[0]
    return stored


def is_identity(kind: str, value: Value) -> bool:
    """Whether a scalar is known to leave everything as it is that is combined with it."""
    node = value.node
    while node.name in ("broadcast_in_dim", "broadcast", "reshape", "identity", "constant"):
        if node.name == "constant":
            return bool(node["array"] == identity_element(kind, value.dtype))
        if node.operands[0].rank:
            return False
        node = node.operands[0].node
    return False


def combine(c: Composer, kind: str, dtype: DType, x: Var, y: Var) -> Var:
    """Return two tensors combined by a known kind; bools are stored as int32.

    Integers are combined modulo 2**32, and uint32 is as ``Composer.ordered`` has it for extrema.
    """
    if dtype is DType.BOOL:
        if kind == "xor":
            return c.mb.abs(x=c.mb.sub(x=x, y=y))
        kind = "maximum" if kind in ("or", "add", "maximum") else "minimum"
    op = {"add": "add", "multiply": "mul", "maximum": "maximum", "minimum": "minimum"}[kind]
    return getattr(c.mb, op)(x=x, y=y)


def is_composable(kind: str, dtype: DType) -> bool:
    """Whether ``combine`` takes it: anything but bitwise operations on integers."""
    return dtype is DType.BOOL or kind not in ("and", "or", "xor")


def call_wide(c: Composer, closure: Closure, values: Sequence[Var]) -> list[Var]:
    """Return what a closure makes of tensors, where bools are stored as int32."""
    given = [
        c.mb.cast(x=var, dtype="bool") if parameter.dtype is DType.BOOL else var
        for parameter, var in zip(closure.parameters, values, strict=True)
    ]
    returned = c.call(closure, given)
    return [
        c.mb.cast(x=var, dtype="int32") if value.dtype is DType.BOOL else var
        for value, var in zip(closure.results, returned, strict=True)
    ]
