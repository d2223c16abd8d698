"""Control flow whose branches Core ML takes: see ``coreml_delegate.control_flow``."""

from __future__ import annotations

from functools import partial

from torch.fx import Node

from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.call import ANY
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.record import OpRecord


def _hold(_: Node) -> None:
    """Let coremltools know how to translate these ops."""
    mil_ops.control_flow()


_op = partial(OpRecord, dtypes={"": ANY}, results=ANY, preserve=False, rewrite=_hold, flops=nothing)

RECORDS = (
    _op("coreml_delegate.cond.default"),
    _op("coreml_delegate.while_loop.default"),
    _op("coreml_delegate.scan.default"),
)
