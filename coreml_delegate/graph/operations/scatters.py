"""Composition of a scatter in MIL: the most specific op that does it, else one on flattened data.

A window that is not inside of the tensor changes nothing: its updates become the identity of the
operation, or go to an element behind the tensor's own where they replace what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.operations.axes import product
from coreml_delegate.graph.operations.lookup import Label, Lookup, arranged, spread_windows
from coreml_delegate.graph.operations.slicing import slice_at, write_slice
from coreml_delegate.graph.tensor_types import Dim, DType

_OPS = {"add": "add", "sub": "sub", "mul": "mul", "min": "minimum", "max": "maximum"}
_ARITHMETIC = ("add", "sub", "mul")
_EXTREMA = ("min", "max")


def compose_scatter(c: Composer, node: Node, x: Var, indices: Var | None, updates: Any) -> Var:
    """Return a tensor with updates where index vectors point to; see ``Indexing.scatter``."""
    if updates is None:
        return x
    lookup, labels = _lookup(node)
    mode, dtype = node["mode"], node.type.dtype
    if mode in _EXTREMA:
        x, updates = c.ordered(x, dtype), c.ordered(updates, dtype)
    inside = lookup.inside(c, indices)
    if lookup.is_single:
        found = _write_one(c, lookup, x, indices, updates, labels, mode, inside)
    else:
        found = _Writer(c, lookup, mode, dtype, inside).write(x, indices, updates, labels)
    if mode in _ARITHMETIC:
        return c.wrap(found, dtype)
    return c.ordered(found, dtype) if mode in _EXTREMA else found


def _lookup(node: Node) -> tuple[Lookup, list[Label]]:
    """Return the lookup, and labels for the updates."""
    rank = node.types[0].rank
    updates = node.types[2].shape
    dropped = {*node["inserted_window_dims"], *node["input_batching_dims"]}
    kept = [d for d in range(rank) if d not in dropped]
    window = dict(zip(kept, node["update_window_dims"], strict=True))
    lookup = Lookup.of(
        node,
        [updates[window[d]] if d in window else 1 for d in range(rank)],
        node["input_batching_dims"],
        node["scatter_indices_batching_dims"],
        node["scatter_dims_to_operand_dims"],
    )
    windows, batch = iter(kept), iter(lookup.batch_labels)
    labels = [
        ("window", next(windows)) if n in node["update_window_dims"] else next(batch)
        for n in range(len(updates))
    ]
    return lookup, labels


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
    update = arranged(c, update, labels, lookup.labels)
    region = (lookup.shape, lookup.sizes)
    begin = lookup.begin(c, indices) if lookup.partial else None
    if mode != "update" or inside is not None:
        current = x if begin is None else slice_at(c, x, begin, *region)
        if mode != "update":
            update = getattr(c.mb, _OPS[mode])(x=current, y=update)
        if inside is not None:
            flag = c.mb.cast(x=c.reshape(inside, (1,) * x.rank), dtype="bool")
            update = c.mb.select(cond=flag, a=update, b=current)
    return update if begin is None else write_slice(c, x, update, begin, *region)


class _Writer:
    """Writes several windows.

    Args:
        c: Composer.
        lookup: Where they are.
        mode: Of MIL.
        dtype: Of the tensor.
        inside: Which of them are inside of the tensor, [*batch]; None if all are.
    """

    def __init__(
        self, c: Composer, lookup: Lookup, mode: str, dtype: DType, inside: Var | None
    ) -> None:
        self.c = c
        self.lookup = lookup
        self.mode = mode
        self.dtype = dtype
        self.inside = inside
        self.is_behind = mode == "update" and inside is not None
        """Whether windows that are not inside are written behind the end."""

    def write(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Return ``x`` with the updates."""
        lookup, partial = self.lookup, self.lookup.partial
        if lookup.along_axis() is not None and partial[0] in lookup.mapped:
            return self._along_axis(x, indices, updates, labels)
        if len(partial) == 1 and not lookup.batching:
            return self._slices(x, indices, updates, labels)
        mapped = all(d in lookup.mapped for d in partial)
        if partial and lookup.are_points and mapped and not lookup.batching:
            return self._at_points(x, indices, updates, labels)
        return self._flattened(x, indices, updates, labels)

    def _along_axis(self, x: Var, indices: Var, updates: Var, labels: Sequence[Label]) -> Var:
        """One index per update, along one dimension."""
        c, lookup = self.c, self.lookup
        (axis,) = lookup.partial
        want = lookup.along_axis() or []
        places = lookup.column(c, indices, axis)
        places = self._put_behind(places, lookup.shape[axis])
        places = arranged(c, places, lookup.batch_labels, want)
        updates = self._neutral(arranged(c, updates, labels, want), want)
        x = self._extended(x, axis)
        x = c.mb.scatter_along_axis(
            data=x, indices=places, updates=updates, axis=axis, mode=self.mode
        )
        return self._cut(x, axis)

    def _slices(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Slices along one dimension."""
        c, lookup = self.c, self.lookup
        (axis,) = lookup.partial
        places = lookup.column(c, indices, axis)
        window: list[Label] = [("window", axis)] if lookup.sizes[axis] != 1 else []
        rest = _rest(lookup, [axis], labels)
        before: list[Label] = [("window", d) for d in rest if d < axis]
        after: list[Label] = [("window", d) for d in rest if d > axis]
        want = [*before, *lookup.batch_labels, *window, *after]
        updates = self._neutral(arranged(c, updates, labels, want), want)
        count = product([*lookup.batch, lookup.sizes[axis]])
        places = self._windows(places, lookup.offsets(c, [axis]), lookup.shape[axis], count)
        shape = [*lookup.shape[:axis], count, *lookup.shape[axis + 1 :]]
        x = c.mb.scatter(
            data=self._extended(x, axis),
            indices=places,
            updates=c.reshape(updates, shape),
            axis=axis,
            mode=self.mode,
        )
        return self._cut(x, axis)

    def _at_points(self, x: Var, indices: Var, updates: Var, labels: Sequence[Label]) -> Var:
        """Elements, or slices, at coordinates."""
        c, lookup, points = self.c, self.lookup, self.lookup.partial
        rest: list[Label] = [("window", d) for d in _rest(lookup, points, labels)]
        order: list[Label] = [*(("window", d) for d in points), *rest]
        places = lookup.matrix(c, indices, points, clamp=True)
        if self.is_behind:
            flag = c.mb.cast(x=c.mb.expand_dims(x=self.inside, axes=[-1]), dtype="bool")
            behind = c.shape([lookup.shape[points[0]], *(0 for _ in points[1:])])
            behind = np.array(behind, np.int32) if isinstance(behind, list) else behind
            places = c.mb.select(cond=flag, a=places, b=behind)
        want = [*lookup.batch_labels, *rest]
        updates = self._neutral(arranged(c, updates, labels, want), want)
        x = self._extended(arranged(c, x, lookup.labels, order), 0)
        x = c.mb.scatter_nd(data=x, indices=places, updates=updates, mode=self.mode)
        return arranged(c, self._cut(x, 0), order, lookup.labels)

    def _flattened(self, x: Var, indices: Any, updates: Var, labels: Sequence[Label]) -> Var:
        """Rows of the tensor whose indexed dimensions are one."""
        c, lookup = self.c, self.lookup
        rows = sorted([*lookup.partial, *lookup.batching])
        rest = _rest(lookup, rows, labels)
        left: list[Label] = [("window", d) for d in rest]
        sizes = [lookup.shape[d] for d in (*rows, *rest)]
        height, width = product(sizes[: len(rows)]), product(sizes[len(rows) :])
        windows: list[Label] = [("window", d) for d in lookup.windows(rows)]
        want = [*lookup.batch_labels, *windows, *left]
        updates = self._neutral(arranged(c, updates, labels, want), want)
        count = product([*lookup.batch, *(lookup.sizes[d] for _, d in windows)])
        starts = lookup.rows(c, indices, rows, clamp=True)
        places = self._windows(starts, lookup.offsets(c, rows), height, count)
        order = [*(lookup.labels[d] for d in rows), *left]
        x = c.reshape(arranged(c, x, lookup.labels, order), (height, width))
        x = c.mb.scatter(
            data=self._extended(x, 0),
            indices=places,
            updates=c.reshape(updates, (count, width)),
            axis=0,
            mode=self.mode,
        )
        return arranged(c, c.reshape(self._cut(x, 0), sizes), order, lookup.labels)

    # Windows that are not inside

    def _neutral(self, updates: Var, labels: Sequence[Label]) -> Var:
        """Return updates of these labels that change nothing where windows are not inside."""
        if self.inside is None or self.is_behind:
            return updates
        c = self.c
        flag = arranged(c, self.inside, self.lookup.batch_labels, labels)
        cond = c.mb.cast(x=flag, dtype="bool")
        return c.mb.select(cond=cond, a=updates, b=_identity(self.mode, self.dtype))

    def _put_behind(self, places: Var, end: Dim) -> Var:
        """Return indices [*batch] that are behind the end where windows are not inside."""
        if not self.is_behind:
            return places
        c, size = self.c, self.c.size(end)
        cond = c.mb.cast(x=self.inside, dtype="bool")
        return c.mb.select(cond=cond, a=places, b=np.int32(size) if isinstance(size, int) else size)

    def _windows(self, starts: Var, offsets: Var | None, end: Dim, count: Dim) -> Var:
        """Return indices of all elements of windows, as a vector."""
        c = self.c
        if offsets is None:
            return c.reshape(self._put_behind(starts, end), (count,))
        if not self.is_behind:
            return spread_windows(c, starts, offsets)
        places = c.mb.add(x=c.mb.reshape(x=starts, shape=[-1, 1]), y=offsets)
        cond = c.mb.cast(x=c.mb.reshape(x=self.inside, shape=[-1, 1]), dtype="bool")
        size = c.size(end)
        last = np.int32(size) if isinstance(size, int) else size
        return c.mb.reshape(x=c.mb.select(cond=cond, a=places, b=last), shape=[-1])

    def _extended(self, x: Var, axis: int) -> Var:
        """Return ``x`` with room behind the end of an axis."""
        if not self.is_behind:
            return x
        first = [n != axis for n in range(x.rank)]
        room = self.c.mb.slice_by_index(
            x=x,
            begin=[0] * x.rank,
            end=[int(n == axis) for n in range(x.rank)],
            begin_mask=first,
            end_mask=first,
        )
        return self.c.mb.concat(values=[x, room], axis=axis)

    def _cut(self, x: Var, axis: int) -> Var:
        """Return ``x`` without that room."""
        if not self.is_behind:
            return x
        others = [n != axis for n in range(x.rank)]
        return self.c.mb.slice_by_index(
            x=x,
            begin=[0] * x.rank,
            end=[-int(n == axis) for n in range(x.rank)],
            begin_mask=[True] * x.rank,
            end_mask=others,
        )


def _rest(lookup: Lookup, indexed: Sequence[int], labels: Sequence[Label]) -> list[int]:
    """Return the dimensions that are not indexed, without those that the updates lack."""
    return [d for d in range(len(lookup.shape)) if d not in indexed and ("window", d) in labels]


def _identity(mode: str, dtype: DType) -> Any:
    """Return what changes nothing, as the storage dtype; extrema are of ordered storage dtypes."""
    storage = dtype.storage_numpy if dtype.storage_dtype != "bool" else np.dtype(np.int32)
    if mode in ("add", "sub"):
        return storage.type(-0.0 if dtype.is_float and mode == "add" else 0)
    if mode == "mul":
        return storage.type(1)
    if dtype.is_float:
        return storage.type(-np.inf if mode == "max" else np.inf)
    bounds = np.iinfo(np.int32)
    return storage.type(bounds.min if mode == "max" else bounds.max)
