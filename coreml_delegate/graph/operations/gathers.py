"""Composition of a gather in MIL: the most specific op that does it, else one on flattened data."""

from __future__ import annotations

from coreml_delegate.graph.compose import Composer, Var
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.operations.axes import product
from coreml_delegate.graph.operations.lookup import Label, Lookup, arranged, spread_windows
from coreml_delegate.graph.operations.slicing import slice_at
from coreml_delegate.targets import Opset


def compose_gather(c: Composer, node: Node, x: Var, indices: Var | None) -> Var:
    """Return what index vectors point to; see ``Indexing.gather``."""
    lookup = Lookup.of(
        node,
        node["slice_sizes"],
        node["operand_batching_dims"],
        node["start_indices_batching_dims"],
        node["start_index_map"],
    )
    want = _result_labels(node, lookup)
    smaller = lookup.cropped()
    if smaller.shape != lookup.shape:
        x = slice_at(c, x, c.const([0] * len(lookup.shape)), lookup.shape, smaller.shape)
        lookup = smaller
    partial = lookup.partial
    if not partial:
        return c.broadcast(arranged(c, x, lookup.labels, want), node.type.shape)
    clamp = node["mode"] == "clip"
    if lookup.is_single and (len(partial) > 1 or not lookup.are_points):
        begin = lookup.begin(c, indices, clamp=clamp)
        x = slice_at(c, x, begin, lookup.shape, lookup.sizes)
        return arranged(c, x, lookup.labels, want)
    if len(partial) == 1 and (not lookup.batching or c.opset >= Opset.iOS16):
        return arranged(c, *_along_one(c, lookup, x, indices, clamp, want), want)
    if lookup.are_points and (not lookup.batching or c.opset >= Opset.iOS16):
        return arranged(c, *_at_points(c, lookup, x, indices, clamp, want), want)
    return arranged(c, *_flattened(c, lookup, x, indices, clamp, want), want)


def _result_labels(node: Node, lookup: Lookup) -> list[Label]:
    dropped = {*node["collapsed_slice_dims"], *lookup.batching}
    windows = iter([("window", d) for d in range(len(lookup.shape)) if d not in dropped])
    batch = iter(lookup.batch_labels)
    offsets = node["offset_dims"]
    return [next(windows if n in offsets else batch) for n in range(node.type.rank)]


def _rest(lookup: Lookup, indexed: list[int], want: list[Label]) -> list[int]:
    """Return the dimensions that are not indexed, without those that the result lacks."""
    return [d for d in range(len(lookup.shape)) if d not in indexed and ("window", d) in want]


def _along_one(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Gather along one dimension; return the result and its labels."""
    (axis,) = lookup.partial
    places = lookup.column(c, indices, axis, clamp=clamp)
    labels = lookup.along_axis()
    if labels is not None:
        places = arranged(c, places, lookup.batch_labels, labels)
        return c.mb.gather_along_axis(x=x, indices=places, axis=axis), labels
    others = sorted([axis, *_rest(lookup, [axis], want)])
    linked, extra = lookup.linked_labels, lookup.extra_labels
    x = arranged(c, x, lookup.labels, [*linked, *(("window", d) for d in others)])
    places = arranged(c, places, lookup.batch_labels, [*linked, *extra])
    read = extra
    if lookup.sizes[axis] != 1:
        offsets = lookup.offsets(c, [axis])
        places = c.mb.add(x=c.mb.expand_dims(x=places, axes=[-1]), y=offsets)
        read = [*extra, ("window", axis)]
    at = others.index(axis)
    batch = {"batch_dims": len(linked)} if linked else {}
    x = c.mb.gather(x=x, indices=places, axis=len(linked) + at, **batch)
    before, after = others[:at], others[at + 1 :]
    return x, [*linked, *(("window", d) for d in before), *read, *(("window", d) for d in after)]


def _at_points(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Gather elements, or slices, at coordinates; return the result and its labels."""
    points = lookup.partial
    linked, extra = lookup.linked_labels, lookup.extra_labels
    left: list[Label] = [("window", d) for d in _rest(lookup, points, want)]
    x = arranged(c, x, lookup.labels, [*linked, *(("window", d) for d in points), *left])
    depth: Label = ("depth", 0)
    places = lookup.matrix(c, indices, points, clamp=clamp)
    places = arranged(c, places, [*lookup.batch_labels, depth], [*linked, *extra, depth])
    batch = {"batch_dims": len(linked)} if linked else {}
    return c.mb.gather_nd(x=x, indices=places, **batch), [*linked, *extra, *left]


def _flattened(
    c: Composer, lookup: Lookup, x: Var, indices: Var, clamp: bool, want: list[Label]
) -> tuple[Var, list[Label]]:
    """Gather rows of the tensor whose indexed dimensions are one; return it and its labels."""
    rows = sorted([*lookup.partial, *lookup.batching])
    rest = _rest(lookup, rows, want)
    left: list[Label] = [("window", d) for d in rest]
    x = arranged(c, x, lookup.labels, [*(lookup.labels[d] for d in rows), *left])
    left_sizes = [lookup.shape[d] for d in rest]
    x = c.reshape(x, [product([lookup.shape[d] for d in rows]), *left_sizes])
    starts = lookup.rows(c, indices, rows, clamp=clamp)
    places = spread_windows(c, starts, lookup.offsets(c, rows))
    found = c.mb.gather(x=x, indices=places, axis=0)
    windows = lookup.windows(rows)
    sizes = [*lookup.batch, *(lookup.sizes[d] for d in windows), *left_sizes]
    labels = [*lookup.batch_labels, *(("window", d) for d in windows), *left]
    return c.reshape(found, sizes), labels
