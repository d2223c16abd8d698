"""Computations on the rows that a mask selects, as computations on all rows.

``y[mask] = f(x[mask])`` computes as many rows as the mask has true elements. Core ML has no tensor
of such a size. If ``f`` treats each row by itself, the assignment is ``where(mask, f(x), y)``, and
a sum of the rows is a sum of ``where(mask, f(x), 0)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.ops.call import tensors_of
from coreml_delegate.ops.edits import arguments_of, insert, shape_of, value_of
from coreml_delegate.ops.sizes import is_size
from coreml_delegate.patches.torch import OpOverload, pytree
from coreml_delegate.transforms.executorch_gaps import ASSERTIONS

_ATEN: Any = torch.ops.aten


def compute_all_rows(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with functions of selected rows as functions of all rows."""
    if not any(map(_selects, program.graph.nodes)):
        return program
    functional = program.run_decompositions({})
    graph = functional.graph
    for node in list(filter(_selects, graph.nodes)):
        if node.users:
            selection = _Selection(_mask(node))
            if selection.collect(graph.nodes):
                selection.compute_all()
                graph.eliminate_dead_code()
    functional.graph_module.recompile()
    return functional


@dataclass
class _Selection:
    """The rows that a mask selects, and what depends on them, each in order of execution.

    Attributes:
        mask: The mask.
        rows: Tensors that have one row for each true element of the mask.
        results: Calls that take such tensors, and return others.
        numbers: Sizes of such tensors, and numbers computed from them.
        assertions: Calls that check such numbers.
    """

    mask: Node
    rows: dict[Node, None] = field(default_factory=dict[Node, None])
    results: dict[Node, None] = field(default_factory=dict[Node, None])
    numbers: dict[Node, None] = field(default_factory=dict[Node, None])
    assertions: dict[Node, None] = field(default_factory=dict[Node, None])

    def collect(self, nodes: Iterable[Node]) -> bool:
        """Collect what depends on the rows; return whether all of it can be rewritten."""
        if _sizes_for_view(self.mask).count(-1) > 1:
            return False
        for node in nodes:
            if self._is_selection(node) or any(self._depends(n) for n in node.all_input_nodes):
                group = self._group_of(node)
                if group is None or (group is self.rows and _has_empty_rows(node)):
                    return False
                group[node] = None
        return bool(self.results)

    def _is_selection(self, node: Node) -> bool:
        return _selects(node) and _same(_mask(node), self.mask)

    def _depends(self, node: Node) -> bool:
        return node in self.rows or node in self.numbers

    def _group_of(self, node: Node) -> dict[Node, None] | None:
        """Return the group that a node is to be added to, None if it cannot be rewritten."""
        if self._is_selection(node):
            is_first = not any(map(self._depends, node.all_input_nodes))
            return self.rows if is_first and -1 not in _sizes_for_view(node)[1:] else None
        if is_size(node):
            return self.numbers
        if node.target in ASSERTIONS:
            return self.assertions
        if any(n in self.numbers for n in node.all_input_nodes):
            return None
        if self._is_result(node):
            return self.results
        return self.rows if _keeps_rows_apart(node, self.rows) else None

    def _is_result(self, node: Node) -> bool:
        if node.target is _ATEN.index_put.default:
            data, indices, values = (arguments_of(node)[n] for n in ("self", "indices", "values"))
            is_written = values in self.rows and data not in self.rows
            return is_written and len(indices) == 1 and _same(indices[0], self.mask)
        return node.target in _TOTALS and 0 in _dims(node)

    def compute_all(self) -> None:
        """Rewrite the graph."""
        all_rows: dict[Node, Node] = {}
        for node in self.rows:
            if node.target is _SELECT:
                sizes = [-1, *shape_of(node)[1:]]
                all_rows[node] = insert(node, _ATEN.reshape.default, node.args[0], sizes)
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: all_rows.get(n, n))
            if node.target is _GATHER:  # rows that are not selected may have indices beyond the end
                x, dim, index = args
                args = x, dim, insert(node, _ATEN.clamp.default, index, 0, _last_index(node))
            all_rows[node] = insert(node, node.target, *args, **kwargs)
        for node in self.results:
            node.replace_all_uses_with(self._result(node, all_rows))
        for node in (*reversed(self.assertions), *self.results):
            node.graph.erase_node(node)

    def _flat_mask(self, node: Node, rank: int) -> Node:
        return insert(node, _ATEN.reshape.default, self.mask, [-1, *[1] * (rank - 1)])

    def _result(self, node: Node, all_rows: dict[Node, Node]) -> Node:
        arguments = arguments_of(node)
        if node.target is _ATEN.index_put.default:
            data, values = arguments["self"], all_rows[arguments["values"]]
            after = shape_of(values)[1:]
            values = insert(
                node, _ATEN.reshape.default, values, [*_sizes_for_view(self.mask), *after]
            )
            mask = self.mask
            for _ in after:
                mask = insert(node, _ATEN.unsqueeze.default, mask, -1)
            if arguments["accumulate"]:
                values = insert(node, _ATEN.add.Tensor, data, values)
            return insert(node, _ATEN.where.self, mask, values, data)
        rows = all_rows[arguments.pop("self")]
        mask = self._flat_mask(node, len(shape_of(rows)))
        zero = insert(node, _ATEN.zeros_like.default, rows)
        selected = insert(node, _ATEN.where.self, mask, rows, zero)
        total = insert(node, node.target, selected, **arguments)
        if node.target not in _MEANS:
            return total
        one = insert(node, _ATEN.ones_like.default, rows)
        flags = insert(node, _ATEN.where.self, mask, one, zero)
        return insert(node, _ATEN.div.Tensor, total, insert(node, node.target, flags, **arguments))


def _has_empty_rows(node: Node) -> bool:
    """Whether a result has a size of 0, so that a reshape cannot infer the number of rows."""
    return any(0 in tensor.shape[1:] for tensor in tensors_of(node.meta["val"]))


def _selects(node: Node) -> bool:
    """Whether a call selects rows by a mask and nothing else."""
    if node.target is not _SELECT:
        return False
    indices = arguments_of(node)["indices"]
    if len(indices) != 1 or indices[0] is None:
        return False
    mask = value_of(indices[0])
    return mask.dtype is torch.bool and mask.dim() > 0


def _mask(selection: Node) -> Any:
    return arguments_of(selection)["indices"][0]


def _same(first: Any, second: Any, depth: int = 4) -> bool:
    """Whether two values are equal because the same calls compute them.

    ``depth`` limits the calls that are compared. A mask is mostly a comparison of few calls that
    the program repeats: ``x[x.abs() > 1] = f(x[x.abs() > 1])``.
    """
    if not isinstance(first, Node) or not isinstance(second, Node):
        return first == second
    if first is second:
        return True
    is_call = first.op == second.op == "call_function" and first.target is second.target
    if not (depth and is_call) or _has_tag(first, torch.Tag.nondeterministic_seeded):
        return False
    if first.kwargs != second.kwargs or len(first.args) != len(second.args):
        return False
    pairs = zip(first.args, second.args, strict=True)
    return all(_same(a, b, depth - 1) for a, b in pairs)


def _last_index(gather: Node) -> Any:
    arguments = arguments_of(gather)
    return shape_of(arguments["self"])[arguments["dim"]] - 1


def _sizes_for_view(node: Node) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape_of(node)]


def _has_tag(node: Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, OpOverload) and tag in node.target.tags


def _keeps_rows_apart(node: Node, rows: Collection[Node]) -> bool:
    """Whether each row of a call's results depends on the same row of its operands only."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    results = [*tensors_of(node.meta["val"])]
    # Each operand as often as it stands there: ``all_input_nodes`` has x once for ``x @ x``.
    operands = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    tensors = [n for n in operands if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(tensors) < len(operands) or not results or not results[0].dim():
        return False
    if node.target.overloadpacket in _OF_LIMITED_RANGE and not results[0].is_floating_point():
        return False  # rows that are not selected may have divisors of 0, or negative exponents
    if _has_tag(node, torch.Tag.pointwise) or node.target in _POINTWISE:
        return all(_is_aligned(tensor, results[0], rows) for tensor in tensors)
    if node.target in _WITH_WEIGHTS:
        x, *weights = tensors
        are_weights = all(n not in rows and value_of(n).dim() <= _WEIGHT_RANK for n in weights)
        return are_weights and value_of(x).dim() > _WITH_WEIGHTS[node.target](node)
    if node.target is _GATHER and not isinstance(_last_index(node), int):
        return False
    if node.target in _ALONG:
        return all(n in rows for n in tensors) and 0 not in _dims(node)
    return False


def _is_aligned(tensor: Node, result: torch.Tensor, rows: Collection[Node]) -> bool:
    value = value_of(tensor)
    if tensor in rows:
        return value.dim() == result.dim()
    return value.dim() < result.dim() or (isinstance(value.shape[0], int) and value.shape[0] == 1)


def _dims(node: Node) -> set[int]:
    """Return the dimensions in the ``dim`` argument, from 0 on; {0} without one."""
    arguments = arguments_of(node)
    value = arguments.get("dim", arguments.get("dims"))
    dims = [value] if isinstance(value, int) else value or [0]
    rank = value_of(node.all_input_nodes[0]).dim() + (node.target is _ATEN.unsqueeze.default)
    return {dim % rank for dim in dims}


_SELECT = _ATEN.index.Tensor
# Ops that refuse some integers.
_OF_LIMITED_RANGE = frozenset(
    (_ATEN.div, _ATEN.floor_divide, _ATEN.fmod, _ATEN.pow, _ATEN.remainder)
)
_GATHER = _ATEN.gather.default
_POINTWISE = frozenset(
    (
        *(_ATEN._to_copy.default, _ATEN.clone.default, _ATEN.copy.default, _ATEN.fill.Scalar),
        *(_ATEN.fill.Tensor, _ATEN.zeros_like.default, _ATEN.ones_like.default),
        _ATEN.full_like.default,
    )
)
_ALONG = frozenset(
    (
        *(_ATEN.all.dim, _ATEN.amax.default, _ATEN.amin.default, _ATEN.any.dim),
        *(_ATEN.argmax.default, _ATEN.argmin.default, _ATEN.cat.default, _ATEN.cumprod.default),
        *(_ATEN.cumsum.default, _ATEN.flip.default, _ATEN.log_softmax.int, _ATEN.max.dim, _GATHER),
        *(_ATEN.mean.dim, _ATEN.min.dim, _ATEN.select.int, _ATEN.select_scatter.default),
        *(_ATEN.slice.Tensor, _ATEN.slice_scatter.default, _ATEN.softmax.int, _ATEN.sort.default),
        *(_ATEN.squeeze.dim, _ATEN.sum.dim_IntList, _ATEN.topk.default, _ATEN.unsqueeze.default),
    )
)
_WEIGHT_RANK = 2
# Number of the last dimensions that the op reads together.
_WITH_WEIGHTS: dict[Any, Callable[[Node], int]] = {
    _ATEN.linear.default: lambda _: 1,
    _ATEN.matmul.default: lambda _: 1,
    _ATEN.mm.default: lambda _: 1,
    _ATEN.layer_norm.default: lambda node: len(arguments_of(node)["normalized_shape"]),
    _ATEN.rms_norm.default: lambda node: len(arguments_of(node)["normalized_shape"]),
    _ATEN.pad.default: lambda node: len(arguments_of(node)["pad"]) // 2,
    _ATEN.constant_pad_nd.default: lambda node: len(arguments_of(node)["pad"]) // 2,
}
_MEANS = frozenset((_ATEN.mean.default, _ATEN.mean.dim))
_TOTALS = _MEANS | {_ATEN.sum.default, _ATEN.sum.dim_IntList}
