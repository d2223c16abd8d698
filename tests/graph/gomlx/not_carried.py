"""Cases that the builder refuses: by decision, or because GoMLX refuses them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from graph.gomlx.activations import gated

_TWO_BYTES = "Core ML's only floating-point type of two bytes is float16"
_WIDTHS = "Core ML has no operation that sees the bytes of a tensor"
_AT_RUN_TIME = "the shape of a Core ML model follows from the shapes of its inputs"


@dataclass(frozen=True)
class Refusal:
    """A call that is refused.

    Attributes:
        test: Name of the test in GoMLX; see ``Case``.
        reason: Why.
        call: Takes a builder; raises ``GraphError``.
        message: What the error's message contains.
    """

    test: str
    reason: str
    call: Callable[[Any], Any]
    message: str


def _bfloat16(test: str, *shape: int) -> Refusal:
    return Refusal(
        test, _TWO_BYTES, lambda b: b.parameter("x", "bfloat16", shape), "no such element type"
    )


def _of_bits(test: str, dtype: str, shape: tuple[int, ...], target: str) -> Refusal:
    return Refusal(
        test,
        _WIDTHS,
        lambda b: b.bitcast_convert(b.parameter("x", dtype, shape), target),
        "widths of element types differ",
    )


def _vector(b: Any, *sizes: Any) -> Any:
    return b.concatenate([b.reshape(size, (1,)) for size in sizes], 0)


def _numbered(b: Any) -> Any:
    sizes = _vector(b, b.parameter("rows", "int32", ()), b.constant(3))
    return b.dynamic_iota("int32", sizes, 1)


def _padded(b: Any) -> Any:
    low = _vector(b, b.parameter("low", "int32", ()), b.constant(1))
    none = b.constant([0, 0])
    return b.dynamic_pad(
        b.parameter("x", "float32", (2, 2)), b.constant(0.0), low, b.constant([1, 0]), none
    )


def _random(dtype: str, algorithm: str) -> Callable[[Any], Any]:
    return lambda b: b.rng_bit_generator(
        b.constant(np.zeros(4, np.uint32)), dtype, (100_000,), algorithm
    )


NOT_CARRIED = [
    _bfloat16("BinaryOps/Add"),
    _bfloat16("BinaryOps/Sub"),
    _bfloat16("UnaryOps/Neg", 3),
    Refusal(
        "ConvertDType/ConvertDType",
        _TWO_BYTES,
        lambda b: b.convert(b.constant(3.14), "bfloat16"),
        "no such element type",
    ),
    _bfloat16("SpecialOps/Identity"),
    _bfloat16("SpecialOps/Where"),
    Refusal(
        "SpecialOps/Iota",
        _TWO_BYTES,
        lambda b: b.iota("bfloat16", (2, 3), 0),
        "no such element type",
    ),
    _bfloat16("SpecialOps/BroadcastInDim/Scalar"),
    _bfloat16("SpecialOps/Concatenate", 2, 1),
    _bfloat16("SpecialOps/CumSum/1D_BFloat16", 3),
    _bfloat16("SpecialOps/Reduce/MinBFloat16", 3),
    _bfloat16("SpecialOps/Reduce/SumFullReduction", 2, 2),
    _bfloat16("DotGeneral/bfloat16/DotProduct-with-f32-acc", 1, 3),
    _bfloat16("DotGeneral/bfloat16/small-matmul", 2, 2),
    Refusal(
        "DotGeneral/DTypes",
        _TWO_BYTES,
        lambda b: b.dot(*[b.constant(np.ones(16, np.float32))] * 2, preferred_dtype="bfloat16"),
        "no such element type",
    ),
    _bfloat16("ConvGeneral", 2, 3, 5),
    _bfloat16("FusedOps/FusedScaledDotProductAttention/BHSD_Causal_BF16", 1, 1, 2, 8),
    _bfloat16("FusedOps/FusedScaledDotProductAttention/BSHD_Causal_BF16", 1, 2, 1, 8),
    _bfloat16("FusedOps/FusedActivation/BFloat16", 5),
    _bfloat16("DenseBFloat16", 1, 2),
    _of_bits("Bitcast/Uint32ToUint16", "uint32", (1,), "uint16"),
    _of_bits("Bitcast/Uint16ToUint32", "uint16", (1, 2), "uint32"),
    Refusal(
        "SpecialOps/RNGBitsGenerator/uint64",
        "random bits of 64 do not fit Core ML's integers of 32",
        _random("uint64", "threefry"),
        "does not return this element type",
    ),
    Refusal(
        "SpecialOps/RNGBitsGenerator/uint32",
        "Philox needs products of 64 bits",
        _random("uint32", "philox"),
        "no such algorithm",
    ),
    Refusal("SpecialOps/DynamicIota", _AT_RUN_TIME, _numbered, "dynamic_iota"),
    Refusal("SpecialOps/DynamicPad", _AT_RUN_TIME, _padded, "pad"),
]
"""Cases that Core ML cannot carry; the numbers of those of bfloat16 are checked with float16."""


def _sort_of_nothing(b: Any) -> Any:
    return b.sort([], 0, b.less)


def _loop_of_nothing(b: Any) -> Any:
    return b.while_(lambda: b.constant(True), lambda: ())


def _loop_that_changes_type(b: Any) -> Any:
    return b.while_(
        lambda n: b.less(n, b.constant(5)), lambda n: b.convert(n, "float32"), b.constant(0)
    )


def _branches_that_differ(b: Any) -> Any:
    return b.if_(b.constant(True), lambda: b.constant(1), lambda: b.constant(1.0))


def _call_with(count: int) -> Callable[[Any], Any]:
    def call(b: Any) -> Any:
        x = b.parameter("x", "float32", (2,))
        closure = b.closure("sum", b.add, x.type, x.type)
        return b.call(closure, *[x] * count)

    return call


def _dense_with(activation: str) -> Callable[[Any], Any]:
    return lambda b: b.dense(
        b.parameter("x", "float32", (1, 4)),
        b.parameter("weight", "float32", (4, 4)),
        activation=activation,
    )


_WRONG = "GoMLX refuses it as well"
WRONG = [
    Refusal("ControlFlowOpsValidationErrors", _WRONG, _sort_of_nothing, "sort"),
    Refusal("ControlFlowOpsValidationErrors", _WRONG, _loop_of_nothing, "while has no variables"),
    Refusal("ControlFlowOpsValidationErrors", _WRONG, _loop_that_changes_type, "body"),
    Refusal("ControlFlowOpsValidationErrors", _WRONG, _branches_that_differ, "on_false"),
    Refusal("CompiledClosureInputValidation", _WRONG, _call_with(1), "wrong parameters"),
    Refusal("CompiledClosureInputValidation", _WRONG, _call_with(3), "wrong parameters"),
    Refusal(
        "FusedOps/FusedActivation/SwiGLU",
        _WRONG,
        lambda b: gated(b, b.parameter("x", "float32", (1, 3))),
        "reshape",
    ),
    Refusal(
        "FusedOps/FusedSoftmax/NegativeAxis",
        _WRONG,
        lambda b: b.softmax(b.parameter("x", "float32", (2, 3)), -3),
        "no such axis",
    ),
    Refusal("DenseActivations/SwiGLU_Rejected", _WRONG, _dense_with("swiglu"), "activation"),
    Refusal(
        "DenseActivations/InvalidActivation_Rejected", _WRONG, _dense_with("other"), "activation"
    ),
]
"""Calls that are wrong."""
