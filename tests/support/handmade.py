"""MIL functions written by hand, which coremltools refuses to build."""

from __future__ import annotations

import numpy as np

from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Block,
    Constant,
    Feature,
    Function,
    NamedType,
    Op,
    Ref,
    TensorType,
)

FLOATS = TensorType(DType.FP32, (3,))


def function(ops, outputs, opset="CoreML8"):
    """A function of one input ``x``, fp32[3]."""
    return Function(
        name="main",
        opset=opset,
        params=(NamedType("x", FLOATS),),
        block=Block((), tuple(ops), tuple(outputs)),
        inputs=(Feature("x", FLOATS),),
        outputs=tuple(Feature(name, FLOATS) for name in outputs),
    )


def op(op_type, output, declared=FLOATS, **inputs):
    """An op with a single output; inputs are names or constants."""
    return Op(
        op_type,
        {
            name: (Ref(value) if isinstance(value, str) else value,)
            for name, value in inputs.items()
        },
        (NamedType(output, declared),),
    )


def constant(value, dtype=DType.FP32):
    array = np.array(value, dtype.numpy)
    return Constant(TensorType(dtype, array.shape), array)


def text(value):
    return Constant(TensorType(DType.STRING, ()), value)
