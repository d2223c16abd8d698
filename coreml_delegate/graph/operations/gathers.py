"""Composition of a gather: MIL's most specific op for it, else ``gather`` on flattened data."""

from __future__ import annotations

from coreml_delegate.graph.compose import Composer, Var, const
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.operations.axes import arrange
from coreml_delegate.graph.operations.lookup import Label, Lookup, spread_windows
from coreml_delegate.graph.operations.slicing import slice_at
from coreml_delegate.graph.tensor_types import product
from coreml_delegate.mil.compose import mb
from coreml_delegate.targets import Opset


def compose_gather(c: Composer, node: Node, x: Var, indices: Var | None) -> Var:
    """Return slices at index vectors; see ``Indexing.gather``."""
    lookup = Lookup.of(node, node["slice_sizes"])
    want = lookup.slice_labels(node["numbers"], node.type.rank)
    smaller = lookup.cropped()
    if smaller.shape != lookup.shape:
        x = slice_at(c, x, const([0] * len(lookup.shape)), lookup.shape, smaller.shape)
        lookup = smaller
    partial = lookup.partial
    if not partial:
        return c.broadcast(arrange(x, lookup.labels, want), node.type.shape)
    clamp = node["mode"] == "clip"
    if lookup.is_single and (len(partial) > 1 or not lookup.are_points):
        begin = lookup.begin(c, indices, clamp=clamp)
        x = slice_at(c, x, begin, lookup.shape, lookup.sizes)
        return arrange(x, lookup.labels, want)
    if len(partial) == 1 and (not lookup.batching or c.opset >= Opset.iOS16):
        return arrange(*_gather_axis(c, lookup, x, indices, clamp, want), want)
    if lookup.are_points and (not lookup.batching or c.opset >= Opset.iOS16):
        return arrange(*_gather_points(c, lookup, x, indices, clamp, want), want)
    return arrange(*_gather_rows(c, lookup, x, indices, clamp, want), want)


def _gather_axis(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Gather along one dimension; return the result and its labels."""
    (axis,) = lookup.partial
    positions = lookup.column(c, indices, axis, clamp=clamp)
    labels = lookup.along_axis()
    if labels is not None:
        positions = arrange(positions, lookup.batch_labels, labels)
        return mb.gather_along_axis(x=x, indices=positions, axis=axis), labels
    data_labels = sorted([("window", axis), *lookup.unindexed([axis], want)])
    batching, other_labels = lookup.batching_labels, lookup.other_batch_labels
    x = arrange(x, lookup.labels, [*batching, *data_labels])
    positions = arrange(positions, lookup.batch_labels, [*batching, *other_labels])
    labels_read = other_labels
    if lookup.sizes[axis] != 1:
        offsets = lookup.offsets(c, [axis])
        positions = mb.add(x=mb.expand_dims(x=positions, axes=[-1]), y=offsets)
        labels_read = [*other_labels, ("window", axis)]
    position = data_labels.index(("window", axis))
    batch = {"batch_dims": len(batching)} if batching else {}
    x = mb.gather(x=x, indices=positions, axis=len(batching) + position, **batch)
    before, after = data_labels[:position], data_labels[position + 1 :]
    return x, [*batching, *before, *labels_read, *after]


def _gather_points(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Gather elements, or slices, at coordinates (gather_nd); return the result and its labels."""
    points = lookup.partial
    batching, other_labels = lookup.batching_labels, lookup.other_batch_labels
    slice_labels = lookup.unindexed(points, want)
    x = arrange(x, lookup.labels, [*batching, *(("window", d) for d in points), *slice_labels])
    depth: Label = ("depth", 0)
    coordinates = lookup.matrix(c, indices, points, clamp=clamp)
    coordinates = arrange(
        coordinates, [*lookup.batch_labels, depth], [*batching, *other_labels, depth]
    )
    batch = {"batch_dims": len(batching)} if batching else {}
    return mb.gather_nd(x=x, indices=coordinates, **batch), [
        *batching,
        *other_labels,
        *slice_labels,
    ]


def _gather_rows(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Merge the indexed dimensions, and gather rows; return the result and its labels."""
    rows = sorted([*lookup.partial, *lookup.batching])
    row_labels = lookup.unindexed(rows, want)
    x = arrange(x, lookup.labels, [*(lookup.labels[d] for d in rows), *row_labels])
    row_sizes = [lookup.shape[d] for _, d in row_labels]
    x = c.reshape(x, [product([lookup.shape[d] for d in rows]), *row_sizes])
    starts = lookup.rows(c, indices, rows, clamp=clamp)
    positions = spread_windows(starts, lookup.offsets(c, rows))
    gathered = mb.gather(x=x, indices=positions, axis=0)
    windows = lookup.windows(rows)
    sizes = [*lookup.batch, *(lookup.sizes[d] for d in windows), *row_sizes]
    labels = [*lookup.batch_labels, *(("window", d) for d in windows), *row_labels]
    return c.reshape(gathered, sizes), labels
