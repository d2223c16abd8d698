"""``Lookup``: index vectors of gather and scatter, and the arithmetic of their indices.

Axes have labels: ``("batch", n)`` is the n-th dimension of the indices without the index vectors,
``("window", d)`` the window along the operand's dimension d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, join
from coreml_delegate.graph.emitter import same_size
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.operations.axes import as_index, counting
from coreml_delegate.graph.tensor_types import Dim, DType, TensorType, product, simplify
from coreml_delegate.mil.compose import mb

Label = tuple[str, int]


@dataclass(frozen=True, slots=True)
class DimensionNumbers:
    """Roles of the dimensions of a gather or a scatter.

    Attributes:
        dropped: Dimensions of the tensor, of size 1 in a window, that slices and updates lack.
        batching: Batching dimensions of the tensor.
        indices_batching: Batching dimensions of the indices, in the same order.
        mapped: The dimension of the tensor for each element of an index vector.
        index_axis: Axis of the index vectors; the rank of the indices if they are scalars.
        slice_dims: Dimensions of the result of a gather, or of updates, that are a window's.
    """

    dropped: tuple[int, ...]
    batching: tuple[int, ...]
    indices_batching: tuple[int, ...]
    mapped: tuple[int, ...]
    index_axis: int
    slice_dims: tuple[int, ...]

    def window_dims(self, rank: int) -> list[int]:
        """Return the dimensions of a tensor of this rank that slices and updates have."""
        return [d for d in range(rank) if d not in self.dropped and d not in self.batching]


@dataclass(frozen=True)
class Lookup:
    """The windows of an operand that index vectors point to.

    Attributes:
        shape: Shape of the operand.
        sizes: Size of a window along each dimension of the operand.
        batch: Shape of the indices without the index vectors.
        batching: Batching dimensions: a dimension of ``batch`` by dimension of the operand.
        mapped: The dimension of the operand for each element of an index vector.
        index_axis: Axis of the index vectors; the rank of the indices if they are scalars.
        dtype: Element type of the indices.
    """

    shape: tuple[Dim, ...]
    sizes: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    batching: dict[int, int]
    mapped: tuple[int, ...]
    index_axis: int
    dtype: DType

    @classmethod
    def of(cls, node: Node, sizes: Sequence[Dim]) -> Lookup:
        """Return the lookup of a node whose first operands are the tensor and the indices.

        Raises:
            UnsupportedOperatorError: A tensor has more dimensions than Core ML has.
        """
        types = (*node.types, node.type)
        if max(t.rank for t in types) > MOST_AXES:
            raise UnsupportedOperatorError(
                f"{node.name} of a tensor with too many dimensions",
                got=", ".join(map(str, types)),
                expected=f"{MOST_AXES}, the highest rank of Core ML",
            )
        numbers: DimensionNumbers = node["numbers"]
        axis, indices = numbers.index_axis, node.types[1]
        batch_dims = [n - (n > axis) for n in numbers.indices_batching]
        return cls(
            node.types[0].shape,
            tuple(sizes),
            tuple(size for n, size in enumerate(indices.shape) if n != axis),
            dict(zip(numbers.batching, batch_dims, strict=True)),
            numbers.mapped,
            axis,
            indices.dtype,
        )

    def cropped(self) -> Lookup:
        """Return the lookup in the operand cropped to the window along unmapped dimensions."""
        uncropped = {*self.mapped, *self.batching}
        pairs = enumerate(zip(self.shape, self.sizes, strict=True))
        return replace(self, shape=tuple(h if d in uncropped else s for d, (h, s) in pairs))

    @property
    def partial(self) -> list[int]:
        """Dimensions along which a window is a part of the operand, except batching dimensions."""
        return [
            d
            for d, (have, size) in enumerate(zip(self.shape, self.sizes, strict=True))
            if d not in self.batching and not same_size(have, size)
        ]

    @property
    def is_single(self) -> bool:
        """Whether there is only one index vector."""
        return not self.batching and all(size == 1 for size in self.batch)

    @property
    def are_points(self) -> bool:
        """Whether windows have size 1 in each partial dimension."""
        return all(self.sizes[d] == 1 for d in self.partial)

    @property
    def batch_labels(self) -> list[Label]:
        """Labels of ``batch``."""
        return [("batch", n) for n in range(len(self.batch))]

    @property
    def batching_labels(self) -> list[Label]:
        """Labels of the batching dimensions of the operand, ascending."""
        return [("batch", self.batching[d]) for d in sorted(self.batching)]

    @property
    def other_batch_labels(self) -> list[Label]:
        """Labels of ``batch`` without the batching dimensions."""
        return [label for label in self.batch_labels if label[1] not in self.batching.values()]

    @property
    def labels(self) -> list[Label]:
        """Labels of the operand's dimensions."""
        return [
            ("batch", self.batching[d]) if d in self.batching else ("window", d)
            for d in range(len(self.shape))
        ]

    def slice_labels(self, numbers: DimensionNumbers, rank: int) -> list[Label]:
        """Return the labels of the result of a gather, or of updates, of this rank."""
        windows = iter(numbers.window_dims(len(self.shape)))
        batch = iter(self.batch_labels)
        return [
            ("window", next(windows)) if n in numbers.slice_dims else next(batch)
            for n in range(rank)
        ]

    def unindexed(self, indexed: Sequence[int], labels: Sequence[Label]) -> list[Label]:
        """Return the labels of unindexed dimensions, without labels that slices lack."""
        dims = [d for d in range(len(self.shape)) if d not in indexed]
        return [("window", d) for d in dims if ("window", d) in labels]

    def along_axis(self) -> list[Label] | None:
        """Return labels of the indices for ``gather_along_axis``; None if it does not apply."""
        partial, extra = self.partial, self.other_batch_labels
        if len(partial) != 1 or not self.are_points or len(extra) > 1:
            return None
        if len(self.batching) != len(self.shape) - 1:
            return None
        index_label = extra[0] if extra else ("batch", len(self.batch))
        return [index_label if label == ("window", partial[0]) else label for label in self.labels]

    def windows(self, dimensions: Sequence[int]) -> list[int]:
        """Return the dimensions among these along which a window has more than one element."""
        return [d for d in dimensions if d not in self.batching and self.sizes[d] != 1]

    def limit(self, dimension: int) -> Dim:
        """Return the highest start of a window inside of a dimension: ``size - window size``."""
        return simplify(self.shape[dimension] - self.sizes[dimension])

    # Indices

    def column(self, c: Composer, indices: Var, dimension: int, *, clamp: bool = True) -> Var:
        """Return the indices into one dimension: int32 [*batch]."""
        if dimension not in self.mapped:
            return c.full(0, TensorType(DType.INT32, self.batch))
        element = self.mapped.index(dimension)
        if self.index_axis == indices.rank:
            column = indices
        elif len(self.mapped) == 1:
            column = mb.squeeze(x=indices, axes=[self.index_axis])
        else:
            column = mb.gather(x=indices, indices=np.int32(element), axis=self.index_axis)
        column = as_index(column, self.dtype)
        return _clamp(column, c.size(self.limit(dimension))) if clamp else column

    def matrix(self, c: Composer, indices: Var, dimensions: Sequence[int], *, clamp: bool) -> Var:
        """Return the index vectors of some dimensions: int32 [*batch, count]."""
        if self.index_axis == indices.rank:
            indices = mb.expand_dims(x=indices, axes=[self.index_axis])
        order = [n for n in range(indices.rank) if n != self.index_axis]
        if self.index_axis != indices.rank - 1:
            indices = mb.transpose(x=indices, perm=[*order, self.index_axis])
        elements = [self.mapped.index(d) for d in dimensions]
        if elements != list(range(len(self.mapped))):
            indices = mb.gather(x=indices, indices=np.array(elements, np.int32), axis=-1)
        vectors = as_index(indices, self.dtype)
        if not clamp:
            return vectors
        return _clamp(vectors, c.vector([self.limit(d) for d in dimensions]))

    def begin(self, c: Composer, indices: Var | None, *, clamp: bool = True) -> Var:
        """Return the start of the only window: an index vector of all dimensions."""
        scalars = [
            c.reshape(self.column(c, indices, d, clamp=clamp), ())
            if d in self.partial and d in self.mapped
            else 0
            for d in range(len(self.shape))
        ]
        return join(scalars)

    def inside(self, c: Composer, indices: Var | None) -> Var | None:
        """Return 1 for windows inside of the operand, else 0: [*batch]; None if all are inside."""
        if indices is None or not self.mapped:
            return None
        vectors = self.matrix(c, indices, self.mapped, clamp=False)
        limits = c.vector([self.limit(d) for d in self.mapped])
        if _are_inside(vectors.val, limits):
            return None
        is_inside = mb.equal(x=vectors, y=_clamp(vectors, limits))
        return mb.reduce_min(x=mb.cast(x=is_inside, dtype="int32"), axes=[-1])

    def rows(self, c: Composer, indices: Var | None, rows: Sequence[int], *, clamp: bool) -> Var:
        """Return the starts of windows in the dimensions ``rows`` merged to one: [*batch]."""
        strides = [product([self.shape[n] for n in rows[k + 1 :]]) for k in range(len(rows))]
        total: Var | None = None
        for d, stride in zip(rows, strides, strict=True):
            if d in self.batching:
                batch_dim = self.batching[d]
                sizes = [s if n == batch_dim else 1 for n, s in enumerate(self.batch)]
                part = c.reshape(counting(c, self.shape[d]), sizes)
            elif d in self.mapped:
                part = self.column(c, indices, d, clamp=clamp)
            else:
                continue
            part = part if stride == 1 else mb.mul(x=part, y=c.size(stride))
            total = part if total is None else mb.add(x=total, y=part)
        if total is None:
            return c.full(0, TensorType(DType.INT32, self.batch))
        return c.broadcast(total, self.batch) if self.batch else total

    def offsets(self, c: Composer, rows: Sequence[int]) -> Var | None:
        """Return the offsets of a window's elements from its start: a vector; None if it has one.

        The dimensions ``rows`` are merged to one.
        """
        windows = self.windows(rows)
        total: Var | None = None
        for n, d in enumerate(windows):
            stride = product([self.shape[k] for k in rows[rows.index(d) + 1 :]])
            part = counting(c, self.sizes[d])
            part = part if stride == 1 else mb.mul(x=part, y=c.size(stride))
            part = c.reshape(part, (self.sizes[d], *(1 for _ in windows[n + 1 :])))
            total = part if total is None else mb.add(x=mb.expand_dims(x=total, axes=[-1]), y=part)
        if total is None:
            return None
        return c.reshape(total, (product([self.sizes[d] for d in windows]),))


def spread_windows(starts: Var, offsets: Var | None) -> Var:
    """Return the indices of all elements of windows: a vector, or [*batch] without offsets."""
    if offsets is None:
        return starts
    column = mb.reshape(x=starts, shape=[-1, 1])
    return mb.reshape(x=mb.add(x=column, y=offsets), shape=[-1])


def _are_inside(indices: Any, limits: Any) -> bool:
    """Whether index vectors are known to be in range."""
    if not isinstance(indices, np.ndarray) or not isinstance(limits, np.ndarray):
        return False
    return bool(((indices >= 0) & (indices <= limits)).all())


def _clamp(x: Var, limits: Any) -> Var:
    """Clamp indices to 0 ... limits, int32 numbers or vectors along the last axis."""
    return mb.minimum(x=mb.maximum(x=x, y=np.int32(0)), y=limits)
