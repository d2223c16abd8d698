"""Convolutions.

Source: coremltools' MIL op reference, ``conv``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels.spatial import (
    pad_spatial,
    resolve_padding,
    window_extent,
)
from coreml_delegate.runtime.engines.reference.registry import Ints, kernel

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@kernel("conv", widen=True)
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolution; ``x``: [N, C_in, *spatial], ``weight``: [C_out, C_in / groups, *K]."""
    rank = x.dim() - 2
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    extents = window_extent(weight.shape[2:], dilations)
    padding = resolve_padding(pad_type, pad, x.shape[2:], extents, strides)
    symmetric = all(before == after for before, after in padding)
    if not symmetric:
        x = pad_spatial(x, padding)
    return _CONV[rank](
        x,
        weight,
        bias,
        stride=strides,
        padding=tuple(before for before, _ in padding) if symmetric else 0,
        dilation=dilations,
        groups=groups,
    )


@kernel("conv_quantized", widen=True)
def conv_quantized(
    x: Tensor,
    weight: Tensor,
    quantization_type: str,
    quant_scale: Tensor,
    quant_bias: Tensor,
    bias: Tensor | None = None,
    nbits: int = 8,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolution with ``weight * quant_scale + quant_bias``; one weight per byte only."""
    if quantization_type != "linear" or nbits != 8:
        raise ValueError(
            f"conv_quantized is implemented for 8-bit linear weights, not {nbits}-bit "
            f"{quantization_type}"
        )

    def per_channel(value: Tensor) -> Tensor:
        return value.reshape(-1, *(1,) * (weight.dim() - 1)) if value.dim() == 1 else value

    dense = weight.float() * per_channel(quant_scale) + per_channel(quant_bias)
    floats = None if bias is None else bias.float()
    return conv(x, dense, floats, strides, pad_type, pad, dilations, groups)


@kernel("conv_transpose", widen=True)
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: Ints | None = None,
    output_shape: Ints | None = None,
    pad_type: str = "valid",
    strides: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    """Transposed convolution; ``x``: [N, C_in, *spatial], ``weight``: [C_in, C_out / groups, *K].

    The full result is cropped by ``pad``; for ``same``, evenly around to ``spatial * strides``.
    ``output_shape`` overrides the size and moves the end: what lies beyond the full result is bias
    alone.
    """
    rank = x.dim() - 2
    strides = strides or (1,) * rank
    full = _CONV_TRANSPOSE[rank](
        x, weight, None, stride=strides, dilation=dilations or (1,) * rank, groups=groups
    )
    sizes = full.shape[2:]
    if pad_type == "same":
        targets = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
        targets = list(output_shape[2:]) if output_shape else targets
        starts = [max(0, size - target) // 2 for size, target in zip(sizes, targets, strict=True)]
    else:
        crops = resolve_padding(pad_type, pad, sizes, sizes, strides)
        starts = [before for before, _ in crops]
        targets = [size - sum(crop) for size, crop in zip(sizes, crops, strict=True)]
        targets = list(output_shape[2:]) if output_shape else targets
    ends = [
        start + target - size for start, target, size in zip(starts, targets, sizes, strict=True)
    ]
    result = pad_spatial(full, [(-start, end) for start, end in zip(starts, ends, strict=True)])
    return result if bias is None else result + bias.reshape(-1, *(1,) * rank)
