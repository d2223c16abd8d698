"""Composition of a scatter: MIL's most specific op for it, else ``scatter`` on flattened data.

A window outside of the tensor changes nothing: its updates become the identity element
of the operation; in mode ``update``, they go to an extra row at the end, which is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, ordered, wrap
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.operations.axes import arrange
from coreml_delegate.graph.operations.lookup import Label, Lookup, spread_windows
from coreml_delegate.graph.operations.slicing import slice_at, write_slice
from coreml_delegate.graph.tensor_types import Dim, DType, product
from coreml_delegate.mil.compose import mb

_OPS = {"add": "add", "sub": "sub", "mul": "mul", "min": "minimum", "max": "maximum"}
_ARITHMETIC = ("add", "sub", "mul")
_EXTREMA = ("min", "max")


def compose_scatter(c: Composer, node: Node, x: Var, indices: Var | None, updates: Any) -> Var:
    """Return a tensor with updates at index vectors; see ``Indexing.scatter``."""
    if updates is None:
        return x
    lookup, labels = _lookup(node)
    mode, dtype = node["mode"], node.type.dtype
    if mode in _EXTREMA:
        x, updates = ordered(x, dtype), ordered(updates, dtype)
    inside = lookup.inside(c, indices)
    if lookup.is_single:
        result = _write_one(c, lookup, x, indices, updates, labels, mode, inside)
    else:
        result = _Writer(c, lookup, mode, dtype, inside).write(x, indices, updates, labels)
    if mode in _ARITHMETIC:
        return wrap(result, dtype)
    return ordered(result, dtype) if mode in _EXTREMA else result


def _lookup(node: Node) -> tuple[Lookup, list[Label]]:
    """Return the lookup, and the labels of the updates' dimensions."""
    updates, numbers = node.types[2].shape, node["numbers"]
    rank = node.types[0].rank
    window = dict(zip(numbers.window_dims(rank), numbers.slice_dims, strict=True))
    lookup = Lookup.of(node, [updates[window[d]] if d in window else 1 for d in range(rank)])
    return lookup, lookup.slice_labels(numbers, len(updates))


def _write_one(
    c: Composer,
    lookup: Lookup,
    x: Var,
    indices: Var | None,
    update: Var,
    labels: Sequence[Label],
    mode: str,
    inside: Var | None,
) -> Var:
    """Write the only window as a slice."""
    update = arrange(update, labels, lookup.labels)
    region = (lookup.shape, lookup.sizes)
    begin = lookup.begin(c, indices) if lookup.partial else None
    if mode != "update" or inside is not None:
        current = x if begin is None else slice_at(c, x, begin, *region)
        if mode != "update":
            update = getattr(mb, _OPS[mode])(x=current, y=update)
        if inside is not None:
            flag = mb.cast(x=c.reshape(inside, (1,) * x.rank), dtype="bool")
            update = mb.select(cond=flag, a=update, b=current)
    return update if begin is None else write_slice(c, x, update, begin, *region)


class _Writer:
    """Writes several windows.

    Args:
        c: Composer.
        lookup: The windows.
        mode: MIL's mode of the scatter.
        dtype: Element type of the tensor.
        inside: 1 for windows inside of the tensor, else 0, [*batch]; None if all are inside.
    """

    def __init__(
        self, c: Composer, lookup: Lookup, mode: str, dtype: DType, inside: Var | None
    ) -> None:
        self.c = c
        self.lookup = lookup
        self.mode = mode
        self.dtype = dtype
        self.inside = inside
        self.pads_end = mode == "update" and inside is not None
        """Whether windows outside of the tensor are written to an extra row at the end."""

    def write(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Return ``x`` with the updates."""
        lookup, partial = self.lookup, self.lookup.partial
        if lookup.along_axis() is not None and partial[0] in lookup.mapped:
            return self._write_along_axis(x, indices, updates, labels)
        if len(partial) == 1 and not lookup.batching:
            return self._write_slices(x, indices, updates, labels)
        mapped = all(d in lookup.mapped for d in partial)
        if partial and lookup.are_points and mapped and not lookup.batching:
            return self._write_points(x, indices, updates, labels)
        return self._write_rows(x, indices, updates, labels)

    def _write_along_axis(self, x: Var, indices: Var, updates: Var, labels: Sequence[Label]) -> Var:
        """Write an update for each index, along one dimension (scatter_along_axis)."""
        c, lookup = self.c, self.lookup
        (axis,) = lookup.partial
        want = lookup.along_axis() or []
        positions = lookup.column(c, indices, axis)
        positions = self._redirect_outside(positions, lookup.shape[axis])
        positions = arrange(positions, lookup.batch_labels, want)
        updates = self._neutralize(arrange(updates, labels, want), want)
        x = self._pad_end(x, axis)
        x = mb.scatter_along_axis(
            data=x, indices=positions, updates=updates, axis=axis, mode=self.mode
        )
        return self._crop_end(x, axis)

    def _write_slices(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Write slices along one dimension (scatter)."""
        c, lookup = self.c, self.lookup
        (axis,) = lookup.partial
        positions = lookup.column(c, indices, axis)
        window: list[Label] = [("window", axis)] if lookup.sizes[axis] != 1 else []
        unindexed = lookup.unindexed([axis], labels)
        before = [label for label in unindexed if label[1] < axis]
        after = [label for label in unindexed if label[1] > axis]
        want = [*before, *lookup.batch_labels, *window, *after]
        updates = self._neutralize(arrange(updates, labels, want), want)
        count = product([*lookup.batch, lookup.sizes[axis]])
        positions = self._windows(positions, lookup.offsets(c, [axis]), lookup.shape[axis], count)
        shape = [*lookup.shape[:axis], count, *lookup.shape[axis + 1 :]]
        x = mb.scatter(
            data=self._pad_end(x, axis),
            indices=positions,
            updates=c.reshape(updates, shape),
            axis=axis,
            mode=self.mode,
        )
        return self._crop_end(x, axis)

    def _write_points(self, x: Var, indices: Var, updates: Var, labels: Sequence[Label]) -> Var:
        """Write elements, or slices, at coordinates (scatter_nd)."""
        c, lookup, points = self.c, self.lookup, self.lookup.partial
        slice_labels = lookup.unindexed(points, labels)
        order: list[Label] = [*(("window", d) for d in points), *slice_labels]
        coordinates = lookup.matrix(c, indices, points, clamp=True)
        if self.pads_end:
            flag = mb.cast(x=mb.expand_dims(x=self.inside, axes=[-1]), dtype="bool")
            end = c.vector([lookup.shape[points[0]], *(0 for _ in points[1:])])
            coordinates = mb.select(cond=flag, a=coordinates, b=end)
        want = [*lookup.batch_labels, *slice_labels]
        updates = self._neutralize(arrange(updates, labels, want), want)
        x = self._pad_end(arrange(x, lookup.labels, order), 0)
        x = mb.scatter_nd(data=x, indices=coordinates, updates=updates, mode=self.mode)
        return arrange(self._crop_end(x, 0), order, lookup.labels)

    def _write_rows(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Merge the indexed dimensions, and write rows (scatter)."""
        c, lookup = self.c, self.lookup
        rows = sorted([*lookup.partial, *lookup.batching])
        row_labels = lookup.unindexed(rows, labels)
        sizes = [lookup.shape[d] for d in (*rows, *(d for _, d in row_labels))]
        height, width = product(sizes[: len(rows)]), product(sizes[len(rows) :])
        windows: list[Label] = [("window", d) for d in lookup.windows(rows)]
        want = [*lookup.batch_labels, *windows, *row_labels]
        updates = self._neutralize(arrange(updates, labels, want), want)
        count = product([*lookup.batch, *(lookup.sizes[d] for _, d in windows)])
        starts = lookup.rows(c, indices, rows, clamp=True)
        positions = self._windows(starts, lookup.offsets(c, rows), height, count)
        order = [*(lookup.labels[d] for d in rows), *row_labels]
        x = c.reshape(arrange(x, lookup.labels, order), (height, width))
        x = mb.scatter(
            data=self._pad_end(x, 0),
            indices=positions,
            updates=c.reshape(updates, (count, width)),
            axis=0,
            mode=self.mode,
        )
        return arrange(c.reshape(self._crop_end(x, 0), sizes), order, lookup.labels)

    # Windows outside of the tensor

    def _neutralize(self, updates: Var, labels: Sequence[Label]) -> Var:
        """Replace the updates of windows outside of the tensor by the identity element."""
        if self.inside is None or self.pads_end:
            return updates
        flag = arrange(self.inside, self.lookup.batch_labels, labels)
        cond = mb.cast(x=flag, dtype="bool")
        return mb.select(cond=cond, a=updates, b=_identity(self.mode, self.dtype))

    def _redirect_outside(self, positions: Var, end: Dim) -> Var:
        """Replace the indices [*batch] of windows outside of the tensor by ``end``."""
        if not self.pads_end:
            return positions
        size = self.c.size(end)
        return mb.select(cond=mb.cast(x=self.inside, dtype="bool"), a=positions, b=size)

    def _windows(self, starts: Var, offsets: Var | None, end: Dim, count: Dim) -> Var:
        """Return the indices of all elements of windows, as a vector."""
        c = self.c
        if offsets is None:
            return c.reshape(self._redirect_outside(starts, end), (count,))
        if not self.pads_end:
            return spread_windows(starts, offsets)
        positions = mb.add(x=mb.reshape(x=starts, shape=[-1, 1]), y=offsets)
        cond = mb.cast(x=mb.reshape(x=self.inside, shape=[-1, 1]), dtype="bool")
        return mb.reshape(x=mb.select(cond=cond, a=positions, b=c.size(end)), shape=[-1])

    def _pad_end(self, x: Var, axis: int) -> Var:
        """Return ``x`` with an extra row at the end of an axis, a copy of the first."""
        if not self.pads_end:
            return x
        is_unsliced = [n != axis for n in range(x.rank)]
        extra_row = mb.slice_by_index(
            x=x,
            begin=[0] * x.rank,
            end=[int(n == axis) for n in range(x.rank)],
            begin_mask=is_unsliced,
            end_mask=is_unsliced,
        )
        return mb.concat(values=[x, extra_row], axis=axis)

    def _crop_end(self, x: Var, axis: int) -> Var:
        """Return ``x`` without the extra row."""
        if not self.pads_end:
            return x
        is_unsliced = [n != axis for n in range(x.rank)]
        return mb.slice_by_index(
            x=x,
            begin=[0] * x.rank,
            end=[-int(n == axis) for n in range(x.rank)],
            begin_mask=[True] * x.rank,
            end_mask=is_unsliced,
        )


def _identity(mode: str, dtype: DType) -> Any:
    """Return a mode's identity element in the storage dtype, for extrema after ``ordered``."""
    storage = dtype.storage_numpy if dtype.storage_dtype != "bool" else np.dtype(np.int32)
    if mode in ("add", "sub"):
        return storage.type(-0.0 if dtype.is_float and mode == "add" else 0)
    if mode == "mul":
        return storage.type(1)
    if dtype.is_float:
        return storage.type(-np.inf if mode == "max" else np.inf)
    bounds = np.iinfo(np.int32)
    return storage.type(bounds.min if mode == "max" else bounds.max)
