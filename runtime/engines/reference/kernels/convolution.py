"""Convolutions, and the arithmetic of windows that pooling and padding share with them.

Source: coremltools' MIL op reference, ``conv``; ``aggregated_pad`` and
``spatial_dimensions_out_shape`` of coremltools for the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel

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
    """Convolution with ``weight * quant_scale + quant_bias``; 8-bit weights only."""
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

    The full result is cropped by ``pad``; for ``same``, evenly to ``spatial * strides``.
    ``output_shape`` overrides the size and moves the end: positions beyond the full result have
    only the bias.
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


# --- windows and padding --------------------------------------------------------------------------

Padding = tuple[tuple[int, int], ...]
"""Elements before and after, per spatial dimension."""


def window_extent(kernel_sizes: Sequence[int], dilations: Sequence[int]) -> tuple[int, ...]:
    """Return the number of input elements that a dilated window spans, per spatial dimension."""
    return tuple((k - 1) * d + 1 for k, d in zip(kernel_sizes, dilations, strict=True))


def resolve_padding(
    pad_type: str,
    pad: Sequence[int] | None,
    sizes: Sequence[int],
    extents: Sequence[int],
    strides: Sequence[int],
) -> Padding:
    """Return the padding of a ``pad_type``.

    Args:
        pad_type: ``valid``, ``custom``, ``same`` (an odd element is at the end) or ``same_lower``
            (at the start).
        pad: [2 * spatial]: before and after, for ``custom``.
        sizes: Input size per spatial dimension.
        extents: Window extent per spatial dimension.
        strides: Stride per spatial dimension.

    Raises:
        ValueError: Unknown ``pad_type``, or ``custom`` without a pair per dimension.
    """
    mode = pad_type.lower()
    if mode == "valid":
        return ((0, 0),) * len(sizes)
    if mode == "custom":
        if pad is None or len(pad) != 2 * len(sizes):
            raise ValueError(f"pad_type 'custom' needs {2 * len(sizes)} values of pad, got {pad}")
        return tuple(zip(pad[::2], pad[1::2], strict=True))
    if mode not in ("same", "same_lower"):
        raise ValueError(f"pad_type is {pad_type!r}, not valid, custom, same or same_lower")
    totals = [
        max(0, (-(-size // stride) - 1) * stride + extent - size)
        for size, extent, stride in zip(sizes, extents, strides, strict=True)
    ]
    halves = [(total // 2, total - total // 2) for total in totals]
    return tuple(halves if mode == "same" else [(after, before) for before, after in halves])


def pad_spatial(x: Tensor, padding: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return ``x`` padded with ``value`` along its last dimensions; negative amounts crop."""
    if not any(before or after for before, after in padding):
        return x
    return F.pad(x, [amount for pair in reversed(padding) for amount in pair], value=value)
