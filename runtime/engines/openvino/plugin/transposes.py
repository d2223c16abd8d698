"""Keep OpenVINO 2026.4's CPU plugin from fusing certain transposes with attention.

The plugin fuses attention and a transpose of the queries or of the result to one kernel. If queries
and result have the same shape, the kernel writes the result over the queries, although heads that
it computes later still read queries at those addresses: in ``reshape(b, n, 3, h, d)`` permuted to
``(3, b, h, n, d)``, then ``transpose(1, 2)`` of the result, when there are as many heads as tokens.
No issue is known. A transpose of a tensor with one dimension more stays a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import constant_ints, dims, ints, reshape

_TRANSPOSE = "Transpose"


def separate_transposes(model: Any) -> None:
    """Rewrite the transposes of ``model`` that fused attention could overwrite, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == _TRANSPOSE and _may_be_overwritten(node):
            _separate(node)


def _may_be_overwritten(transpose: Any) -> bool:
    """Whether a product on one side of ``transpose`` has the shape of the tensor on the other."""
    if transpose.get_output_partial_shape(0).is_dynamic:
        return False
    before, after = dims(transpose.input_value(0)), dims(transpose.output(0))
    sizes = [size for size in before if size != 1]
    if len(set(sizes)) == len(sizes):
        return False
    is_read = (dims(value) == before for value in _products_after(transpose))
    is_made = (dims(value) == after for value in _products_before(transpose))
    return any(is_read) or any(is_made)


def _products_after(node: Any) -> Iterator[Any]:
    """Yield the first operands of matrix products that read ``node`` element by element."""
    pending, seen = [node], set[str]()
    while pending:
        for reader in pending.pop().output(0).get_target_inputs():
            after = reader.get_node()
            if after.get_type_name() == "MatMul":
                if reader.get_index() == 0:
                    yield reader.get_source_output()
            elif _keeps_elements(after, reader.get_index()) and after.get_name() not in seen:
                seen.add(after.get_name())
                pending.append(after)


def _products_before(node: Any) -> Iterator[Any]:
    """Yield the matrix products that ``node`` reads element by element."""
    pending, seen = [node], set[str]()
    while pending:
        reader = pending.pop()
        for port in range(reader.get_input_size()):
            before = reader.input_value(port).get_node()
            if not _keeps_elements(reader, port):
                continue
            if before.get_type_name() == "MatMul":
                yield before.output(0)
            elif before.get_name() not in seen:
                seen.add(before.get_name())
                pending.append(before)


def _keeps_elements(node: Any, port: int) -> bool:
    """Whether a node transposes an operand, or returns as many elements in the same order."""
    if node.get_type_name() == _TRANSPOSE:
        return port == 0
    shapes = node.get_input_partial_shape(port), *(o.get_partial_shape() for o in node.outputs())
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _separate(transpose: Any) -> None:
    """Replace ``transpose`` by a transpose of ``x[..., None]``, reshaped."""
    x, shape = transpose.input_value(0), [size or 0 for size in dims(transpose.output(0))]
    order = constant_ints(transpose.input_value(1)) or ()
    moved = ops.transpose(ops.unsqueeze(x, ints(-1)), ints([*order, len(order)]))
    separate = reshape(moved, shape)
    separate.set_friendly_name(transpose.get_friendly_name())
    ov.utils.replace_node(transpose, separate)
