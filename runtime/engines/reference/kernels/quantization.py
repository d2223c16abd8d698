"""Affine quantization of activations.

Source: coremltools' MIL op reference, ``quantization_ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel
from coreml_delegate.runtime.engines.reference.values import storage_dtype
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.targets import Opset


def along_axis(parameter: Tensor, axis: int | None, rank: int) -> Tensor:
    """Return a scale or zero point reshaped to broadcast along ``axis`` of a tensor.

    Args:
        parameter: A scalar, or a vector along ``axis``.
        axis: Axis of a vector.
        rank: Rank of the tensor.

    Raises:
        ValueError: A vector without ``axis``.
    """
    if parameter.dim() == 0:
        return parameter
    if axis is None:
        raise ValueError("a scale or zero point per channel needs an axis")
    return parameter.reshape(-1, *(1,) * (rank - 1 - axis % rank))


@kernel("quantize", since=Opset.iOS17, widen=True)
def quantize(
    input: Tensor,
    scale: Tensor,
    output_dtype: str,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> Tensor:
    """``clip(round(input / scale) + zero_point)`` in ``output_dtype``; halves round to even."""
    levels = torch.round(input / along_axis(scale, axis, input.dim()))
    if zero_point is not None:
        levels = levels + along_axis(zero_point, axis, input.dim()).float()
    target = storage_dtype(DType.from_label(output_dtype))
    limits = torch.iinfo(target)
    return levels.clamp(limits.min, limits.max).to(target)


@kernel("dequantize", since=Opset.iOS17, widen=True)
def dequantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None
) -> Tensor:
    """``scale * (input - zero_point)``."""
    levels = input.float()
    if zero_point is not None:
        levels = levels - along_axis(zero_point, axis, input.dim()).float()
    return levels * along_axis(scale, axis, input.dim())
