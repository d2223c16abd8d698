"""What OpenVINO makes of the processor at hand, found out by trying it."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.plugin import DEVICE

PRECISION_HINT: Final = "INFERENCE_PRECISION_HINT"
"""The property of a compiled model that says what it computes in."""


@functools.cache
def emulates(hint: str) -> bool:
    """Whether OpenVINO computes in a precision that the CPU has no instructions for.

    It does not tell but by what becomes of the hint: a CPU with AVX-512 emulates bf16.
    """
    x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([1]))
    compiled = _compiled(ops.result(x), x, hint)
    return compiled.get_property(PRECISION_HINT).to_string() == hint


@functools.cache
def saturates() -> bool:
    """Whether sums of products of 8-bit integers are cut off at 16 bits on the way.

    x86 without VNNI adds products in pairs, each pair in 16 bits (``vpmaddubsw``): AMD before Zen
    4, Intel before Cascade Lake.
    """
    largest = np.full((1, 2), 255, np.float32)
    x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([1, 2]))
    low, high = ops.constant(np.float32(0)), ops.constant(np.float32(255))
    codes = ops.fake_quantize(x, low, high, low, high, 256)
    weight = ops.convert(ops.constant(np.full((2, 2), 127, np.int8)), "f32")
    scaled = ops.multiply(weight, ops.constant(np.float32(1)))
    product = ops.result(ops.matmul(codes, scaled, False, True))
    (sums,) = _compiled(product, x, "f32")([largest]).values()
    return bool((sums != 2 * 255 * 127).any())


def _compiled(result: Any, x: Any, hint: str) -> Any:
    make_model: Any = ov.Model
    return ov.Core().compile_model(
        make_model([result], [x], "probe"), DEVICE, {PRECISION_HINT: hint}
    )
