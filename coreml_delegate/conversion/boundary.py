"""Tensors that cross the boundary of a subgraph in a dtype that Core ML does not compute with.

They enter and leave a delegate as they are; the device runtime, as ours, casts them to and from the
dtype of the model's features: fp16 and fp64 to fp32, integers of 8 and 16 bits to int32. Inside,
such floats do not occur, and such integers are only moved, or cast: there the values wrap around as
they do in PyTorch.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``multiarray`` conversion.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops.call import BOUNDARY, CAST, NARROW, target_name
from coreml_delegate.ops.edits import ATEN, become, insert
from coreml_delegate.ops.layouts import is_row_major


def retype_floats(program: ExportedProgram) -> None:
    """Make such inputs, and the casts to such outputs, fp32.

    The rules have seen to it that nothing else in the subgraph has these dtypes.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if _dtype(node) not in BOUNDARY:
            continue
        if node.op == "placeholder" and node.name in inputs:
            node.meta["val"] = node.meta["val"].to(torch.float32)
        elif node.op == "call_function" and target_name(node.target) == CAST:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            node.meta["val"] = node.meta["val"].to(torch.float32)


def set_row_major_strides(program: ExportedProgram) -> None:
    """Give inputs the strides of a row-major tensor, which those that come here are.

    Coremltools asks for their dim order, which dimensions of one element may make look transposed.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in inputs and isinstance(value, torch.Tensor) and is_row_major(value):
            node.meta["val"] = value.new_empty(value.shape)


def widen_integers(program: ExportedProgram) -> None:
    """Make every such tensor int32; the rules have seen to it that none is computed with."""
    for node in list(program.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
            continue
        if node.op == "call_function" and target_name(node.target) == CAST:
            _wrap(node, node.args[0], torch.iinfo(value.dtype))
        node.meta["val"] = value.to(torch.int32)


def _wrap(node: Node, source: Node, limits: torch.iinfo) -> None:
    """Cast to int32 and bring the values into the narrow range, as a cast to it does."""
    whole = insert(node, ATEN._to_copy.default, source, dtype=torch.int32)
    count = limits.max - limits.min + 1
    if limits.min:
        whole = insert(node, ATEN.sub.Tensor, whole, limits.min)
    rest = insert(node, ATEN.remainder.Scalar, whole, count)
    if limits.min:
        rest = insert(node, ATEN.add.Tensor, rest, limits.min)
    become(node, ATEN._to_copy.default, rest, dtype=torch.int32)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
