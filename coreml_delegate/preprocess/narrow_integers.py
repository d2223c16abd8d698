"""Integers of 8 and 16 bits, which Core ML does not compute with, carried as int32.

They enter and leave a delegate as they are; the device runtime, as ours, casts them to and from the
dtype of the model's features. In between they are only moved, or cast: there the values wrap around
as they do in PyTorch.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules.rule import NARROW, target_name
from coreml_delegate.preprocess.graph_edits import ATEN, become, insert

_CAST = "aten._to_copy.default"


def widen(program: ExportedProgram) -> None:
    """Make every such tensor int32; the rules have seen to it that none is computed with."""
    for node in list(program.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
            continue
        if node.op == "call_function" and target_name(node.target) == _CAST:
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
