"""Tensor contraction: sums of products along axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, convert
from coreml_delegate.graph.emitter import Emitter, normalize_axes, operation, same_size
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.axes import reshape, transpose
from coreml_delegate.graph.tensor_types import ALL, Dim, DType, TensorType, product
from coreml_delegate.mil.compose import mb

Axes = tuple[int, ...]

_MOST_AXES = 5


def product_dtype(name: str, x: Value, y: Value, preferred: Any) -> DType:
    """Return the element type of sums of products.

    Raises:
        GraphError: Types differ without a preferred type, or it is an integer for floats.
    """
    if preferred is None:
        if x.dtype is not y.dtype:
            raise GraphError(
                f"{name}: element types of operands differ",
                got=f"{x.dtype.label} and {y.dtype.label}",
                expected="equal types, or preferred_dtype",
            )
        return x.dtype
    dtype = DType.of(preferred)
    if not dtype.is_float and (x.dtype.is_float or y.dtype.is_float):
        raise GraphError(
            f"{name}: the products of floats are floats",
            got=f"preferred_dtype={dtype.label} for {x.dtype.label} and {y.dtype.label}",
            remedy="Convert the result with convert",
        )
    return dtype


def sum_dtype(operands: Sequence[DType], result: DType) -> DType:
    """Return the accumulation type: int32 for integers, float16 if all types are, else float32."""
    if result.is_integer:
        return DType.INT32
    storage_dtypes = {dtype.storage_dtype for dtype in (*operands, result)}
    return DType.FLOAT16 if storage_dtypes == {"fp16"} else DType.FLOAT32


class _Side:
    """An operand: its MIL value, its shape, and the roles of its axes in the product."""

    def __init__(
        self, var: Var, shape: Sequence[Dim], batching: Sequence[int], contracting: Sequence[int]
    ) -> None:
        self.var = var
        self.shape = tuple(shape)
        self.batching = list(batching)
        self.contracting = list(contracting)
        summed_axes = (*batching, *contracting)
        self.free = [axis for axis in range(len(self.shape)) if axis not in summed_axes]

    def sizes(self, axes: Sequence[int]) -> list[Dim]:
        return [self.shape[axis] for axis in axes]

    def moves(self, order: Sequence[int]) -> bool:
        """Whether a transpose to this order of axes moves elements; False for a constant."""
        long_axes = [axis for axis in order if self.shape[axis] != 1]
        return self.var.val is None and long_axes != sorted(long_axes)

    @property
    def long_free(self) -> list[int]:
        """The free axes (neither batching nor contracting) of more than one element."""
        return [axis for axis in self.free if self.shape[axis] != 1]

    def order(self, turn: bool, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Return all axes: batching, first, second; with ``turn``, second before first."""
        return [*self.batching, *(second if turn else first), *(first if turn else second)]

    def is_better_turned(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether only the order with ``second`` before ``first`` needs no transpose."""
        moves_unturned = self.moves(self.order(False, first, second))
        return moves_unturned and not self.moves(self.order(True, first, second))

    def arrange(self, c: Composer, order: Sequence[int], new_shape: Sequence[Dim]) -> Var:
        """Return the operand with its axes in an order, reshaped."""
        transposed, shape = transpose(c, self.var, self.shape, order)
        return reshape(c, transposed, shape, new_shape)


def _compose_dot_general(c: Composer, node: Node, x: Var, y: Var) -> Var:
    result = node.type
    if x is None or y is None:
        return c.full(0, result)
    dtypes = [operand.dtype for operand in node.operands]
    accumulator = sum_dtype(dtypes, result.dtype)
    x, y = (convert(var, dtype, accumulator) for var, dtype in zip((x, y), dtypes, strict=True))
    batching, contracting = node["batching"], node["contracting"]
    left = _Side(x, node.types[0].shape, batching[0], contracting[0])
    right = _Side(y, node.types[1].shape, batching[1], contracting[1])
    _order_contraction(left, right)
    if not left.contracting:
        product, shape = _outer(c, left, right)
    elif accumulator is not DType.INT32 and _is_linear(left, right):
        product, shape = _linear(c, left, right)
    elif accumulator is not DType.INT32 and _is_linear(right, left) and not right.long_free:
        product, shape = _linear(c, right, left)
    else:
        product, shape = _matmul(c, left, right)
    return convert(reshape(c, product, shape, result.shape), accumulator, result.dtype)


def _order_contraction(left: _Side, right: _Side) -> None:
    """Sort the contracted axes by one of the operands, so that the fewest operands move."""
    pairs = list(zip(left.contracting, right.contracting, strict=True))

    def moves(order: list[tuple[int, int]]) -> int:
        return sum(
            side.moves([*side.batching, *side.free, *(pair[n] for pair in order)])
            and side.moves([*side.batching, *(pair[n] for pair in order), *side.free])
            for n, side in enumerate((left, right))
        )

    orders = [sorted(pairs), sorted(pairs, key=lambda pair: pair[1])]
    best = min(orders, key=moves)
    left.contracting, right.contracting = [p[0] for p in best], [p[1] for p in best]


def _is_linear(x: _Side, weight: _Side) -> bool:
    """Whether MIL's ``linear`` computes it: ``x`` needs no transpose, the weight is constant."""
    return (
        not x.batching
        and weight.var.val is not None
        and bool(x.shape)
        and not x.moves([*x.free, *x.contracting])
    )


def _linear(c: Composer, x: _Side, weight: _Side) -> tuple[Var, list[Dim]]:
    depth = product(x.sizes(x.contracting))
    rows, columns = x.sizes(x.free), [product(weight.sizes(weight.free))]
    if len(rows) >= _MOST_AXES:
        rows = [product(rows)]
    y = mb.linear(
        x=x.arrange(c, [*x.free, *x.contracting], [*rows, depth]),
        weight=weight.arrange(c, [*weight.free, *weight.contracting], [*columns, depth]),
    )
    return y, [*rows, *columns]


def _matmul(c: Composer, left: _Side, right: _Side) -> tuple[Var, list[Dim]]:
    batch = left.sizes(left.batching)
    if len(batch) > _MOST_AXES - 2:
        batch = [product(batch)]
    depth = product(left.sizes(left.contracting))
    rows, columns = [product(left.sizes(left.free))], [product(right.sizes(right.free))]
    turn_left = left.is_better_turned(left.free, left.contracting)
    turn_right = right.is_better_turned(right.contracting, right.free)
    if not batch and not turn_left and len(left.free) < _MOST_AXES:
        # matmul broadcasts the matrix along the leading axes.
        rows = left.sizes(left.free) or rows
    y = mb.matmul(
        x=left.arrange(
            c,
            left.order(turn_left, left.free, left.contracting),
            [*batch, *([depth, *rows] if turn_left else [*rows, depth])],
        ),
        y=right.arrange(
            c,
            right.order(turn_right, right.contracting, right.free),
            [*batch, *([*columns, depth] if turn_right else [depth, *columns])],
        ),
        transpose_x=turn_left,
        transpose_y=turn_right,
    )
    return y, [*batch, *rows, *columns]


def _outer(c: Composer, left: _Side, right: _Side) -> tuple[Var, list[Dim]]:
    """Multiply without contracted axes: the outer product."""
    batch = left.sizes(left.batching)
    rows, columns = left.sizes(left.free), right.sizes(right.free)
    if len(batch) + len(rows) + len(columns) > _MOST_AXES:
        batch, rows, columns = [product(batch)], [product(rows)], [product(columns)]
    y = mb.mul(
        x=left.arrange(c, [*left.batching, *left.free], [*batch, *rows, *[1 for _ in columns]]),
        y=right.arrange(c, [*right.batching, *right.free], [*batch, *[1 for _ in rows], *columns]),
    )
    return y, [*batch, *rows, *columns]


class Contraction(Emitter):
    """Tensor contraction: sums of products along axes."""

    @operation(ALL, _compose_dot_general)
    def dot_general(
        self,
        x: Value,
        y: Value,
        *,
        contracting: tuple[Sequence[int], Sequence[int]],
        batching: tuple[Sequence[int], Sequence[int]] = ((), ()),
        preferred_dtype: Any = None,
    ) -> Value:
        """Return sums of products along axes.

        The axes of the result are the batching axes, then the other axes of ``x``, then the other
        axes of ``y``. Integers wrap; of bools, the sum is ``or`` and the product ``and``. With a
        constant operand, the product is MIL's ``linear`` if that needs no transpose.

        Args:
            x: First operand.
            y: Second operand.
            contracting: Axes of ``x`` and of ``y`` that are multiplied and summed.
            batching: Axes of ``x`` and of ``y`` that are batch dimensions of the product.
            preferred_dtype: Element type of the result; None for the operands' type.

        Raises:
            GraphError: Axes that do not exist, repeat, or differ in number or size; element types
                that differ without ``preferred_dtype``.
        """
        operands = (x, y)
        contracted = _axes_of("contracting", contracting, operands)
        batched = _axes_of("batching", batching, operands)
        shape = [x.shape[axis] for axis in batched[0]]
        for value, batch, summed in zip(operands, batched, contracted, strict=True):
            if set(batch) & set(summed):
                raise GraphError(
                    "dot_general: an axis is both batching and contracting",
                    got=f"{list(batch)} and {list(summed)} of {value.type}",
                )
            used_axes = (*batch, *summed)
            shape += [size for axis, size in enumerate(value.shape) if axis not in used_axes]
        dtype = product_dtype("dot_general", x, y, preferred_dtype)
        return self.emit(
            "dot_general",
            operands,
            TensorType(dtype, tuple(shape)),
            contracting=contracted,
            batching=batched,
        )

    @operation(ALL)
    def dot(self, x: Value, y: Value, *, preferred_dtype: Any = None) -> Value:
        """Return the product of two vectors or matrices, as ``numpy.dot`` does.

        Args:
            x: Vector or matrix, whose last axis is contracted.
            y: Vector or matrix, whose first axis is contracted.
            preferred_dtype: See ``dot_general``.

        Raises:
            GraphError: Another rank, or see ``dot_general``.
        """
        for value in (x, y):
            if value.rank not in (1, 2):
                raise GraphError(
                    "dot takes vectors and matrices",
                    got=str(value.type),
                    expected="rank 1 or 2",
                    remedy="Use dot_general",
                )
        return self.dot_general(
            x, y, contracting=((x.rank - 1,), (0,)), preferred_dtype=preferred_dtype
        )


def _axes_of(
    what: str, axis_lists: tuple[Sequence[int], Sequence[int]], operands: tuple[Value, Value]
) -> tuple[Axes, Axes]:
    """Return the axes of both operands as 0 or more.

    Raises:
        GraphError: Axes do not exist, repeat, or differ in number or size.
    """
    if len(axis_lists) != 2 or len(axis_lists[0]) != len(axis_lists[1]):
        raise GraphError(
            f"dot_general: {what} needs as many axes of one operand as of the other",
            got=str(axis_lists),
        )
    one, other = (
        normalize_axes(axes, value.rank, f"{what} axes")
        for axes, value in zip(axis_lists, operands, strict=True)
    )
    for axis, other_axis in zip(one, other, strict=True):
        sizes = operands[0].shape[axis], operands[1].shape[other_axis]
        if not same_size(*sizes):
            raise GraphError(
                f"dot_general: sizes of {what} axes differ",
                got=f"{sizes[0]} (axis {axis}) and {sizes[1]} (axis {other_axis})",
            )
    return one, other
