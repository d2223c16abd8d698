"""Rewrites of gathering and scattering."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.fx import Node

from coreml_delegate.op_rules.indexing import leading
from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    arguments_of,
    become,
    cast,
    cast_after,
    insert,
    set_arguments,
    shape_of,
    value_of,
)


def _index_put(node: Node) -> None:
    """Write along one dimension other than the first, which coremltools does not index.

    Whole dimensions at the end are left out: with them it takes only single positions.
    """
    arguments = arguments_of(node)
    indices, values = leading(arguments["indices"]), arguments["values"]
    dim = len(indices) - 1
    if dim == 0 or None not in indices:
        become(node, node.target, arguments["self"], indices, values, arguments["accumulate"])
        return
    index = indices[dim]
    shape = shape_of(node)
    shape[dim] = shape_of(index)[0]
    aligned = [-1 if d == dim else 1 for d in range(len(shape))]
    index = insert(node, ATEN.view_copy.default, index, aligned)
    index = insert(node, ATEN.expand_copy.default, index, shape)
    values = insert(node, ATEN.expand_copy.default, values, shape)
    target = ATEN.scatter_add.default if arguments["accumulate"] else ATEN.scatter.src
    become(node, target, arguments["self"], dim, index, values)


def _of_truths(rewrite: Rewrite | None = None) -> Rewrite:
    """Gather truths as integers: MIL gathers none."""

    def rewritten(node: Node) -> None:
        data, dtype = arguments_of(node)["self"], value_of(node).dtype
        if dtype is torch.bool:
            set_arguments(node, self=cast(node, data, torch.int32))
            taken = insert(node, node.target, *node.args, **node.kwargs)
            become(node, ATEN._to_copy.default, taken, dtype=dtype)
            node = taken
        if rewrite is not None:
            rewrite(node)

    return rewritten


def _cut(node: Node, x: Node, sizes: list[int], dim: int | None) -> Node:
    """The first elements of ``x`` along every dimension but ``dim``."""
    for d, size in enumerate(sizes):
        if d != dim and shape_of(x)[d] != size:
            x = insert(node, ATEN.slice_copy.Tensor, x, d, 0, size, 1)
    return x


def _gather(node: Node) -> None:
    """Gather from the part of the data that the index spans; MIL wants whole dimensions."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    become(node, node.target, _cut(node, data, shape_of(index), dim), dim, index)


def _scatter(node: Node) -> None:
    """Scatter into the part of the data that the index spans, and put that part back."""
    arguments = arguments_of(node)
    data, index = arguments["self"], arguments["index"]
    dim = arguments["dim"] % value_of(data).dim()
    sizes = shape_of(index)
    source = arguments.get("src", arguments.get("value"))
    if isinstance(source, Node):
        source = _cut(node, source, sizes, None)
    else:
        source = cast(node, source, value_of(node).dtype)
    parts = [data]
    cuts: list[tuple[int, int]] = []
    for d, size in enumerate(sizes):
        if d != dim and shape_of(data)[d] != size:
            cuts.append((d, size))
            parts.append(insert(node, ATEN.slice_copy.Tensor, parts[-1], d, 0, size, 1))
    if not cuts:
        become(node, node.target, data, dim, index, source)
        return
    written = insert(node, node.target, parts[-1], dim, index, source)
    for (d, size), whole in zip(reversed(cuts[1:]), reversed(parts[1:-1]), strict=True):
        written = insert(node, ATEN.slice_scatter.default, whole, written, d, 0, size, 1)
    d, size = cuts[0]
    become(node, ATEN.slice_scatter.default, data, written, d, 0, size, 1)


def _searchsorted(node: Node) -> None:
    """The side as a flag, and nothing else, which coremltools would have to overlook."""
    arguments = arguments_of(node)
    right = arguments["side"] == "right" or (arguments["side"] is None and arguments["right"])
    become(node, node.target, arguments["sorted_sequence"], arguments["self"], right=right)
    cast_after(node)


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.gather.default": _of_truths(_gather),
        "aten.index.Tensor": _of_truths(),
        "aten.index_put.default": _index_put,
        "aten.index_select.default": _of_truths(),
        "aten.scatter.src": _scatter,
        "aten.scatter.value": _scatter,
        "aten.scatter_add.default": _scatter,
        "aten.searchsorted.Tensor": _searchsorted,
    }
)
