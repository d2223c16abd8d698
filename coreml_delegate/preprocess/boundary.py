"""Tensors that cross the boundary of a subgraph in a dtype the device runtime casts for us.

fp16 and fp64 tensors enter and leave a delegate as they are; the device runtime, as ours, casts
them to and from the dtype of the model's features, which is fp32.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``multiarray`` conversion.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules.layouts import is_row_major
from coreml_delegate.op_rules.rule import BOUNDARY, target_name

_CAST = "aten._to_copy.default"


def retype(program: ExportedProgram) -> None:
    """Make such inputs, and the casts to such outputs, fp32.

    The rules have seen to it that nothing else in the subgraph has these dtypes.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if _dtype(node) not in BOUNDARY:
            continue
        if node.op == "placeholder" and node.name in inputs:
            node.meta["val"] = node.meta["val"].to(torch.float32)
        elif node.op == "call_function" and target_name(node.target) == _CAST:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            node.meta["val"] = node.meta["val"].to(torch.float32)


def straighten(program: ExportedProgram) -> None:
    """Give inputs the strides of a row-major tensor, which those that come here are.

    Coremltools asks for their dim order, which dimensions of one element may make look transposed.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in inputs and isinstance(value, torch.Tensor) and is_row_major(value):
            node.meta["val"] = value.new_empty(value.shape)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
