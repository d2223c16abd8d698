"""Reshape, transpose, broadcast, concatenate, reverse and iota, also with shapes as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, const, convert
from coreml_delegate.graph.emitter import (
    Emitter,
    elementwise,
    normalize_axes,
    normalize_axis,
    operation,
    require_same_dtype,
    same_shape,
    same_size,
)
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.axes import Axes, counting, permute, require_rank, sizes_of
from coreml_delegate.graph.sizes import MOST_KNOWN, known_elements
from coreml_delegate.graph.tensor_types import (
    ALL,
    NUMBERS,
    Dim,
    DType,
    TensorType,
    product,
    simplify,
)
from coreml_delegate.mil.compose import mb

# The program computes an iota of more elements at run time.
_MOST_STORED = 4096


def _compose_reshape(c: Composer, node: Node, x: Var) -> Var:
    (have,), want = [t.shape for t in node.types], node.type.shape
    unknown = [size for size in want if not isinstance(size, int)]
    if len(unknown) > 1 and same_shape(_long_sizes(have), _long_sizes(want)):
        # Axes of size 1 are removed and added, so that no symbolic size is computed.
        short = [axis for axis, size in enumerate(have) if size == 1]
        x = mb.squeeze(x=x, axes=short) if short else x
        added = [axis for axis, size in enumerate(want) if size == 1]
        return mb.expand_dims(x=x, axes=added) if added else x
    return x if same_shape(have, want) else c.reshape(x, want)


def _long_sizes(shape: Sequence[Dim]) -> list[Dim]:
    return [size for size in shape if size != 1]


def _compose_transpose(c: Composer, node: Node, x: Var) -> Var:
    return permute(c, x, node.types[0].shape, node["permutation"])


def _compose_broadcast_in_dim(c: Composer, node: Node, x: Var) -> Var:
    (have,), want = [t.shape for t in node.types], node.type.shape
    dimensions: tuple[int, ...] = node["broadcast_dimensions"]
    x = permute(c, x, have, sorted(range(len(dimensions)), key=dimensions.__getitem__))
    sizes: list[Dim] = [1] * len(want)
    for axis, dimension in enumerate(dimensions):
        sizes[dimension] = have[axis]
    if len(want) <= MOST_AXES:
        added = [axis for axis in range(len(want)) if axis not in dimensions]
        return c.broadcast(mb.expand_dims(x=x, axes=added) if added else x, want)
    for axis, size in enumerate(want):
        if sizes[axis] == 1 and size != 1:
            before, after = product(sizes[:axis]), product(sizes[axis + 1 :])
            x = c.broadcast(c.reshape(x, (before, 1, after)), (before, size, after))
            sizes[axis] = size
    return c.reshape(x, want)


def _compose_concatenate(c: Composer, node: Node, *values: Var | None) -> Var:
    dimension = node["dimension"]
    shapes = [t.shape for t in node.types]
    nonempty = [(v, shape) for v, shape in zip(values, shapes, strict=True) if v is not None]
    if len(nonempty) == 1:
        return nonempty[0][0]
    axes = Axes.of(
        [None if axis == dimension else axis > dimension for axis in range(len(shapes[0]))]
    )
    joined = mb.concat(
        values=[axes.merge(c, v, shape) for v, shape in nonempty],
        axis=axes.groups.index((dimension,)),
    )
    return axes.split(c, joined, node.type.shape)


def _compose_reverse(c: Composer, node: Node, x: Var) -> Var:
    dimensions = [axis for axis in node["dimensions"] if node.type.shape[axis] != 1]
    if not dimensions:
        return x
    axes = Axes.of([None if axis in dimensions else 0 for axis in range(node.type.rank)])
    x = axes.merge(c, x, node.type.shape)
    x = mb.reverse(x=x, axes=[axes.groups.index((axis,)) for axis in dimensions])
    return axes.split(c, x, node.type.shape)


def _compose_iota(c: Composer, node: Node) -> Var:
    type, dimension = node.type, node["dimension"]
    size = type.shape[dimension]
    if isinstance(size, int):
        column = np.arange(size).astype(type.dtype.numpy)
        if type.is_static and type.count <= _MOST_STORED:
            column = column.reshape([-1 if n == dimension else 1 for n in range(type.rank)])
            return const(np.broadcast_to(column, type.static_shape), type.dtype)
        column = const(column, type.dtype)
    else:
        column = convert(counting(c, size), DType.INT32, type.dtype)
    axes = Axes.of([None if n == dimension else n > dimension for n in range(type.rank)])
    column_shape = [size if group == (dimension,) else 1 for group in axes.groups]
    spread = c.broadcast(c.reshape(column, column_shape), axes.shape(type.shape))
    return axes.split(c, spread, type.shape)


def _compose_identity(_: Composer, __: Node, *values: Var) -> tuple[Var, ...]:
    return values


def _compose_dimension_size(c: Composer, node: Node, _: Var) -> Var:
    size = c.size(node.types[0].shape[node["dimension"]])
    return const(size) if isinstance(size, np.integer) else size


class Shapes(Emitter):
    """Reshape, transpose, broadcast, concatenate, reverse and iota, also with shapes as values."""

    @operation(ALL, _compose_reshape)
    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Return the elements in another shape.

        Args:
            x: Any tensor.
            shape: One size may be -1: it is computed from the other sizes.
        """
        target = _resolve_shape(x, shape)
        elements = known_elements(lambda array: array, x)
        return self.emit("reshape", (x,), x.type.with_shape(target), elements=elements)

    @operation(ALL, _compose_transpose, moves_data=True)
    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Return the dimensions in another order: result dimension i is ``permutation[i]``."""
        require_rank("transpose", "dimensions in the permutation", permutation, x.rank)
        order = normalize_axes(permutation, x.rank, "dimensions of a permutation")
        type = x.type.with_shape([x.shape[axis] for axis in order])
        elements = known_elements(lambda array: array.transpose(order), x)
        return self.emit("transpose", (x,), type, permutation=order, elements=elements)

    @operation(ALL, _compose_broadcast_in_dim, moves_data=True)
    def broadcast_in_dim(
        self, x: Value, shape: Sequence[Dim], broadcast_dimensions: Sequence[int]
    ) -> Value:
        """Return a tensor repeated to a shape.

        Args:
            x: Tensor; its dimensions of size 1 are repeated.
            shape: Shape of the result.
            broadcast_dimensions: The dimension of the result for each dimension of ``x``.
        """
        name = "broadcast_in_dim"
        require_rank(name, "broadcast dimensions", broadcast_dimensions, x.rank)
        target = sizes_of(name, shape)
        dimensions = normalize_axes(broadcast_dimensions, len(target), "broadcast dimensions")
        for axis, dimension in enumerate(dimensions):
            if x.shape[axis] != 1 and not same_size(x.shape[axis], target[dimension]):
                raise GraphError(
                    f"{name}: dimension {axis} does not fit dimension {dimension} of the result",
                    got=f"{x.type} to {_text(target)}",
                    expected="equal sizes, or 1",
                )
        elements = None
        if all(isinstance(size, int) for size in target) and product(target) != 0:
            elements = known_elements(lambda array: _broadcast_array(array, target, dimensions), x)
        return self.emit(
            name,
            (x,),
            x.type.with_shape(target),
            broadcast_dimensions=dimensions,
            elements=elements,
        )

    @operation(ALL)
    def broadcast(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Return a tensor repeated to a shape by NumPy's rule: the last dimensions match."""
        if len(shape) < x.rank:
            raise GraphError(
                "broadcast: the shape has fewer dimensions than the tensor",
                got=f"{x.type} to {_text(shape)}",
            )
        return self.broadcast_in_dim(x, shape, range(len(shape) - x.rank, len(shape)))

    @operation(ALL, _compose_concatenate, moves_data=True)
    def concatenate(self, values: Sequence[Value], dimension: int) -> Value:
        """Concatenate tensors along a dimension."""
        name = "concatenate"
        if not values:
            raise GraphError(f"{name}: no values", expected="one or more")
        require_same_dtype(name, *values)
        first = values[0]
        if first.rank == 0:
            raise GraphError(f"{name} does not take tensors of rank 0", got=str(first.type))
        axis = normalize_axis(dimension, first.rank, "dimension")
        other_sizes = [(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values]
        if any(value.rank != first.rank for value in values) or not all(
            same_shape(shape, other_sizes[0]) for shape in other_sizes
        ):
            raise GraphError(
                f"{name}: shapes differ beside dimension {axis}",
                got=", ".join(str(value.type) for value in values),
            )
        shape = list(first.shape)
        total: Any = sum(value.shape[axis] for value in values)
        shape[axis] = simplify(total)
        elements = known_elements(lambda *arrays: np.concatenate(arrays, axis), *values)
        return self.emit(
            name, values, first.type.with_shape(shape), dimension=axis, elements=elements
        )

    @operation(ALL, _compose_reverse, moves_data=True)
    def reverse(self, x: Value, dimensions: Sequence[int]) -> Value:
        """Return the elements in the opposite order along dimensions."""
        axes = normalize_axes(dimensions, x.rank, "dimensions")
        elements = known_elements(lambda array: np.flip(array, axes), x)
        return self.emit("reverse", (x,), x.type, dimensions=axes, elements=elements)

    @operation(NUMBERS, _compose_iota)
    def iota(self, dtype: Any, shape: Sequence[Dim], dimension: int) -> Value:
        """Return 0, 1, 2 ... along a dimension."""
        element = DType.of(dtype)
        if element not in NUMBERS:
            raise GraphError(
                "iota does not make this element type", got=element.label, expected="numbers"
            )
        target = sizes_of("iota", shape)
        axis = normalize_axis(dimension, len(target), "dimension")
        elements, size = None, target[axis]
        if len(target) == 1 and isinstance(size, int) and size <= MOST_KNOWN:
            elements = known_elements(lambda: np.arange(size), dtype=element)
        return self.emit("iota", (), TensorType(element, target), dimension=axis, elements=elements)

    @elementwise(ALL, _compose_identity)
    def identity(self, x: Value) -> Value:
        """Return the tensor itself."""
        return self.emit("identity", (x,), x.type, elements=x.elements)

    @elementwise(ALL, _compose_identity)
    def optimization_barrier(self, *values: Value) -> tuple[Value, ...]:
        """Return the tensors themselves: the order of computation has no effect on a result."""
        return self.emit("optimization_barrier", values, [value.type for value in values])

    @operation(ALL, _compose_dimension_size)
    def get_dimension_size(self, x: Value, dimension: int) -> Value:
        """Return the size of a dimension, an int32 of rank 0."""
        axis = normalize_axis(dimension, x.rank, "dimension")
        type = TensorType(DType.INT32, ())
        return self.emit(
            "get_dimension_size", (x,), type, dimension=axis, elements=(x.shape[axis],)
        )

    @operation(ALL)
    def expand_dims(self, x: Value, axes: int | Sequence[int]) -> Value:
        """Return the tensor with dimensions of size 1 inserted at these axes of the result."""
        count = 1 if isinstance(axes, int) else len(axes)
        added = normalize_axes(axes, x.rank + count)
        sizes = iter(x.shape)
        return self.reshape(x, [1 if n in added else next(sizes) for n in range(x.rank + count)])

    @operation(ALL)
    def squeeze(self, x: Value, axes: int | Sequence[int] | None = None) -> Value:
        """Return the tensor without these dimensions of size 1; None removes all of size 1."""
        if axes is None:
            axes = [axis for axis, size in enumerate(x.shape) if size == 1]
        dropped = normalize_axes(axes, x.rank)
        for axis in dropped:
            if x.shape[axis] != 1:
                raise GraphError(f"squeeze: dimension {axis} is not of size 1", got=str(x.type))
        return self.reshape(x, [size for n, size in enumerate(x.shape) if n not in dropped])

    @operation(ALL)
    def dynamic_reshape(
        self, x: Value, shape: Value, result_shape: Sequence[Dim] | None = None
    ) -> Value:
        """Return the elements in a shape that is a value: ``reshape`` by a tensor of sizes.

        Args:
            x: Any tensor.
            shape: Vector of integers; sizes that have been computed from constants and from sizes
                of other tensors.
            result_shape: The result's shape, if the elements of ``shape`` are unknown.
        """
        return self.reshape(x, known_sizes("dynamic_reshape", shape, result_shape))

    @operation(ALL)
    def dynamic_broadcast_in_dim(
        self,
        x: Value,
        shape: Value,
        broadcast_dimensions: Sequence[int],
        result_shape: Sequence[Dim] | None = None,
    ) -> Value:
        """Return a tensor repeated to a shape that is a value; see ``dynamic_reshape``."""
        target = known_sizes("dynamic_broadcast_in_dim", shape, result_shape)
        return self.broadcast_in_dim(x, target, broadcast_dimensions)

    @operation(NUMBERS)
    def dynamic_iota(
        self, dtype: Any, shape: Value, dimension: int, result_shape: Sequence[Dim] | None = None
    ) -> Value:
        """Return ``iota`` in a shape that is a value; see ``dynamic_reshape``."""
        return self.iota(dtype, known_sizes("dynamic_iota", shape, result_shape), dimension)


def known_sizes(name: str, value: Value, default: Sequence[Dim] | None = None) -> tuple[Dim, ...]:
    """Return the elements of a vector of sizes, or ``default`` if they are unknown.

    Raises:
        GraphError: It is not a vector of integers, or its elements are unknown without a default.
    """
    if value.rank != 1 or not value.dtype.is_integer:
        raise GraphError(
            f"{name}: not a vector of integers", got=str(value.type), expected="int32[rank]"
        )
    if value.elements is not None:
        return value.elements
    if default is None:
        raise GraphError(
            f"{name}: the sizes are known at run time only",
            got=repr(value),
            expected="sizes computed from constants and get_dimension_size",
        )
    return tuple(default)


def _resolve_shape(x: Value, shape: Sequence[Any]) -> tuple[Dim, ...]:
    """Return a shape for ``reshape``, with -1 replaced by the missing size.

    Raises:
        GraphError: The shapes have different numbers of elements.
    """
    target = list(sizes_of("reshape", shape, -1))
    total = product(x.shape)
    if target.count(-1) > 1:
        raise GraphError("reshape: more than one size is -1", got=_text(target))
    if -1 in target:
        axis = target.index(-1)
        other_count = product([size for size in target if size != -1])
        if other_count != 0 and (not isinstance(total, int) or total % other_count == 0):
            target[axis] = simplify(total // other_count)
    if -1 in target or _differ(total, product(target)):
        raise GraphError(
            "reshape: the shapes have different numbers of elements",
            got=f"{x.type} to {_text(target)}",
            expected=f"{total} elements",
        )
    return tuple(target)


def _differ(one: Dim, other: Dim) -> bool:
    """Whether two sizes are known to differ; False if expressions cannot be compared."""
    difference = simplify(one - other)
    return difference != 0 if isinstance(difference, int) else difference.is_zero is False


def _broadcast_array(array: Any, shape: Sequence[Any], dimensions: Sequence[int]) -> Any:
    order = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    sizes = [1] * len(shape)
    for axis, dimension in enumerate(dimensions):
        sizes[dimension] = array.shape[axis]
    return np.broadcast_to(array.transpose(order).reshape(sizes), shape)


def _text(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"
