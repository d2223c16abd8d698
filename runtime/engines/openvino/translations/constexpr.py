"""Compressed constants (``constexpr_*``).

Integer weights stay integers in the graph, followed by the conversion, shift and scale that
OpenVINO recognises as decompression. Lookup tables and sparse weights are expanded at compile time,
by the reference engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import array_constant, f32, integer_constant
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Array, Integers, Ints, Result, Weight
from coreml_delegate.runtime.engines.reference.kernels import constexpr as kernels
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Packed, writable_alias
from coreml_delegate.targets import Opset


def _as_float32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    return array.astype(np.float32)


def _blocks(
    data_shape: Sequence[int], scale_shape: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Return shapes of ``data`` and ``scale`` in which each scale broadcasts over its block.

    A blocked axis becomes two, (blocks, block size). An axis along which a scale covers one element
    or all elements stays one axis: groups along rows give [rows, groups, group size], the only form
    that the plugin multiplies without expanding it. None if no axis is blocked, so that plain
    broadcasting works.
    """
    if all(count in (1, size) for size, count in zip(data_shape, scale_shape, strict=True)):
        return None
    data: list[int] = []
    scale: list[int] = []
    for size, count in zip(data_shape, scale_shape, strict=True):
        is_unblocked = count in (1, size)
        data += [size] if is_unblocked else [count, size // count]
        scale += [count] if is_unblocked else [count, 1]
    return data, scale


def _unpacked(integers: Integers) -> NDArray[np.generic]:
    return integers.unpack() if isinstance(integers, Packed) else integers


def _shift_scale(
    data: Integers, scale: NDArray[np.generic], offset: NDArray[np.generic] | None
) -> Weight:
    """Return ``scale * (data - offset)``, with a scale and an offset for each block."""
    shapes = _blocks(data.shape, scale.shape)
    split_data, split_scale = shapes or (list(data.shape), list(scale.shape))

    def dense() -> NDArray[np.generic]:
        values = _as_float32(_unpacked(data).reshape(split_data))
        if offset is not None:
            values = values - _as_float32(offset.reshape(split_scale))
        return (values * _as_float32(scale.reshape(split_scale))).reshape(data.shape)

    def node() -> Any:
        # Convolutions have no 4-bit kernels, only 8-bit kernels between quantized values.
        if len(data.shape) <= 2:
            constant = integer_constant(data, split_data)
        else:
            constant = array_constant(_unpacked(data).reshape(split_data))
        value = ops.convert(constant, "f32")
        if offset is not None:
            shift = np.ascontiguousarray(offset.reshape(split_scale))
            value = ops.subtract(value, f32(ops.constant(shift)))
        value = ops.multiply(value, ops.constant(_as_float32(scale.reshape(split_scale))))
        if shapes is not None:
            value = ops.reshape(
                value, ops.constant(np.asarray(data.shape, np.int32)), special_zero=False
            )
        return value.output(0)

    has_integers = isinstance(data, Packed) or np.issubdtype(data.dtype, np.integer)
    return Weight(dense, node if has_integers else None)


@translation("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(
    data: Integers, scale: Array, offset: Array | None = None
) -> Result:
    """``scale * (data - offset)``, with a scale and an offset for each block of ``data``."""
    return _shift_scale(data, scale, offset)


@translation("constexpr_affine_dequantize")
def constexpr_affine_dequantize(
    quantized_data: Array, zero_point: Array, scale: Array, axis: int
) -> Result:
    """``scale * (quantized_data - zero_point)``, per tensor or along ``axis``."""
    if quantized_data.dtype == np.uint8 and np.all(zero_point == 128):
        # OpenVINO's 8-bit kernels are fastest with int8 and without zero points.
        quantized_data = np.bitwise_xor(quantized_data, np.uint8(128)).view(np.int8)
        zero_point = np.zeros(1, np.int8)
    shape = [1] * quantized_data.ndim
    if scale.size > 1 or zero_point.size > 1:
        shape[axis] = quantized_data.shape[axis]
    size = math.prod(shape)
    scales, offsets = (
        np.broadcast_to(parameter.reshape(-1), (size,)).reshape(shape)
        for parameter in (scale, zero_point)
    )
    return _shift_scale(quantized_data, scales, offsets if offsets.any() else None)


@translation("constexpr_cast")
def constexpr_cast(source_val: Array, output_dtype: str) -> Result:
    """``source_val`` as ``output_dtype``."""
    destination = DType.from_label(output_dtype).numpy
    return Weight(lambda: source_val.astype(destination))


def _expand(function: Callable[..., torch.Tensor], *arguments: Integers) -> Weight:
    """Return a weight that a kernel of the reference engine expands at compile time."""

    def dense() -> NDArray[np.generic]:
        arrays = (np.asarray(_unpacked(argument), order="C") for argument in arguments)
        return function(*(torch.from_numpy(writable_alias(array)) for array in arrays)).numpy()

    return Weight(dense)


@translation("constexpr_lut_to_dense", since=Opset.iOS16)
def constexpr_lut_to_dense_ios16(indices: Array, lut: Array, shape: Ints) -> Result:
    """``lut[indices]``; the indices are packed from the least significant bit on."""
    kernel = kernels.constexpr_lut_to_dense_ios16
    return _expand(lambda indices, lut: kernel(indices, lut, shape), indices, lut)


@translation("constexpr_lut_to_dense", since=Opset.iOS18)
def constexpr_lut_to_dense_ios18(
    indices: Integers, lut: Array, vector_axis: int | None = None
) -> Result:
    """``lut[indices]``; ``lut`` [*groups, palettes, vector] has a table per block of indices."""
    kernel = kernels.constexpr_lut_to_dense_ios18
    return _expand(lambda indices, lut: kernel(indices, lut, vector_axis), indices, lut)


@translation("constexpr_sparse_to_dense", since=Opset.iOS16)
def constexpr_sparse_to_dense_ios16(nonzero_data: Array, mask: Array, shape: Ints) -> Result:
    """``nonzero_data`` where the packed bits of ``mask`` are set, zeros elsewhere."""
    kernel = kernels.constexpr_sparse_to_dense_ios16
    return _expand(lambda data, mask: kernel(data, mask, shape), nonzero_data, mask)


@translation("constexpr_sparse_to_dense", since=Opset.iOS18)
def constexpr_sparse_to_dense_ios18(nonzero_data: Array, mask: Array) -> Result:
    """``nonzero_data`` where ``mask`` is set, zeros elsewhere."""
    return _expand(kernels.constexpr_sparse_to_dense_ios18, nonzero_data, mask)


@translation("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(
    indices_mask: Array, indices_nonzero_data: Array, lut: Array, vector_axis: int | None = None
) -> Result:
    """Mask and nonzero values of a sparse weight with a lookup table of nonzero values."""
    values = _expand(
        lambda mask, data, lut: kernels.constexpr_lut_to_sparse(mask, data, lut, vector_axis)[1],
        *(indices_mask, indices_nonzero_data, lut),
    )
    mask = _expand(
        lambda mask, lut: kernels.mask_of_vectors(mask, lut, vector_axis), indices_mask, lut
    )
    return mask, values


@translation("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(
    data_mask: Array, nonzero_data: Array, scale: Array, offset: Array | None = None
) -> Result:
    """Mask and nonzero values of a sparse weight with quantized nonzero values."""
    arguments = [data_mask, nonzero_data, scale, *([] if offset is None else [offset])]
    kernel = kernels.constexpr_sparse_blockwise_shift_scale
    return Weight(lambda: data_mask), _expand(lambda *tensors: kernel(*tensors)[1], *arguments)
