"""Programs that the reference engine refuses, and its error messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import handmade
from support.mil import build, main, mb

from coreml_delegate.errors import ExecutionError, InputError, UnsupportedOpError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Block,
    Constant,
    TensorType,
)
from coreml_delegate.targets import Opset

_X = np.array([1.0, -2.0, 3.0], np.float32)


def _compile(function, inputs, opset=Opset.iOS18):
    return REFERENCE.compile(main(build(function, inputs, opset)), EngineOptions())


def test_unsupported_ops_are_all_named_once_nested_ones_included():
    nested = Block((), (handmade.op("wondrous", "w", x="x"),), ("w",))
    ops = [
        handmade.op("strange", "a", x="x"),
        handmade.op("strange", "b", x="a"),
        replace(
            handmade.op("cond", "c", pred=handmade.constant(True, DType.BOOL)),
            blocks=(nested, nested),
        ),
        handmade.op("scaled_dot_product_attention", "d", query="b", key="b", value="b"),
        handmade.op("relu", "e", x="d", slope=handmade.constant(1.0)),
    ]
    function = handmade.function(ops, ["e"], opset="CoreML7")
    assert REFERENCE.unsupported(function) == [
        "strange: no kernel in opset CoreML7 (first used by 'a' at main op 0)",
        "wondrous: no kernel in opset CoreML7 (first used by 'w' at main op 2 block 0 op 0)",
        "scaled_dot_product_attention: no kernel in opset CoreML7, only since CoreML8 "
        "(first used by 'd' at main op 3)",
        "relu: no parameter 'slope' in opset CoreML7 (first used by 'e' at main op 4)",
    ]
    with pytest.raises(
        UnsupportedOpError, match="cannot execute the program: got strange: no kernel"
    ):
        REFERENCE.compile(function, EngineOptions())


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            handmade.op("matmul", "y", x="x", y=handmade.constant([[1.0, 2.0]])),
            r"cannot compute matmul 'y' at main op 0 .*got x: float32\[3\], y: fp32\[1, 2\]",
        ),
        (
            handmade.op("gelu", "y", x="x", mode=Constant(TensorType(DType.STRING, ()), "FAST")),
            r"cannot compute gelu 'y' at main op 0 \(ValueError: gelu mode is 'FAST', not one of",
        ),
        (
            handmade.op("relu", "y", TensorType(DType.INT32, (3,)), x="x"),
            r"computed float32\[3\] where the program declares int32\[3\]",
        ),
        (
            replace(handmade.op("relu", "y", x="x"), outputs=()),
            r"1 results where the program declares 0",
        ),
        (
            handmade.op("relu", "y"),
            r"cannot compute relu 'y' at main op 0 .*missing 1 required positional argument: 'x'",
        ),
    ],
    ids=["shapes", "mode", "dtype", "count", "missing"],
)
def test_failures_name_op_output_and_inputs(op, message):
    outputs = ["y"] if op.outputs else ["x"]
    compiled = REFERENCE.compile(handmade.function([op], outputs), EngineOptions())
    with pytest.raises(ExecutionError, match=message) as caught:
        compiled({"x": _X})
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("opset", "index", "validate", "message"),
    [
        (Opset.iOS15, 3, None, r"index outside of \[-3, 3\)"),
        (Opset.iOS17, -1, True, r"index outside of \[0, 3\)"),
        (Opset.iOS17, 3, True, r"index outside of \[0, 3\)"),
    ],
)
def test_indices_out_of_range(opset, index, validate, message):
    def function(x, i):
        return mb.gather(
            x=x, indices=i, **({} if validate is None else {"validate_indices": validate})
        )

    inputs = {"x": _X, "i": np.array([index], np.int32)}
    with pytest.raises(ExecutionError, match=message):
        _compile(function, inputs, opset)(inputs)


@pytest.mark.parametrize(("index", "expected"), [(-1, 3.0), (7, 3.0), (-9, 1.0)])
def test_unvalidated_indices_are_safe(index, expected):
    inputs = {"x": _X, "i": np.array([index], np.int32)}
    compiled = _compile(lambda x, i: mb.gather(x=x, indices=i), inputs, Opset.iOS17)
    (result,) = compiled(inputs).values()
    assert result == [expected]


def test_a_missing_input_is_an_error():
    compiled = _compile(lambda x: mb.relu(x=x), {"x": _X})
    with pytest.raises(InputError, match="input 'x' is missing: got z, expected x"):
        compiled({"z": _X})


def test_an_unknown_opset_is_unsupported():
    function = handmade.function([], ["x"], opset="CoreML99")
    (reason,) = REFERENCE.unsupported(function)
    assert reason.startswith("unknown MIL opset: got 'CoreML99', expected CoreML5")
    with pytest.raises(UnsupportedOpError, match="unknown MIL opset"):
        REFERENCE.compile(function, EngineOptions())
