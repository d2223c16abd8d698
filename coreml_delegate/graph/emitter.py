"""``Emitter``, the base class of all families of operations, and their common shape checks."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import (
    Closure,
    Compose,
    Node,
    OperationRecord,
    Scope,
    Value,
    as_tuple,
)
from coreml_delegate.graph.sizes import fold
from coreml_delegate.graph.tensor_types import ALL, FLOATS, Dim, DType, TensorType, simplify
from coreml_delegate.mil.compose import mb

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
Self = TypeVar("Self", bound="Emitter")

OPERATIONS: dict[str, OperationRecord] = {}
"""Every operation by name."""

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_COMPLEX = "Core ML has no complex numbers"
_LINEAR_ALGEBRA = "Core ML has no decompositions or solvers of matrices"
_TRAINING = "models are for inference; use batch_norm_inference"
REFUSED: dict[str, str] = {
    "complex": _COMPLEX,
    "real": _COMPLEX,
    "imag": _COMPLEX,
    "conj": _COMPLEX,
    "fft": _COMPLEX,
    "batch_norm_training": _TRAINING,
    "batch_norm_grad": _TRAINING,
    "cholesky": _LINEAR_ALGEBRA,
    "triangular_solve": _LINEAR_ALGEBRA,
    "rng": "its numbers depend on the implementation; rng_bit_generator is exact",
}
"""StableHLO operations that the builder lacks, with the reason."""

Method = Callable[Concatenate[Self, Parameters], Returned]


def operation(
    dtypes: Iterable[DType],
    compose: Compose | None = None,
    *,
    moves_data: bool = False,
    is_elementwise: bool = False,
) -> Callable[[Method[Self, Parameters, Returned]], Method[Self, Parameters, Returned]]:
    """Return a decorator that makes a method of the builder an operation, with its record.

    The method is the shape rule: it checks its arguments and calls ``self.emit`` with the type of
    the result, or calls other operations. Before the call, every value among its arguments has to
    belong to this graph, and the first value's element type to ``dtypes``.

    Args:
        dtypes: Element types that the first operand may have.
        compose: Makes MIL of a node; None for an operation that is made of other operations.
        moves_data: See ``OperationRecord``.
        is_elementwise: See ``OperationRecord``.
    """

    def decorate(method: Method[Self, Parameters, Returned]) -> Method[Self, Parameters, Returned]:
        name = method.__name__.removesuffix("_")
        summary = (inspect.getdoc(method) or "").partition("\n")[0]
        record = OperationRecord(
            name, frozenset(dtypes), compose, summary, moves_data, is_elementwise
        )
        OPERATIONS[name] = record

        @functools.wraps(method)
        def checked(self: Self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            self.check_operands(record, [*args, *kwargs.values()])
            return method(self, *args, **kwargs)

        return checked

    return decorate


def elementwise(
    dtypes: Iterable[DType], compose: Compose
) -> Callable[[Method[Self, Parameters, Returned]], Method[Self, Parameters, Returned]]:
    """Return ``operation`` for a method that is elementwise; see ``OperationRecord``."""
    return operation(dtypes, compose, is_elementwise=True)


def mil_op(name: str, **arguments: float) -> Compose:
    """Return a compose function: a MIL op of ``x``, and arguments in the result's element type."""

    def compose(_: Composer, node: Node, x: Var) -> Var:
        number = node.type.dtype.storage_numpy.type
        typed = {argument: number(value) for argument, value in arguments.items()}
        return getattr(mb, name)(x=x, **typed)

    return compose


def unary(
    name: str,
    compose: Compose,
    result: str,
    *,
    dtypes: Iterable[DType] = FLOATS,
    is_test: bool = False,
) -> Callable[[Any, Value], Value]:
    """Return a method ``(self, x)`` that is an elementwise operation.

    Its docstring describes the ``result``, which is bool for a test, else of the type of ``x``.
    """

    def method(self: Emitter, x: Value) -> Value:
        return self.emit_elementwise(name, x, dtype=DType.BOOL if is_test else None)

    method.__name__, method.__doc__ = name, f"Return {result}."
    return elementwise(dtypes, compose)(method)


class Emitter:
    """Adds nodes to the scope that is being built.

    Attributes:
        scope: The scope of new nodes.
    """

    def __init__(self) -> None:
        self.scope = Scope()

    def check_operands(self, record: OperationRecord, arguments: Iterable[Any]) -> None:
        """Refuse values of other graphs or scopes, and an element type that the operation lacks.

        Raises:
            GraphError: A wrong operand; names the operation.
        """
        values = list(_values_in(arguments))
        for value in values:
            if not self.scope.sees(value.node.scope):
                raise GraphError(
                    f"{record.name}: an operand belongs to another graph, or to a closure that "
                    "is complete",
                    got=repr(value),
                )
        if values and values[0].dtype not in record.dtypes:
            raise GraphError(
                f"{record.name} does not take this element type",
                got=values[0].dtype.label,
                expected=", ".join(d.label for d in DType if d in record.dtypes),
            )

    def emit(
        self,
        name: str,
        operands: Sequence[Value],
        types: TensorType | Sequence[TensorType],
        /,
        *,
        closures: Mapping[str, Closure] | None = None,
        elements: tuple[Dim, ...] | None = None,
        **attributes: Any,
    ) -> Any:
        """Add a node.

        Args:
            name: The operation, a key of ``OPERATIONS``.
            operands: Values of this graph.
            types: Type of the result, or a sequence of types for several results.
            closures: Closures by parameter name.
            elements: Elements of the result, if they are sizes; see ``Value``.
            attributes: Attributes for the operation's ``compose``.

        Returns:
            The result, or a tuple of results if ``types`` is a sequence.
        """
        node = Node(OPERATIONS[name], tuple(operands), attributes, closures or {}, self.scope)
        several = not isinstance(types, TensorType)
        result_types = tuple(types) if not isinstance(types, TensorType) else (types,)
        node.results = tuple(Value(node, n, t, elements) for n, t in enumerate(result_types))
        node.source = _calling_line()
        self.scope.nodes.append(node)
        return node.results if several else node.results[0]

    def emit_elementwise(
        self, name: str, *operands: Value, dtype: DType | None = None, **attributes: Any
    ) -> Value:
        """Add a node whose result has the broadcast shape of operands of one element type.

        The result has their element type too, or ``dtype``.

        Raises:
            GraphError: Element types or shapes differ.
        """
        require_same_dtype(name, *operands)
        shape = broadcast_shapes(name, *(operand.type for operand in operands))
        type = TensorType(dtype or operands[0].dtype, shape)
        return self.emit(name, operands, type, elements=fold(name, type, *operands), **attributes)

    def trace(
        self, name: str, function: Callable[..., Any], types: Sequence[TensorType]
    ) -> Closure:
        """Trace a Python function into a closure, by a call with a new value for each type.

        The function returns a value, or a sequence of values; ``name`` is for messages.

        Raises:
            GraphError: The function returns something else.
        """
        outer, self.scope = self.scope, Scope(self.scope)
        try:
            parameters = tuple(self.emit("argument", (), t) for t in types)
            results = as_tuple(function(*parameters))
            for result in results:
                if not isinstance(result, Value):
                    raise GraphError(
                        f"{name!r} has to return values of the graph", got=type(result).__name__
                    )
                if not self.scope.sees(result.node.scope):
                    raise GraphError(f"{name!r} returns a value of another graph", got=repr(result))
            return Closure(name, self.scope, parameters, results)
        finally:
            self.scope = outer


def _calling_line() -> str:
    """Return the line of the user's code that calls the builder, as ``model.py:3``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _compose_argument(*_: Any) -> Any:
    raise AssertionError("Composer.call binds arguments")


OPERATIONS["argument"] = OperationRecord(
    "argument", ALL, _compose_argument, "A parameter of a closure.", is_elementwise=True
)


def _values_in(arguments: Iterable[Any]) -> Iterator[Value]:
    for argument in arguments:
        if isinstance(argument, Value):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _values_in(argument)


def normalize_axis(axis: int, rank: int, what: str = "axis") -> int:
    """Return an axis as 0 or more; a negative axis counts from the end.

    Raises:
        GraphError: There is no such axis.
    """
    if not -rank <= axis < rank:
        raise GraphError(f"no such {what}", got=str(axis), expected=f"{-rank} to {rank - 1}")
    return axis % rank


def normalize_axes(axes: int | Sequence[int], rank: int, what: str = "axes") -> tuple[int, ...]:
    """Return axes as 0 or more, in the same order.

    Raises:
        GraphError: There is no such axis, or an axis repeats.
    """
    numbers = (axes,) if isinstance(axes, int | np.integer) else tuple(axes)
    normalized = tuple(normalize_axis(int(axis), rank, what) for axis in numbers)
    if len(set(normalized)) != len(normalized):
        raise GraphError(f"{what} repeat", got=str(list(numbers)))
    return normalized


def same_size(one: Dim, other: Dim) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return sympy.expand(one - other) == 0


def same_shape(one: Sequence[Dim], other: Sequence[Dim]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(one) == len(other) and all(map(same_size, one, other))


def broadcast_shapes(name: str, *types: TensorType) -> tuple[Dim, ...]:
    """Return the shape of an elementwise result.

    Operands have the same rank, with sizes that are equal or 1, or rank 0.

    Raises:
        GraphError: Sizes differ.
    """
    shapes = [t.shape for t in types if t.rank]
    if not shapes:
        return ()
    rank = len(shapes[0])
    shape: list[Dim] = []
    for sizes in zip(*shapes, strict=False):
        long_sizes = [size for size in sizes if size != 1]
        if not all(same_size(size, long_sizes[0]) for size in long_sizes[1:]):
            break
        shape.append(long_sizes[0] if long_sizes else 1)
    if len(shape) != rank or any(len(sizes) != rank for sizes in shapes):
        raise GraphError(
            f"{name}: shapes of operands differ",
            got=" and ".join(str(t) for t in types),
            expected="equal shapes, or sizes of 1 and rank 0, which are repeated",
        )
    return tuple(simplify(size) for size in shape)


def require_same_dtype(name: str, *values: Value) -> None:
    """Refuse operands of different element types.

    Raises:
        GraphError: Types differ; names the operation and the types.
    """
    if len({value.dtype for value in values}) > 1:
        raise GraphError(
            f"{name}: element types of operands differ",
            got=" and ".join(value.dtype.label for value in values),
            expected=f"all {values[0].dtype.label}",
            remedy="Use convert",
        )
