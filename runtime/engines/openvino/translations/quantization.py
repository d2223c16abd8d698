"""Quantization of activations.

Source: coremltools' MIL op reference, ``quantization_ops``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    GRAPH_TYPE,
    constant_data,
    element_type,
    f32,
    is_float,
    output,
    per_channel,
    rank,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal
from coreml_delegate.runtime.mil.dtypes import DType


@translation("quantize")
def quantize(
    input: Tensor,
    scale: Tensor,
    output_dtype: str,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> Result:
    """``clip(round(input / scale) + zero_point)`` as a fake-quantize, which can run in int8."""
    destination = GRAPH_TYPE.get(DType.from_label(output_dtype))
    if destination not in (ov.Type.i8, ov.Type.u8):
        raise refusal("quantize to another type", output_dtype, "int8 or uint8")
    low, high = (-128.0, 127.0) if destination == ov.Type.i8 else (0.0, 255.0)
    least, most = (ops.constant(np.float32(bound)) for bound in (low, high))
    step = _align(_f32(scale), input, axis)
    shift = None if zero_point is None else _align(_f32(zero_point), input, axis)
    first, last = (_dequantize_bound(bound, step, shift) for bound in (low, high))
    grid = ops.fake_quantize(input, first, last, least, most, 256)
    return ops.convert(grid, destination)


@translation("dequantize")
def dequantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None
) -> Result:
    """``scale * (input - zero_point)``, per tensor or along ``axis``."""
    if is_float(input):
        raise refusal("dequantize of floats", element_type(input), "int8 or uint8")
    grid = _fuse_dequantize(input, scale, zero_point, axis)
    if grid is not None:
        return grid
    value = ops.convert(input, "f32")
    if zero_point is not None:
        value = ops.subtract(value, _align(_f32(zero_point), input, axis))
    return ops.multiply(value, _align(scale, input, axis))


def _fuse_dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None
) -> Any | None:
    """Return a ``quantize`` and a dequantize with constants as one fake-quantize; None for others.

    Without the fusion, concatenating the result with other values would round those to integers:
    OpenVINO 2026.4's CPU plugin moves the scale past the conversion back from integers.
    """
    conversion = output(codes).get_node()
    if conversion.get_type_name() != "Convert":
        return None
    grid = conversion.input_value(0).get_node()
    if grid.get_type_name() != "FakeQuantize":
        return None
    source, first, last, *ends = (grid.input_value(port) for port in range(5))
    bounds = [constant_data(end) for end in ends]
    step = _align(_f32(scale), codes, axis)
    shift = None if zero_point is None else _align(_f32(zero_point), codes, axis)
    if constant_data(step) is None or (shift is not None and constant_data(shift) is None):
        return None
    low, high = (
        _dequantize_bound(float(bound), step, shift) for bound in bounds if bound is not None
    )
    return ops.fake_quantize(source, first, last, low, high, 256)


def _f32(parameter: Tensor) -> Any:
    constant = constant_data(parameter)
    return f32(parameter) if constant is None else ops.constant(np.asarray(constant, np.float32))


def _dequantize_bound(bound: float, step: Tensor, shift: Tensor | None) -> Any:
    """Return ``step * (bound - shift)``, folded if ``step`` and ``shift`` are constants.

    The plugin uses integer kernels only for fake-quantizes with constant bounds, and decides so
    before it folds constants.
    """
    scale, zero = constant_data(step), np.zeros(()) if shift is None else constant_data(shift)
    if scale is not None and zero is not None:
        return ops.constant(
            np.asarray(scale, np.float32) * (np.float32(bound) - np.asarray(zero, np.float32))
        )
    end = ops.constant(np.float32(bound))
    return ops.multiply(end if shift is None else ops.subtract(end, shift), step)


def _align(parameter: Tensor, data: Tensor, axis: int | None) -> Any:
    """Return a scalar unchanged, or a vector reshaped to broadcast along ``axis`` of ``data``.

    A constant stays one: see ``_dequantize_bound``.
    """
    total = rank(data)
    if rank(parameter) == 0 or axis is None:
        return parameter
    constant = constant_data(parameter)
    if constant is None:
        return per_channel(parameter, total, axis % total)
    shape = [1] * total
    shape[axis] = -1
    return ops.constant(constant.reshape(shape))
