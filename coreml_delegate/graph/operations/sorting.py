"""Sorting.

Core ML sorts by one key, and does not specify the order of equal elements and of NaN. On both
engines, sorts are stable, and NaN is the largest. A sort by several keys is a stable sort by each,
the last key first.

JAX compares tensors in lexicographic order: ``a0 < b0 or (a0 == b0 and (a1 < b1 or ...))``.
It makes all NaN equal, and both zeros, by selects before the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, cast_bool, ordered
from coreml_delegate.graph.emitter import Emitter, normalize_axis, operation, same_shape
from coreml_delegate.graph.node import Closure, Node, Value, require_elementwise
from coreml_delegate.graph.operations.axes import around_axis
from coreml_delegate.graph.operations.elementwise import MIRRORED
from coreml_delegate.graph.tensor_types import ALL, Dim, DType, TensorType
from coreml_delegate.mil.compose import mb

Comparator = Callable[..., Any] | str

_ORDERS = {"ascending": True, "descending": False}
# All pairs of elements are compared: 4 million comparisons for each row of this size.
_MAX_COMPARED = 2048
# A stable sort keeps the order of equal elements, so that LE and GE are LT and GT.
_ASCENDING = {"LT": True, "LE": True, "GT": False, "GE": False}


@dataclass(frozen=True, slots=True)
class SortKey:
    """A tensor that decides on the order.

    Attributes:
        operand: Index among the sort's operands.
        ascending: Whether smaller elements go first.
        splits_zeros: Whether -0 is smaller than 0.
    """

    operand: int
    ascending: bool
    splits_zeros: bool


@dataclass(frozen=True, slots=True)
class _Argument:
    index: int
    merges_zeros: bool


def _compose_sort(c: Composer, node: Node, *values: Var) -> tuple[Var, ...]:
    shape, axis = node.types[0].shape, node["dimension"]
    if len(shape) > MOST_AXES:
        full_shape, (shape, axis) = shape, around_axis(node.types[0], axis)
        values = tuple(c.reshape(value, shape) for value in values)
        return tuple(c.reshape(value, full_shape) for value in _sort(c, node, values, shape, axis))
    return _sort(c, node, values, shape, axis)


def _sort(
    c: Composer, node: Node, values: tuple[Var, ...], shape: Sequence[Dim], axis: int
) -> tuple[Var, ...]:
    if "comparator" in node.closures:
        order = _order_by_comparison(c, node, values, shape, axis)
    else:
        order = _order_by_keys(node, values, axis)
    if order is None:
        return values
    return tuple(mb.gather_along_axis(x=value, indices=order, axis=axis) for value in values)


def _order_by_keys(node: Node, values: Sequence[Var], axis: int) -> Var | None:
    """Return the indices that sort by keys; None without keys."""
    order: Var | None = None
    for key in reversed(node["keys"]):
        dtype = node.operands[key.operand].dtype
        value = ordered(values[key.operand], dtype)
        passes = [value]
        if key.splits_zeros:
            passes.insert(0, _sign_of_zero(value, dtype))
        for tensor in passes:
            if order is None:
                order = mb.argsort(x=tensor, axis=axis, ascending=key.ascending)
                continue
            current = mb.gather_along_axis(x=tensor, indices=order, axis=axis)
            step = mb.argsort(x=current, axis=axis, ascending=key.ascending)
            order = mb.gather_along_axis(x=order, indices=step, axis=axis)
    return order


def _sign_of_zero(x: Var, dtype: DType) -> Var:
    """Return 0 where ``x`` is -0, else 1, as int32."""
    zero = dtype.storage_numpy.type(0)
    is_negative = mb.less(x=mb.real_div(x=dtype.storage_numpy.type(1), y=x), y=zero)
    is_negative_zero = mb.logical_and(x=mb.equal(x=x, y=zero), y=is_negative)
    return mb.cast(x=mb.logical_not(x=is_negative_zero), dtype="int32")


def _order_by_comparison(
    c: Composer, node: Node, values: Sequence[Var], shape: Sequence[Dim], axis: int
) -> Var:
    """Return the indices that sort by a comparator, from comparisons of all pairs.

    The rank of element j is the number of elements i that go before it, or are equal and i <= j.
    """
    comparator = node.closures["comparator"]
    count = int(shape[axis])
    axes = [n for n in range(len(shape)) if n != axis] + [axis]
    row_shape = [int(shape[n]) for n in axes]
    arguments: list[Var] = []
    for value, operand in zip(values, node.operands, strict=True):
        transposed = value if axes == sorted(axes) else mb.transpose(x=value, perm=axes)
        rows = cast_bool(operand, c.reshape(transposed, (-1, count)), "bool")
        arguments += [mb.expand_dims(x=rows, axes=[2]), mb.expand_dims(x=rows, axes=[1])]
    (flag,) = c.call(comparator, arguments)
    pairs = (int(np.prod(row_shape[:-1], dtype=np.int64)), count, count)
    before = c.broadcast(mb.cast(x=flag, dtype="int32"), pairs)
    either = mb.add(x=before, y=mb.transpose(x=before, perm=[0, 2, 1]))
    equal = mb.sub(x=np.int32(1), y=mb.minimum(x=either, y=np.int32(1)))
    # The diagonal, i = j, adds 1 to all ranks.
    equal_up_to = mb.band_part(x=equal, lower=0, upper=-1)
    rank = mb.reduce_sum(x=mb.add(x=before, y=equal_up_to), axes=[1], keep_dims=False)
    order = c.reshape(mb.argsort(x=rank, axis=-1, ascending=True), row_shape)
    inverse = [axes.index(n) for n in range(len(axes))]
    return order if axes == sorted(axes) else mb.transpose(x=order, perm=inverse)


def _compose_top_k(c: Composer, node: Node, x: Var) -> tuple[Var, Var]:
    dtype, shape = node.operands[0].dtype, node.types[0].shape
    if len(shape) > MOST_AXES:
        x = c.reshape(x, (-1, shape[-1]))
    values, indices = mb.topk(x=ordered(x, dtype), k=node["k"], axis=-1, ascending=False)
    values = ordered(values, dtype)  # ``ordered`` is its own inverse
    if len(shape) > MOST_AXES:
        return c.reshape(values, (-1,)), c.reshape(indices, (-1,))
    return values, indices


# Keys of a comparator


def _sort_keys(closure: Closure) -> tuple[SortKey, ...] | None:
    """Return the keys of a comparator, the first key first; None for other functions.

    A comparator takes two elements of each operand, and returns whether the first go before.
    """
    indices = {parameter: n for n, parameter in enumerate(closure.parameters)}
    (result,) = closure.results
    if result.node.name == "constant":
        return None if bool(result.node["array"]) else ()
    return _keys(result, indices)


def _keys(flag: Value, indices: dict[Value, int]) -> tuple[SortKey, ...] | None:
    node = flag.node
    if node.name == "compare":
        comparison = _comparison(node, indices)
        if comparison is None or comparison[1] not in _ASCENDING:
            return None
        operand, direction, splits_zeros = comparison
        return (SortKey(operand, _ASCENDING[direction], splits_zeros),)
    for first, condition, next_flag in _alternatives(node):
        keys = _lexicographic(first, condition, next_flag, indices)
        if keys is not None:
            return keys
    return None


def _alternatives(node: Node) -> list[tuple[Value, Value, Value]]:
    """Return readings of a node as ``first or (condition and next)``: (first, condition, next)."""
    if node.name == "or":
        readings: list[tuple[Value, Value, Value]] = []
        one, other = node.operands
        for first, next_flag in ((one, other), (other, one)):
            if next_flag.node.name == "and":
                one_part, other_part = next_flag.node.operands
                readings += [(first, one_part, other_part), (first, other_part, one_part)]
        return readings
    if node.name == "select":
        condition, next_flag, first = node.operands
        return [(first, condition, next_flag)]
    return []


def _lexicographic(
    first: Value, condition: Value, next_flag: Value, indices: dict[Value, int]
) -> tuple[SortKey, ...] | None:
    if condition.node.name != "compare":
        return None
    keys, equality = _keys(first, indices), _comparison(condition.node, indices)
    if keys is None or equality is None or len(keys) != 1:
        return None
    if equality[:2] != (keys[0].operand, "EQ"):
        return None
    next_keys = _keys(next_flag, indices)
    return None if next_keys is None else (*keys, *next_keys)


def _comparison(node: Node, indices: dict[Value, int]) -> tuple[int, str, bool] | None:
    """Return (operand, direction, splits_zeros) of a comparison of an operand's two elements."""
    left, right = (_argument(operand, indices) for operand in node.operands)
    if left is None or right is None or left.index // 2 != right.index // 2:
        return None
    if left.index == right.index:
        return None
    direction = node["direction"]
    if left.index > right.index:
        direction = MIRRORED[direction]
    is_float = node.operands[0].dtype.is_float
    splits = is_float and node["total_order"] and not (left.merges_zeros and right.merges_zeros)
    return left.index // 2, direction, splits


def _argument(value: Value, indices: dict[Value, int]) -> _Argument | None:
    """Return the argument whose order a value has, or None."""
    if value in indices:
        return _Argument(indices[value], False)
    node = value.node
    if node.name == "convert":
        (operand,) = node.operands
        is_wider = np.can_cast(operand.dtype.numpy, value.dtype.numpy, "safe")
        return _argument(operand, indices) if is_wider else None
    if node.name != "select":
        return None
    condition, replacement, other = node.operands
    argument = _argument(other, indices)
    if argument is None or condition.node.name != "compare" or replacement.node.name != "constant":
        return None
    constant = replacement.node["array"]
    direction = condition.node["direction"]
    compared = [_argument(operand, indices) for operand in condition.node.operands]
    if constant.ndim or compared[0] is None or compared[0].index != argument.index:
        return None
    if direction == "NE" and np.isnan(constant) and compared[1] == compared[0]:
        return argument  # all NaN are equal
    second = condition.node.operands[1].node
    is_zero = second.name == "constant" and not np.any(second["array"])
    if direction == "EQ" and is_zero and constant == 0:
        return _Argument(argument.index, True)
    return None


class Sorting(Emitter):
    """Sorting."""

    @operation(ALL, _compose_sort, moves_data=True)
    def sort(
        self,
        values: Sequence[Value],
        dimension: int = -1,
        comparator: Comparator = "ascending",
        is_stable: bool = True,
    ) -> tuple[Value, ...]:
        """Return tensors sorted along a dimension, all in the order of a comparator.

        Args:
            values: Tensors of one shape.
            dimension: The dimension to sort along.
            comparator: ``ascending`` or ``descending`` order of the first tensor, where NaN is the
                largest; or a function that takes two elements of each tensor, as (x, other x, y,
                other y), and returns a bool, whether the first element goes before the other. It
                is a strict weak order. Lexicographic comparisons, as ``jax.lax.sort`` makes them,
                are recognized; any other function has to be elementwise, and the dimension no
                larger than 2,048.
            is_stable: Has no effect: the sort is always stable.

        Raises:
            GraphError: Shapes that differ, or a comparator that cannot be used.
        """
        del is_stable
        if not values:
            raise GraphError("sort has no operands", expected="at least one")
        for value in values[1:]:
            if not same_shape(value.shape, values[0].shape):
                raise GraphError(
                    "sort: shapes of operands differ",
                    got=" and ".join(str(value.type) for value in values),
                )
        axis = normalize_axis(dimension, values[0].rank, "dimension to sort")
        types = [value.type for value in values]
        if isinstance(comparator, str):
            if comparator not in _ORDERS:
                raise GraphError(
                    "unknown order", got=repr(comparator), expected=" | ".join(_ORDERS)
                )
            keys: tuple[SortKey, ...] | None = (SortKey(0, _ORDERS[comparator], False),)
            return self.emit("sort", values, types, dimension=axis, keys=keys)
        closure = self._comparator(comparator, types, ((), ()))
        keys = _sort_keys(closure)
        if keys is not None:
            return self.emit("sort", values, types, dimension=axis, keys=keys)
        require_elementwise("the comparator", closure)
        counted = self._counting_comparator(comparator, types, axis)
        return self.emit(
            "sort", values, types, closures={"comparator": counted}, dimension=axis, keys=()
        )

    @operation(ALL, _compose_top_k, moves_data=True)
    def top_k(self, x: Value, k: int) -> tuple[Value, Value]:
        """Return the largest elements along the last dimension, in descending order, and indices.

        NaN is the largest; equal elements, such as -0 and 0, keep their order.

        Args:
            x: The tensor.
            k: The number of elements.

        Returns:
            The elements, and their indices as int32.

        Raises:
            GraphError: There are fewer elements, or their number is known only at run time.
        """
        if not x.rank:
            raise GraphError("top_k takes no scalars", got=str(x.type))
        size = x.shape[-1]
        if not isinstance(size, int) or not 0 <= k <= size:
            raise GraphError("no such number of largest elements", got=f"{k} of {x.type}")
        type = x.type.with_shape((*x.shape[:-1], k))
        return self.emit("top_k", (x,), (type, type.with_dtype(DType.INT32)), k=k)

    def _counting_comparator(
        self, comparator: Callable[..., Any], types: Sequence[TensorType], axis: int
    ) -> Closure:
        """Trace a comparator for all pairs of each row: [rows, n, 1] with [rows, 1, n]."""
        if not types[0].is_static or types[0].static_shape[axis] > _MAX_COMPARED:
            raise GraphError(
                "the comparator is not a lexicographic comparison, so all pairs of elements are "
                "compared: too many",
                got=str(types[0]),
                expected=f"a fixed size of {_MAX_COMPARED} or less",
                remedy="Compare the operands one after the other by less or greater",
            )
        shape = types[0].static_shape
        count = max(1, shape[axis])
        rows = max(1, types[0].count) // count
        return self._comparator(comparator, types, ((rows, count, 1), (rows, 1, count)))

    def _comparator(
        self,
        comparator: Callable[..., Any],
        types: Sequence[TensorType],
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> Closure:
        parameter_types = [type.with_shape(shape) for type in types for shape in shapes]
        closure = self.trace("comparator", comparator, parameter_types)
        is_flag = len(closure.results) == 1 and closure.results[0].dtype is DType.BOOL
        if not is_flag or (not shapes[0] and closure.results[0].rank):
            raise GraphError(
                "the comparator returns no flag",
                got=", ".join(str(result.type) for result in closure.results),
                expected="bool[]",
            )
        return closure
