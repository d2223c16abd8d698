"""Gather, scatter, take and one-hot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var
from coreml_delegate.graph.emitter import (
    normalize_axes,
    normalize_axis,
    operation,
    require_same_dtype,
    same_shape,
)
from coreml_delegate.graph.node import Closure, Node, Value
from coreml_delegate.graph.operations.axes import as_index, counting, require_rank, sizes_of
from coreml_delegate.graph.operations.gathers import compose_gather
from coreml_delegate.graph.operations.lookup import DimensionNumbers
from coreml_delegate.graph.operations.scatters import compose_scatter
from coreml_delegate.graph.operations.shapes import Shapes
from coreml_delegate.graph.sizes import known_elements
from coreml_delegate.graph.tensor_types import ALL, INTEGERS, Dim, DType, TensorType, product
from coreml_delegate.mil.compose import mb

GATHER_MODES = ("clip", "promise_in_bounds")
SCATTER_MODES = ("update", "add", "sub", "mul", "min", "max")

_BODIES = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "minimum": "min",
    "maximum": "max",
    "and": "min",
    "or": "max",
}
_LOGICAL = ("and", "or")
# For bools, which are stored as 0 or 1.
_OF_BOOLS = {"add": "max", "mul": "min"}


def _compose_one_hot(c: Composer, node: Node, indices: Var) -> Var:
    dtype = node.type.dtype
    column = mb.expand_dims(x=as_index(indices, node.types[0].dtype), axes=[-1])
    is_hot = mb.equal(x=column, y=counting(c, node.type.shape[-1]))
    return is_hot if dtype is DType.BOOL else mb.cast(x=is_hot, dtype=dtype.storage_dtype)


@dataclass(frozen=True)
class _Merged:
    """A gather or scatter with the same elements and fewer dimensions.

    Dimensions of size 1 are dropped unless an index points into them. All batch dimensions of the
    indices except batching dimensions are merged to one. The result has the batching dimensions,
    the merged dimension, then the window's dimensions.

    Attributes:
        numbers: Its dimension numbers.
        shape: Shape of the tensor.
        sizes: Size of a window along each dimension of the tensor.
        outer: Shape of the indices without the index vectors, which are last.
        batch: Dimensions of the original indices in this order, without the index vectors.
    """

    numbers: DimensionNumbers
    shape: tuple[Dim, ...]
    sizes: tuple[Dim, ...]
    outer: tuple[Dim, ...]
    batch: tuple[int, ...]

    @classmethod
    def of(
        cls, x: Value, indices: Value, sizes: Sequence[Dim], numbers: DimensionNumbers
    ) -> _Merged:
        """Return the merged form of a gather or a scatter."""
        dims = [d for d, size in enumerate(x.shape) if size != 1 or d in numbers.mapped]
        pairs = zip(numbers.batching, numbers.indices_batching, strict=True)
        pairs = [(d, n) for d, n in pairs if d in dims]
        inner = (numbers.index_axis, *numbers.indices_batching)
        extra = [n for n in range(indices.rank) if n not in inner]
        outer = (*(indices.shape[n] for _, n in pairs), product([indices.shape[n] for n in extra]))
        window = tuple(sizes[d] for d in dims)
        batching = tuple(dims.index(d) for d, _ in pairs)
        unbatched = [d for d in range(len(dims)) if d not in batching]
        dropped = tuple(d for d in unbatched if window[d] == 1)
        merged = DimensionNumbers(
            dropped=dropped,
            batching=batching,
            indices_batching=tuple(range(len(batching))),
            mapped=tuple(map(dims.index, numbers.mapped)),
            index_axis=len(outer),
            slice_dims=tuple(len(outer) + n for n in range(len(unbatched) - len(dropped))),
        )
        shape = tuple(x.shape[d] for d in dims)
        return cls(merged, shape, window, outer, (*numbers.indices_batching, *extra))

    @property
    def indices_shape(self) -> tuple[Dim, ...]:
        """Shape of the indices."""
        return (*self.outer, len(self.numbers.mapped))

    @property
    def slices_shape(self) -> tuple[Dim, ...]:
        """Shape of the result of a gather, and of the updates of a scatter."""
        window_dims = self.numbers.window_dims(len(self.shape))
        return (*self.outer, *(self.sizes[d] for d in window_dims))

    @property
    def most_axes(self) -> int:
        """The highest rank among the tensor, the indices and the slices."""
        return max(map(len, (self.shape, self.indices_shape, self.slices_shape)))

    def original_order(self, numbers: DimensionNumbers, rank: int) -> list[int]:
        """Return the position in the unmerged slices of each dimension of slices of this rank."""
        batch = iter(sorted(self.batch))
        windows = iter(range(len(self.batch), rank))
        return [
            next(windows) if n in numbers.slice_dims else self.batch.index(next(batch))
            for n in range(rank)
        ]


class Indexing(Shapes):
    """Gather, scatter, take and one-hot."""

    @operation(ALL, compose_gather, moves_data=True)
    def gather(
        self,
        x: Value,
        indices: Value,
        *,
        offset_dims: Sequence[int],
        collapsed_slice_dims: Sequence[int],
        start_index_map: Sequence[int],
        index_vector_dim: int,
        slice_sizes: Sequence[Dim],
        operand_batching_dims: Sequence[int] = (),
        start_indices_batching_dims: Sequence[int] = (),
        indices_are_sorted: bool = False,  # noqa: ARG002 - a hint
        mode: str = "clip",
    ) -> Value:
        """Return slices at index vectors, with StableHLO's dimension numbers.

        Args:
            x: Any tensor.
            indices: Integers; the vectors are along ``index_vector_dim``, or are scalars if that is
                the rank.
            offset_dims: Dimensions of the result that are dimensions of a slice.
            collapsed_slice_dims: Dimensions of ``x``, of size 1 in a slice, that the result lacks.
            start_index_map: The dimension of ``x`` for each element of an index vector.
            index_vector_dim: Dimension of ``indices`` that has the index vectors.
            slice_sizes: Size of a slice along each dimension of ``x``.
            operand_batching_dims: Batch dimensions of ``x``.
            start_indices_batching_dims: Batch dimensions of ``indices``, in the same order.
            indices_are_sorted: Has no effect.
            mode: ``clip`` moves a slice until it fits into ``x``; with ``promise_in_bounds``, the
                result is undefined for a slice that does not fit.
        """
        name = "gather"
        if mode not in GATHER_MODES:
            raise GraphError(
                f"{name}: unknown mode", got=repr(mode), expected=" | ".join(GATHER_MODES)
            )
        sizes = sizes_of(name, slice_sizes)
        require_rank(name, "slice sizes", sizes, x.rank)
        numbers, batch = _dimension_numbers(
            name,
            (x, indices),
            {
                "collapsed slice dimensions": collapsed_slice_dims,
                "operand batching dimensions": operand_batching_dims,
                "dimensions of the start index map": start_index_map,
            },
            start_indices_batching_dims,
            index_vector_dim,
        )
        window_dims = numbers.window_dims(x.rank)
        for d, (size, have) in enumerate(zip(sizes, x.shape, strict=True)):
            exact = d not in window_dims
            is_larger = isinstance(size, int) and isinstance(have, int) and size > have
            if is_larger or (exact and size != 1):
                raise GraphError(
                    f"{name}: a slice does not fit dimension {d} of {x.type}",
                    got=str(size),
                    expected="1" if exact else f"{have} or less",
                )
        rank = len(batch) + len(window_dims)
        require_rank(name, "offset dimensions", offset_dims, len(window_dims))
        offsets = tuple(sorted(normalize_axes(offset_dims, rank, "offset dimensions")))
        numbers = replace(numbers, slice_dims=offsets)
        inner, outer = iter([sizes[d] for d in window_dims]), iter(batch)
        shape = [next(inner if n in offsets else outer) for n in range(rank)]
        merged = self._merged((x, indices), rank, sizes, numbers)
        if merged is None:
            return self._emit_gather(x, indices, shape, numbers, sizes, mode)
        result = self._emit_gather(
            self.reshape(x, merged.shape),
            self._merged_indices(indices, merged, numbers),
            merged.slices_shape,
            merged.numbers,
            merged.sizes,
            mode,
        )
        order = merged.original_order(numbers, rank)
        unmerged = [shape[order.index(n)] for n in range(rank)]
        return self.transpose(self.reshape(result, unmerged), order)

    def _emit_gather(
        self,
        x: Value,
        indices: Value,
        shape: Sequence[Dim],
        numbers: DimensionNumbers,
        sizes: Sequence[Dim],
        mode: str,
    ) -> Value:
        return self.emit(
            "gather",
            (x, indices),
            x.type.with_shape(shape),
            elements=_known_elements(x, indices, sizes),
            numbers=numbers,
            slice_sizes=sizes,
            mode=mode,
        )

    @operation(ALL, compose_scatter, moves_data=True)
    def scatter(
        self,
        x: Value,
        indices: Value,
        updates: Value,
        body: Callable[[Value, Value], Any] | Closure | str,
        *,
        update_window_dims: Sequence[int],
        inserted_window_dims: Sequence[int],
        scatter_dims_to_operand_dims: Sequence[int],
        index_vector_dim: int,
        input_batching_dims: Sequence[int] = (),
        scatter_indices_batching_dims: Sequence[int] = (),
        indices_are_sorted: bool = False,  # noqa: ARG002 - a hint
        unique_indices: bool = False,  # noqa: ARG002 - a hint
    ) -> Value:
        """Return ``x`` with updates at index vectors, with StableHLO's dimension numbers.

        An update whose window is not inside of ``x`` is dropped. If several updates replace one
        element, it is undefined which does; with other bodies, all are combined.

        Args:
            x: Any tensor.
            indices: Integers; the vectors are along ``index_vector_dim``, or are scalars if that is
                the rank.
            updates: A window for each index vector.
            body: Takes an element and its update: one operation among ``update``, ``add``, ``sub``,
                ``mul``, ``min``, ``max``, ``and``, ``or``, or its name.
            update_window_dims: Dimensions of ``updates`` that are dimensions of a window.
            inserted_window_dims: Dimensions of ``x``, of size 1 in a window, that updates lack.
            scatter_dims_to_operand_dims: The dimension of ``x`` for each element of an index
                vector.
            index_vector_dim: Dimension of ``indices`` that has the index vectors.
            input_batching_dims: Batch dimensions of ``x``.
            scatter_indices_batching_dims: Batch dimensions of ``indices``, in the same order.
            indices_are_sorted: Has no effect.
            unique_indices: Has no effect.
        """
        name = "scatter"
        require_same_dtype(name, x, updates)
        numbers, batch = _dimension_numbers(
            name,
            (x, indices),
            {
                "inserted window dimensions": inserted_window_dims,
                "input batching dimensions": input_batching_dims,
                "dimensions of index vectors": scatter_dims_to_operand_dims,
            },
            scatter_indices_batching_dims,
            index_vector_dim,
        )
        window_dims = numbers.window_dims(x.rank)
        windows = tuple(
            sorted(normalize_axes(update_window_dims, updates.rank, "window dimensions"))
        )
        require_rank(name, "window dimensions", windows, len(window_dims))
        numbers = replace(numbers, slice_dims=windows)
        outer = [size for n, size in enumerate(updates.shape) if n not in windows]
        fits = all(
            not isinstance(size, int) or not isinstance(have, int) or size <= have
            for size, have in zip(
                [updates.shape[n] for n in windows], [x.shape[d] for d in window_dims], strict=True
            )
        )
        if not fits or not same_shape(outer, batch):
            raise GraphError(
                f"{name}: the updates do not fit",
                got=f"{updates.type} for {indices.type} into {x.type}",
                expected=f"windows inside of {x.type}, [{', '.join(map(str, batch))}] of them",
            )
        mode = self._scatter_mode(x.dtype, body)
        if mode is None:
            return x
        window_sizes = dict(zip(window_dims, (updates.shape[n] for n in windows), strict=True))
        sizes = [window_sizes.get(d, 1) for d in range(x.rank)]
        merged = self._merged((x, indices), updates.rank, sizes, numbers)
        if merged is None:
            return self.emit(name, (x, indices, updates), x.type, mode=mode, numbers=numbers)
        order = merged.original_order(numbers, updates.rank)
        inverse = [order.index(n) for n in range(updates.rank)]
        operands = (
            self.reshape(x, merged.shape),
            self._merged_indices(indices, merged, numbers),
            self.reshape(self.transpose(updates, inverse), merged.slices_shape),
        )
        type = operands[0].type
        result = self.emit(name, operands, type, mode=mode, numbers=merged.numbers)
        return self.reshape(result, x.shape)

    @operation(ALL)
    def take(self, x: Value, indices: Value, axis: int) -> Value:
        """Return slices along an axis, which the dimensions of ``indices`` replace.

        Indices out of range are clamped.
        """
        gather_axis = normalize_axis(axis, x.rank)
        after = x.rank - gather_axis - 1
        rank = x.rank - 1 + indices.rank
        return self.gather(
            x,
            indices,
            offset_dims=(*range(gather_axis), *range(rank - after, rank)),
            collapsed_slice_dims=(gather_axis,),
            start_index_map=(gather_axis,),
            index_vector_dim=indices.rank,
            slice_sizes=[1 if d == gather_axis else size for d, size in enumerate(x.shape)],
        )

    @operation(INTEGERS, _compose_one_hot)
    def one_hot(self, indices: Value, depth: Dim, dtype: Any = "float32") -> Value:
        """Return a vector for each index, along a new last dimension: 1 at the index, else 0.

        Args:
            indices: Integers; the vector of an index out of range is all zeros.
            depth: Size of the new dimension.
            dtype: Element type of the result.
        """
        (size,) = sizes_of("one_hot", (depth,))
        type = TensorType(DType.of(dtype), (*indices.shape, size))
        return self.emit("one_hot", (indices,), type)

    def _merged(
        self,
        operands: tuple[Value, Value],
        slices_rank: int,
        sizes: Sequence[Dim],
        numbers: DimensionNumbers,
    ) -> _Merged | None:
        """Return the merged form of a gather or scatter of too many axes, if it has few enough."""
        if max(*(operand.rank for operand in operands), slices_rank) <= MOST_AXES:
            return None
        merged = _Merged.of(*operands, sizes, numbers)
        return merged if merged.most_axes <= MOST_AXES else None

    def _merged_indices(self, indices: Value, merged: _Merged, numbers: DimensionNumbers) -> Value:
        axis = numbers.index_axis
        order = [*merged.batch, *([axis] if axis < indices.rank else [])]
        return self.reshape(self.transpose(indices, order), merged.indices_shape)

    def _scatter_mode(
        self, dtype: DType, body: Callable[[Value, Value], Any] | Closure | str
    ) -> str | None:
        """Return MIL's mode for a body; None if the body returns the old element."""
        if isinstance(body, str):
            is_logical = body in _LOGICAL and dtype is DType.BOOL
            mode = _BODIES[body] if is_logical else body
        else:
            scalar = TensorType(dtype, ())
            closure = body if isinstance(body, Closure) else self.trace("body", body, [scalar] * 2)
            closure.check([scalar] * 2, [scalar])
            old, new = closure.parameters
            (result,) = closure.results
            if result is old:
                return None
            mode = "update" if result is new else _mode_of(result, old, new)
        if mode not in SCATTER_MODES or (dtype is DType.BOOL and mode == "sub"):
            raise GraphError(
                "scatter: a body that MIL's scatter cannot express",
                got=mode,
                expected="one of "
                + ", ".join((*_BODIES, "update"))
                + " of the element and its update",
            )
        return _OF_BOOLS.get(mode, mode) if dtype is DType.BOOL else mode


def _mode_of(result: Value, old: Value, new: Value) -> str:
    """Return the mode of a body of a single operation, else a description of the body."""
    operands = list(result.node.operands)
    mode = _BODIES.get(result.node.name)
    if result.node.name in _LOGICAL and result.dtype is not DType.BOOL:
        return f"{result.node.name} of {result.dtype.label}"
    if mode is not None and (operands == [old, new] or (operands == [new, old] and mode != "sub")):
        return mode
    return f"{result.node.name} of {', '.join(value.node.name for value in operands)}"


def _dimension_numbers(
    name: str,
    operands: tuple[Value, Value],
    roles: Mapping[str, Sequence[int]],
    indices_batching: Sequence[int],
    index_axis: int,
) -> tuple[DimensionNumbers, list[Dim]]:
    """Return checked numbers, without ``slice_dims``, and the indices' shape without the vectors.

    ``roles`` has the dropped, the batching and the mapped dimensions, by names for messages.
    """
    x, indices = operands
    batch = _batch(name, indices, index_axis, len(list(roles.values())[2]))
    dropped, batching, mapped = (normalize_axes(axes, x.rank, what) for what, axes in roles.items())
    indices_batch = normalize_axes(
        indices_batching, indices.rank, "batching dimensions of the indices"
    )
    sizes = [x.shape[d] for d in batching], [indices.shape[n] for n in indices_batch]
    if index_axis in indices_batch or not same_shape(*sizes):
        raise GraphError(
            f"{name}: batching dimensions do not fit",
            got=f"{list(batching)} of {x.type} and {list(indices_batch)} of {indices.type}",
            expected="pairs of equal sizes, without the index vectors' dimension",
        )
    if {*dropped, *mapped} & set(batching):
        raise GraphError(
            f"{name}: a batching dimension is dropped or indexed, too",
            got=f"batching {list(batching)}, dropped {list(dropped)}, indexed {list(mapped)}",
        )
    return DimensionNumbers(dropped, batching, indices_batch, mapped, index_axis, ()), batch


def _batch(name: str, indices: Value, axis: int, count: int) -> list[Dim]:
    """Return the shape of the indices without the index vectors, which have ``count`` elements."""
    if not indices.dtype.is_integer:
        raise GraphError(f"{name}: indices are no integers", got=str(indices.type))
    if not 0 <= axis <= indices.rank:
        raise GraphError(
            f"{name}: no such index vector dimension",
            got=str(axis),
            expected=f"0 to {indices.rank}, of {indices.type}",
        )
    length = indices.shape[axis] if axis < indices.rank else 1
    if length != count:
        raise GraphError(
            f"{name}: index vectors have a wrong number of elements",
            got=str(length),
            expected=f"{count}, one per dimension that they point into",
        )
    return [size for n, size in enumerate(indices.shape) if n != axis]


def _known_elements(x: Value, indices: Value, sizes: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Return the elements gathered from a vector of sizes; None if they are unknown."""
    positions = indices.elements or (None,)
    if x.rank != 1 or list(sizes) != [1] or not all(isinstance(n, int) for n in positions):
        return None
    return known_elements(lambda xs, ns: xs[np.clip(ns.astype(int), 0, len(xs) - 1)], x, indices)
