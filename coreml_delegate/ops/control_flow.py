"""Control flow whose branches Core ML takes: see ``opaque_ops.control_flow``."""

from __future__ import annotations

from functools import partial

from coreml_delegate.ops.call import ANY
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.record import OpRecord

_op = partial(OpRecord, dtypes={"": ANY}, results=ANY, preserve=False, flops=nothing)

RECORDS = (
    _op("coreml_delegate.cond.default"),
    _op("coreml_delegate.while_loop.default"),
    _op("coreml_delegate.scan.default"),
)
