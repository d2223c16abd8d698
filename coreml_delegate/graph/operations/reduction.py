"""Reductions and cumulative reductions along axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.bodies import (
    by_kind,
    call_wide,
    combine,
    identity_element,
    is_composable,
    is_identity,
    known_extremum,
    known_kinds,
    scalar_types,
    trace_body,
)
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, ordered, wrap
from coreml_delegate.graph.emitter import (
    Emitter,
    normalize_axes,
    normalize_axis,
    operation,
    same_shape,
)
from coreml_delegate.graph.node import Node, Value, as_tuple
from coreml_delegate.graph.operations.axes import (
    around_axis,
    join,
    require_few_axes,
    reshape,
    transpose,
)
from coreml_delegate.graph.operations.integers import INT_MIN
from coreml_delegate.graph.tensor_types import ALL, BOOLEANS, INTEGERS, NUMBERS, DType, TensorType
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import scan, take

Body = Callable[..., Any]

_METHODS = {
    "add": "reduce_sum",
    "multiply": "reduce_product",
    "maximum": "reduce_max",
    "minimum": "reduce_min",
    "and": "reduce_and",
    "or": "reduce_or",
    "xor": "reduce_xor",
}
_OPS = {
    "add": "reduce_sum",
    "multiply": "reduce_prod",
    "maximum": "reduce_max",
    "minimum": "reduce_min",
}


def _reduction(kind: str) -> Callable[[Composer, Node, Var], Var]:
    def compose(c: Composer, node: Node, x: Var) -> Var:
        dtype = node.type.dtype
        if x is None:
            return c.full(identity_element(kind, dtype), node.type)

        def reduce(x: Var, axes: list[int]) -> Var:
            if dtype is DType.BOOL:
                return _reduce_bools(kind, x, axes)
            return by_kind(kind, dtype, lambda x: getattr(mb, _OPS[kind])(x=x, axes=axes), x)

        type = node.types[0]
        if type.rank <= MOST_AXES:
            return reduce(x, list(node["dimensions"]))
        for axis in sorted(node["dimensions"], reverse=True):
            shape, middle = around_axis(type, axis)
            x = reduce(c.reshape(x, shape), [middle])
            type = TensorType(type.dtype, type.shape[:axis] + type.shape[axis + 1 :])
        return c.reshape(x, node.type.shape)

    return compose


def _reduce_bools(kind: str, x: Var, axes: list[int]) -> Var:
    if kind == "xor":
        count = mb.reduce_sum(x=mb.cast(x=x, dtype="int32"), axes=axes)
        return mb.not_equal(x=mb.mod(x=count, y=np.int32(2)), y=np.int32(0))
    op = mb.reduce_max if kind in ("or", "maximum") else mb.reduce_min
    return mb.cast(x=op(x=mb.cast(x=x, dtype="fp32"), axes=axes), dtype="bool")


def _compose_reduce(c: Composer, node: Node, *operands: Var) -> tuple[Var, ...]:
    """Reduce by a tree: combine pairs of rows 2n and 2n + 1 until there is only one row."""
    count = len(node.results)
    shape, dimensions = node.types[0].shape, node["dimensions"]
    result_shape = node.results[0].shape
    if operands[0] is None and len(operands) == count:
        return (c.full(identity_element(node["kind"], node.type.dtype), node.type),)
    initial = [c.broadcast(var, (1, *result_shape)) for var in operands[count:]]
    if operands[0] is None:
        return tuple(reshape(c, var, (1, *result_shape), result_shape) for var in initial)
    other_axes = [axis for axis in range(len(shape)) if axis not in dimensions]
    row_count = math.prod(int(shape[axis]) for axis in dimensions)
    rows: list[Var] = []
    for var in operands[:count]:
        moved, sizes = transpose(c, var, shape, [*dimensions, *other_axes])
        rows.append(reshape(c, moved, sizes, (row_count, *result_shape)))
    while row_count > 1:
        even = row_count - row_count % 2
        halves = [take(row, 0, n, even, 2) for n in (0, 1) for row in rows]
        pairs = call_wide(c, node.closures[f"pairs_of_{row_count}"], halves)
        if row_count % 2:
            # The last row has no partner, and is appended.
            pairs = [join([p, take(r, 0, even)], 0) for p, r in zip(pairs, rows, strict=True)]
        rows, row_count = pairs, even // 2 + row_count % 2
    if initial:
        rows = call_wide(c, node.closures["initial"], [*initial, *rows])
    return tuple(reshape(c, row, (1, *result_shape), result_shape) for row in rows)


def _extremum_index(op: str) -> Callable[[Composer, Node, Var], Var]:
    def compose(c: Composer, node: Node, x: Var) -> Var:
        axis, type = node["dimension"], node.types[0]
        x = ordered(x, type.dtype)
        if type.rank > MOST_AXES:
            shape, axis = around_axis(type, axis)
            x = c.reshape(x, shape)
        index = wrap(getattr(mb, op)(x=x, axis=axis), node.type.dtype)
        return index if type.rank <= MOST_AXES else c.reshape(index, node.type.shape)

    return compose


def compose_cumulative(
    c: Composer, kind: str, type: TensorType, x: Var, axis: int, reverse: bool
) -> Var:
    """Return a cumulative sum, product or extremum along an axis; bools are stored as int32."""
    if type.rank <= MOST_AXES:
        return _cumulate(kind, type.dtype, x, axis, reverse)
    shape, middle = around_axis(type, axis)
    return c.reshape(_cumulate(kind, type.dtype, c.reshape(x, shape), middle, reverse), type.shape)


def _cumulate(kind: str, dtype: DType, x: Var, axis: int, reverse: bool) -> Var:
    if kind == "add":
        return wrap(mb.cumsum(x=x, axis=axis, reverse=reverse), dtype)
    identity = identity_element(kind, dtype)
    if kind in ("maximum", "minimum") and dtype is DType.UINT32:
        # As ``ordered``, which flips the highest bit.
        identity = np.int32(int(identity) ^ int(INT_MIN))
    function = functools.partial(combine, kind, dtype)
    return by_kind(kind, dtype, lambda x: scan(x, axis, function, identity, reverse=reverse), x)


def _cumulative(kind: str) -> Callable[[Composer, Node, Var], Var]:
    def compose(c: Composer, node: Node, x: Var) -> Var:
        return compose_cumulative(c, kind, node.type, x, node["dimension"], node["reverse"])

    return compose


class Reduction(Emitter):
    """Reductions and cumulative reductions along axes.

    ``dimensions`` are the axes that the result lacks; None reduces over all axes.
    """

    @operation(ALL, _compose_reduce, moves_data=True)
    def reduce(
        self,
        values: Value | Sequence[Value],
        initial_values: Value | Sequence[Value],
        dimensions: int | Sequence[int] | None,
        body: Body,
    ) -> Any:
        """Return values combined along axes by a function.

        A body of a single operation (sum, product, maximum, minimum, and, or, xor) becomes the
        reduction of that name. A body that keeps an extremum and its index, over values and an
        ``iota``, becomes ``arg_max`` or ``arg_min``. Other bodies are called with tensors, about
        log2(number of elements) times: they have to be associative and elementwise.

        Args:
            values: Tensors of one shape.
            initial_values: A scalar for each tensor, combined before its first element.
            dimensions: The axes.
            body: Takes an accumulator for each tensor, then an element for each; returns the
                accumulators.

        Returns:
            The result, or a tuple of results if ``values`` is a sequence.

        Raises:
            GraphError: Shapes or types that do not fit, or a body that cannot be called on tensors.
        """
        tensors, initial = as_tuple(values), as_tuple(initial_values)
        check_initial("reduce", tensors, initial)
        axes = self._axes(tensors[0], dimensions)
        scalar = trace_body(self, "body of reduce", body, scalar_types(tensors))
        results = self._reduce_known(scalar, tensors, initial, axes)
        if results is None:
            results = self._reduce_by_body(body, tensors, initial, axes)
        return results[0] if isinstance(values, Value) else results

    def _reduce_known(
        self, body: Any, tensors: Sequence[Value], initial: Sequence[Value], axes: tuple[int, ...]
    ) -> tuple[Value, ...] | None:
        kinds = known_kinds(body)
        if kinds is not None:
            reduced = [
                getattr(self, _METHODS[kind])(x, axes)
                for kind, x in zip(kinds, tensors, strict=True)
            ]
            return tuple(
                x if is_identity(kind, first) else self._call(kind, x, first)
                for kind, x, first in zip(kinds, reduced, initial, strict=True)
            )
        kind = known_extremum(body)
        if kind is None or not _is_search(kind, tensors, initial, axes):
            return None
        search = self.arg_max if kind == "maximum" else self.arg_min
        value = self._emit_reduction(kind, tensors[0], axes)
        return value, search(tensors[0], axes[0], tensors[1].dtype)

    def _reduce_by_body(
        self,
        body: Body,
        tensors: Sequence[Value],
        initial: Sequence[Value],
        axes: tuple[int, ...],
        kind: str | None = None,
    ) -> tuple[Value, ...]:
        require_few_axes("reduce", tensors[0].type)
        shape = tensors[0].shape
        if not all(isinstance(shape[axis], int) for axis in axes):
            raise GraphError(
                "reduce: with this body, the sizes of the axes have to be fixed",
                got=str(tensors[0].type),
            )
        result_shape = tuple(size for axis, size in enumerate(shape) if axis not in axes)

        def trace_rows(rows: int) -> Any:
            types = [TensorType(x.dtype, (rows, *result_shape)) for x in tensors]
            return trace_body(self, "body of reduce", body, types)

        row_count = math.prod(int(shape[axis]) for axis in axes)
        closures: dict[str, Any] = {}
        while row_count > 1:
            closures[f"pairs_of_{row_count}"] = trace_rows(row_count // 2)
            row_count = row_count // 2 + row_count % 2
        if initial:
            closures["initial"] = trace_rows(1)
        return self.emit(
            "reduce",
            (*tensors, *initial),
            [TensorType(x.dtype, result_shape) for x in tensors],
            closures=closures,
            dimensions=axes,
            kind=kind,
        )

    @operation(NUMBERS, _reduction("add"))
    def reduce_sum(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return the sum along axes; integers wrap."""
        return self._emit_reduction("add", x, dimensions)

    @operation(NUMBERS, _reduction("multiply"))
    def reduce_product(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return the product along axes; integers wrap."""
        return self._emit_reduction("multiply", x, dimensions)

    @operation(ALL, _reduction("maximum"))
    def reduce_max(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return the largest element along axes; NaN beside a NaN, the least number without any."""
        return self._emit_reduction("maximum", x, dimensions)

    @operation(ALL, _reduction("minimum"))
    def reduce_min(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return the least element along axes; NaN beside a NaN, the largest number without any."""
        return self._emit_reduction("minimum", x, dimensions)

    @operation(BOOLEANS | INTEGERS, _reduction("and"))
    def reduce_and(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return whether all elements along axes are true; of integers, the bitwise and."""
        return self._emit_reduction("and", x, dimensions)

    @operation(BOOLEANS | INTEGERS, _reduction("or"))
    def reduce_or(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return whether any element along axes is true; of integers, the bitwise or."""
        return self._emit_reduction("or", x, dimensions)

    @operation(BOOLEANS | INTEGERS, _reduction("xor"))
    def reduce_xor(self, x: Value, dimensions: int | Sequence[int] | None = None) -> Value:
        """Return the exclusive or along axes: of bools, whether an odd number is true."""
        return self._emit_reduction("xor", x, dimensions)

    @operation(ALL, _extremum_index("reduce_argmax"), moves_data=True)
    def arg_max(self, x: Value, dimension: int, dtype: Any = "int32") -> Value:
        """Return the index of the first largest element along an axis; NaN is the largest."""
        return self._index_of("arg_max", x, dimension, dtype)

    @operation(ALL, _extremum_index("reduce_argmin"), moves_data=True)
    def arg_min(self, x: Value, dimension: int, dtype: Any = "int32") -> Value:
        """Return the index of the first smallest element along an axis; NaN is the smallest."""
        return self._index_of("arg_min", x, dimension, dtype)

    @operation(NUMBERS, _cumulative("add"))
    def cumulative_sum(self, x: Value, dimension: int, reverse: bool = False) -> Value:
        """Return ``y[i] = x[0] + ... + x[i]`` along an axis; from the end if ``reverse``."""
        return self._emit_cumulative("cumulative_sum", x, dimension, reverse)

    @operation(NUMBERS, _cumulative("multiply"))
    def cumulative_product(self, x: Value, dimension: int, reverse: bool = False) -> Value:
        """Return ``y[i] = x[0] * ... * x[i]`` along an axis; from the end if ``reverse``."""
        return self._emit_cumulative("cumulative_product", x, dimension, reverse)

    @operation(NUMBERS, _cumulative("maximum"))
    def cumulative_max(self, x: Value, dimension: int, reverse: bool = False) -> Value:
        """Return ``y[i] = max(x[0], ..., x[i])`` along an axis; from the end if ``reverse``."""
        return self._emit_cumulative("cumulative_max", x, dimension, reverse)

    @operation(NUMBERS, _cumulative("minimum"))
    def cumulative_min(self, x: Value, dimension: int, reverse: bool = False) -> Value:
        """Return ``y[i] = min(x[0], ..., x[i])`` along an axis; from the end if ``reverse``."""
        return self._emit_cumulative("cumulative_min", x, dimension, reverse)

    def _axes(self, x: Value, dimensions: int | Sequence[int] | None) -> tuple[int, ...]:
        if dimensions is None:
            return tuple(range(x.rank))
        return tuple(sorted(normalize_axes(dimensions, x.rank, "dimensions")))

    def _emit_reduction(self, kind: str, x: Value, dimensions: int | Sequence[int] | None) -> Value:
        axes = self._axes(x, dimensions)
        if not axes:
            return x
        if not is_composable(kind, x.dtype):

            def body(total: Value, element: Value) -> Value:
                return self._call(kind, total, element)

            return self._reduce_by_body(body, (x,), (), axes, kind)[0]
        shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        return self.emit(_METHODS[kind], (x,), TensorType(x.dtype, shape), dimensions=axes)

    def _index_of(self, name: str, x: Value, dimension: int, dtype: Any) -> Value:
        axis = normalize_axis(dimension, x.rank, "dimension")
        index = DType.of(dtype)
        if not index.is_integer:
            raise GraphError(f"{name}: indices are integers", got=index.label)
        if x.shape[axis] == 0:
            raise GraphError(f"{name}: no element to choose", got=str(x.type))
        shape = tuple(size for n, size in enumerate(x.shape) if n != axis)
        return self.emit(name, (x,), TensorType(index, shape), dimension=axis)

    def _emit_cumulative(self, name: str, x: Value, dimension: int, reverse: bool) -> Value:
        axis = normalize_axis(dimension, x.rank, "dimension")
        if name != "cumulative_sum" and not isinstance(x.shape[axis], int):
            raise GraphError(f"{name}: the size of the axis has to be fixed", got=str(x.type))
        return self.emit(name, (x,), x.type, dimension=axis, reverse=bool(reverse))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call an operation of another family by its name."""
        method = getattr(self, name, None) or getattr(self, f"{name}_")
        return method(*arguments)


def check_initial(name: str, tensors: Sequence[Value], initial: Sequence[Value]) -> None:
    """Refuse tensors of different shapes, and initial values of another type or number.

    Raises:
        GraphError: A wrong tensor or initial value; names the operation.
    """
    if not tensors or len(initial) != len(tensors):
        raise GraphError(
            f"{name}: there is one initial value for each tensor",
            got=f"{len(tensors)} tensors and {len(initial)} initial values",
        )
    if not all(same_shape(x.shape, tensors[0].shape) for x in tensors):
        raise GraphError(
            f"{name}: shapes of the tensors differ", got=" and ".join(str(x.type) for x in tensors)
        )
    for x, first in zip(tensors, initial, strict=True):
        if first.type != TensorType(x.dtype, ()):
            raise GraphError(
                f"{name}: an initial value needs the element type of its tensor, and rank 0",
                got=str(first.type),
                expected=str(TensorType(x.dtype, ())),
            )


def _is_search(
    kind: str, tensors: Sequence[Value], initial: Sequence[Value], axes: tuple[int, ...]
) -> bool:
    """Whether this is arg_max or arg_min: values, and iota along the only axis."""
    index = tensors[1].node
    return (
        len(axes) == 1
        and index.name == "iota"
        and index["dimension"] == axes[0]
        and tensors[0].shape[axes[0]] != 0
        and tensors[0].dtype is not DType.BOOL
        and is_identity(kind, initial[0])
        and is_identity("add", initial[1])
    )
