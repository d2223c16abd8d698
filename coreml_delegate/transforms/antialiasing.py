"""Resizing with antialiasing, as products with constant matrices.

Core ML has no antialiasing when it resizes. PyTorch resizes rows and columns separately, and both
steps are linear: ``y = A @ x @ B.T``, where PyTorch makes A and B by resizing the identity matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops.edits import add_constant, arguments_of, insert, value_of
from coreml_delegate.patches.torch import with_parts

_ATEN: Any = torch.ops.aten
_BILINEAR, _BICUBIC = _ATEN._upsample_bilinear2d_aa, _ATEN._upsample_bicubic2d_aa
_RESIZE = {op: form.default for form in (_BILINEAR, _BICUBIC) for op in (form.default, form.vec)}
_LARGEST_MATRIX = 2**22
"""Elements of a matrix up to which a call is replaced: 16 MB in fp32."""
_BLOCK = 256  # columns of the identity matrix


def resize_by_matrices(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with products in place of resizing with antialiasing."""
    if not any(map(_is_replaced, program.graph.nodes)):
        return program
    functional = program.run_decompositions({})
    edited = with_parts(functional, constants=dict(functional.constants))
    for node in list(filter(_is_replaced, edited.graph.nodes)):
        x: Any = node.args[0]
        for axis in (1, 0):
            matrix = _matrix(node, axis)
            constant = add_constant(edited, f"{node.name}_{axis}", matrix, node, dtype=matrix.dtype)
            x = insert(node, _ATEN.transpose.int, x, -2, -1) if axis == 0 else x
            x = insert(node, _ATEN.linear.default, x, constant)
        node.replace_all_uses_with(insert(node, _ATEN.transpose.int, x, -2, -1))
        edited.graph.erase_node(node)
    edited.graph_module.recompile()
    return edited


def _is_replaced(node: Node) -> bool:
    """Whether a call resizes floats between static sizes, by matrices of at most 16 MB in fp32."""
    if node.target not in _RESIZE or not value_of(node).is_floating_point():
        return False
    sizes = [*_sizes(node, 0), *_sizes(node, 1)]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return max(sizes[0] * sizes[1], sizes[2] * sizes[3]) <= _LARGEST_MATRIX


def _sizes(node: Node, axis: int) -> tuple[Any, Any]:
    """Return the sizes of the rows (``axis`` 0) or the columns (1) before and after."""
    x: Any = node.args[0]
    return value_of(x).shape[2 + axis], value_of(node).shape[2 + axis]


def _matrix(node: Node, axis: int) -> torch.Tensor:
    """Return the matrix [after, before] that resizes one axis."""
    arguments, (before, after) = arguments_of(node), _sizes(node, axis)
    scales = arguments.get("scale_factors", (arguments.get("scales_h"), arguments.get("scales_w")))
    scale = None if scales is None else scales[axis]
    resize, corners = _RESIZE[node.target], arguments["align_corners"]
    rows = torch.arange(before)
    # In blocks, because the identity matrix is larger than its resized form.
    columns = [
        resize(
            (rows[:, None] == block).float()[None, None], [after, len(block)], corners, scale, None
        )
        for block in rows.split(_BLOCK)
    ]
    return torch.cat(columns, -1)[0, 0].to(value_of(node).dtype)
