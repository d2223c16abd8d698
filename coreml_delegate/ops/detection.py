"""Detection of objects: which of many boxes to keep."""

from __future__ import annotations

from torch.fx import Node

from coreml_delegate import detection
from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.edits import become, cast_after
from coreml_delegate.ops.record import OpRecord


def _nms(node: Node) -> None:
    become(node, mil_ops.nms(), *node.args, **node.kwargs)
    cast_after(node)


RECORDS = (OpRecord(detection.NMS, preserve=False, rewrite=_nms),)
