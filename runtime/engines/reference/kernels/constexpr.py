"""Compressed weights: ops with constant arguments, evaluated at compile time.

Source: coremltools' MIL op reference, ``constexpr_ops`` (iOS16) and ``compression`` (iOS18).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from coreml_delegate.formats.weight_file import unpack_integers
from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.runtime.engines.reference.kernels.quantization import along_axis
from coreml_delegate.targets import Opset


def _unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    if bits == 8:
        return packed[:count]
    return torch.from_numpy(unpack_integers(packed.numpy().view(np.uint8), bits, count))


def _repeat_blocks(value: Tensor, shape: torch.Size) -> Tensor:
    """Return ``value`` repeated over the blocks of ``shape``, except along axes that broadcast."""
    for axis, (blocks, size) in enumerate(zip(value.shape, shape, strict=True)):
        if size % blocks:
            raise ValueError(f"{blocks} blocks do not divide a size of {size} (axis {axis})")
        if blocks not in (1, size):
            value = value.repeat_interleave(size // blocks, dim=axis)
    return value


@kernel("constexpr_cast", since=Opset.iOS16)
@kernel("constexpr_cast", since=Opset.iOS18)
def constexpr_cast(
    source_val: Tensor,
    output_dtype: str,  # noqa: ARG001 - the declared type of the output says the same
) -> Tensor:
    """``source_val`` as ``output_dtype``."""
    return source_val


@kernel("constexpr_affine_dequantize", since=Opset.iOS16, widen=True)
def constexpr_affine_dequantize(
    quantized_data: Tensor, zero_point: Tensor, scale: Tensor, axis: int
) -> Tensor:
    """``scale * (quantized_data - zero_point)``, per tensor or along ``axis``."""
    rank = quantized_data.dim()
    shifted = quantized_data.float() - along_axis(zero_point, axis, rank).float()
    return shifted * along_axis(scale, axis, rank)


@kernel("constexpr_lut_to_dense", since=Opset.iOS16)
def constexpr_lut_to_dense_ios16(indices: Tensor, lut: Tensor, shape: Ints) -> Tensor:
    """``lut[indices]``, reshaped to ``shape``; indices are packed, least significant bits first."""
    bits = max(1, lut.numel().bit_length() - 1)
    return lut[_unpack(indices, bits, math.prod(shape)).long()].reshape(shape)


@kernel("constexpr_sparse_to_dense", since=Opset.iOS16)
def constexpr_sparse_to_dense_ios16(nonzero_data: Tensor, mask: Tensor, shape: Ints) -> Tensor:
    """``nonzero_data`` where the packed bits of ``mask`` are set, else 0, reshaped to ``shape``."""
    return _to_dense(nonzero_data, _unpack(mask, 1, math.prod(shape)).reshape(shape))


@kernel("constexpr_blockwise_shift_scale", since=Opset.iOS18, widen=True)
def constexpr_blockwise_shift_scale(
    data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> Tensor:
    """``scale * (data - offset)``, with a scale and an offset per block; all have the same rank."""
    values = data.float()
    if offset is not None:
        values = values - _repeat_blocks(offset, data.shape).float()
    return values * _repeat_blocks(scale, data.shape)


@kernel("constexpr_lut_to_dense", since=Opset.iOS18)
def constexpr_lut_to_dense_ios18(
    indices: Tensor, lut: Tensor, vector_axis: int | None = None
) -> Tensor:
    """``lut[indices]``, with a table per block of indices.

    Args:
        indices: [*shape], unsigned.
        lut: [*blocks, palettes, vector], one table per block of ``shape``.
        vector_axis: Dimension of the result along which the elements of a vector lie; required for
            vectors of more than one element.
    """
    vector = lut.shape[-1]
    if vector > 1 and vector_axis is None:
        raise ValueError(f"lut has vectors of {vector} elements but vector_axis is missing")
    per_index = torch.Size((*indices.shape, *lut.shape[-2:]))
    tables = _repeat_blocks(lut, per_index).expand(per_index)
    chosen = indices.long()[..., None, None].expand(*indices.shape, 1, vector)
    entries = tables.gather(-2, chosen).squeeze(-2)
    if vector_axis is None or vector == 1:
        return entries.squeeze(-1)
    axis = vector_axis % indices.dim()
    return entries.movedim(-1, axis + 1).flatten(axis, axis + 1)


@kernel("constexpr_sparse_to_dense", since=Opset.iOS18)
def constexpr_sparse_to_dense_ios18(nonzero_data: Tensor, mask: Tensor) -> Tensor:
    """``nonzero_data`` where ``mask`` is set, else 0."""
    return _to_dense(nonzero_data, mask)


@kernel("constexpr_lut_to_sparse", since=Opset.iOS18)
def constexpr_lut_to_sparse(
    indices_mask: Tensor, indices_nonzero_data: Tensor, lut: Tensor, vector_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mask and nonzero values of ``constexpr_lut_to_dense`` on sparse indices."""
    dense = constexpr_lut_to_dense_ios18(
        _to_dense(indices_nonzero_data, indices_mask), lut, vector_axis
    )
    mask = mask_of_vectors(indices_mask, lut, vector_axis)
    return mask, dense[mask != 0]


def mask_of_vectors(mask: Tensor, lut: Tensor, axis: int | None) -> Tensor:
    """Return the mask of values for a mask of indices; a value is a vector along ``axis``."""
    if axis is None or lut.shape[-1] == 1:
        return mask
    return mask.repeat_interleave(lut.shape[-1], dim=axis)


@kernel("constexpr_sparse_blockwise_shift_scale", since=Opset.iOS18, widen=True)
def constexpr_sparse_blockwise_shift_scale(
    data_mask: Tensor, nonzero_data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mask and nonzero values of ``constexpr_blockwise_shift_scale`` on sparse data."""
    dense = constexpr_blockwise_shift_scale(_to_dense(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask != 0]


def _to_dense(nonzero_data: Tensor, mask: Tensor) -> Tensor:
    result = nonzero_data.new_zeros(mask.shape)
    result[mask != 0] = nonzero_data
    return result
