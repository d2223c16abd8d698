"""Partial state updates: the graph returns only the written rows, and no state is copied.

OpenVINO cannot write in place: its scatter copies the whole tensor. But a program that writes rows
of a cache reads it by a few ops, and each can be computed from the old cache and the new rows
separately. For example, ``q @ keys.T`` is ``q @ old_keys.T`` with the columns of ``q @ rows.T``
written into it. So the session keeps the state in the type that the graph computes in, the graph
reads it without a copy, and returns the rows and their indices for the session to write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_ints,
    convert_to,
    dim_of,
    dims,
    element_type,
    ints,
    is_float,
    normalize_axis,
    output,
    per_channel,
    rank,
    replace_slices,
    reshape,
    scalar,
    shape_of,
    static_dims,
)

_SCATTER = "ScatterUpdate"


@dataclass(frozen=True, slots=True)
class RowWrite:
    """Rows that replace rows of a tensor.

    Attributes:
        before: The tensor before the write, an output of the graph.
        indices: Indices of the rows, int32 [C], not negative; of equal indices the last one wins.
        rows: The new rows, with the shape of ``before`` except for C along ``axis``.
        axis: The axis along which rows are counted.
    """

    before: Any
    indices: Any
    rows: Any
    axis: int

    def with_rows(self, before: Any, rows: Any, axis: int) -> Any:
        """Return ``before`` with ``rows`` written at the same indices along ``axis``."""
        return replace_slices(before, self.indices, rows, axis).output(0)


def find_row_writes(before: Any, after: Any) -> tuple[RowWrite, ...] | None:
    """Return the row writes that turn ``before`` into ``after``, in order; None if other ops do."""
    writes: list[RowWrite] = []
    while not _is_same_output(before, after):
        write = _as_row_write(after)
        if write is None:
            return None
        writes.append(write)
        after = write.before
    return tuple(reversed(writes))


def split_readers(after: Any) -> None:
    """Let the readers of ``after``, the result of a row write, read the old tensor and new rows.

    Readers without a function in ``_READERS`` still read the written tensor, which the plugin then
    copies.
    """
    write = _as_row_write(after)
    if write is None:
        return
    for port in list(output(after).get_target_inputs()):
        reader = port.get_node()
        split = _READERS.get(reader.get_type_name())
        replacement = None if split is None else split(write, reader, port.get_index())
        if replacement is None:
            continue
        reader.output(0).replace(replacement)
        split_readers(replacement)
    split_readers(write.before)


def _as_row_write(value: Any) -> RowWrite | None:
    node = output(value).get_node()
    if node.get_type_name() != _SCATTER:
        return None
    before, indices, rows = (node.input_value(port) for port in range(3))
    axis = constant_ints(node.input_value(3))
    if axis is None or rank(indices) != 1 or element_type(indices) != ov.Type.i32:
        return None
    if None in dims(before) or None in dims(rows):
        return None
    write = RowWrite(before, indices, rows, normalize_axis(axis[0], rank(before)))
    row_count, size = (static_dims(x, (write.axis,)) for x in (rows, before))
    return write if row_count < size else None


def _is_same_output(one: Any, other: Any) -> bool:
    """Whether two values are the same output of the same node."""
    ports = [
        (value.get_node().get_name(), value.get_index()) for value in map(output, (one, other))
    ]
    return ports[0] == ports[1]


def _split_transpose(write: RowWrite, reader: Any, _: int) -> Any | None:
    order = constant_ints(reader.input_value(1))
    if not order:
        return None
    before, rows = (ops.transpose(x, ints(order)) for x in (write.before, write.rows))
    return write.with_rows(before, rows, order.index(write.axis))


def _split_reshape(write: RowWrite, reader: Any, port: int) -> Any | None:
    """Split a reshape that keeps the row axis; axes before and after it may be merged or split."""
    shape, axis = dims(write.before), write.axis
    view = dims(reader.output(0))
    sizes = [size for size in view if size is not None]
    if port or len(sizes) != len(view):
        return None
    leading = math.prod(size or 0 for size in shape[:axis])
    candidates = [
        index
        for index, size in enumerate(sizes)
        if size == shape[axis] and math.prod(sizes[:index]) == leading
    ]
    if not candidates:
        return None
    (count,) = dims(write.indices)
    narrow = [*sizes[: candidates[0]], count or 0, *sizes[candidates[0] + 1 :]]
    return write.with_rows(reshape(write.before, sizes), reshape(write.rows, narrow), candidates[0])


def _split_matmul(write: RowWrite, reader: Any, port: int) -> Any | None:
    attributes = reader.get_attributes()
    transposes = attributes["transpose_a"], attributes["transpose_b"]
    other = reader.input_value(1 - port)
    total = rank(write.before)
    if min(total, rank(other)) < 2 or write.axis < total - 2 or not is_float(other):
        return None

    def product(operand: Any, factor: Any) -> Any:
        pair = (operand, factor) if port == 0 else (factor, operand)
        return ops.matmul(*pair, *transposes)

    # A product sums over the last axis of operand 0 and the axis before the last of operand 1.
    summed = (write.axis == total - 1) ^ (port == 1) ^ transposes[port]
    if not summed:
        axis = rank(reader.output(0)) - 2 + port
        return write.with_rows(product(write.before, other), product(write.rows, other), axis)
    axis = rank(other) - (2 if (port == 0) ^ transposes[1 - port] else 1)
    factors = ops.gather(other, write.indices, ints(axis))
    zeros = ops.broadcast(scalar(0, other), shape_of(factors))
    elsewhere = write.with_rows(other, zeros, axis)
    factors = ops.select(
        per_channel(_is_last_write(write.indices), rank(other), axis), factors, zeros
    )
    return ops.add(product(write.before, elsewhere), product(write.rows, factors)).output(0)


def _is_last_write(indices: Any) -> Any:
    """Return, for each index, whether it differs from all later indices, bool [C]."""
    (count,) = dims(indices)
    later = ops.constant(np.triu(np.ones((count or 0, count or 0), bool), 1))
    same = ops.equal(ops.unsqueeze(indices, ints(1)), ops.unsqueeze(indices, ints(0)))
    return ops.logical_not(ops.reduce_logical_or(ops.logical_and(same, later), ints((1,))))


def _split_gather(write: RowWrite, reader: Any, port: int) -> Any | None:
    axis = constant_ints(reader.input_value(2))
    batch = reader.get_attributes()["batch_dims"]
    total = rank(write.before)
    if port or batch or axis is None or normalize_axis(axis[0], total) != write.axis:
        return None
    read = convert_to(reader.input_value(1), element_type(write.indices))
    read_rank = rank(read)
    size = dim_of(write.before, write.axis)
    read = ops.select(ops.less(read, ints(0)), ops.add(read, size), read)
    # For each index that is read, the number of the last row written there, or -1.
    matches = ops.equal(ops.unsqueeze(read, ints(-1)), write.indices)
    (count,) = dims(write.indices)
    numbers = ops.select(matches, ints(list(range(count or 0))), ints(-1))
    row = ops.reduce_max(numbers, ints((-1,)), False)
    new = ops.gather(write.rows, ops.maximum(row, ints(0)), ints(write.axis))
    old = ops.gather(write.before, read, ints(write.axis))
    trailing = list(range(read_rank, read_rank + total - write.axis - 1))
    is_new = ops.greater_equal(row, ints(0))
    if trailing:
        is_new = ops.unsqueeze(is_new, ints(trailing))
    return ops.select(is_new, new, old).output(0)


_READERS: Mapping[str, Callable[[RowWrite, Any, int], Any | None]] = {
    "Gather": _split_gather,
    "MatMul": _split_matmul,
    "Reshape": _split_reshape,
    "Squeeze": _split_reshape,
    "Transpose": _split_transpose,
    "Unsqueeze": _split_reshape,
}
"""Type of a reader -> function that computes its result from the old tensor and the new rows.

The function takes the write, the reader and the reader's input port, and returns None if it cannot
split the reader. A sum over rows gives replaced rows a factor of zero, which is right as long as
they are finite.
"""
