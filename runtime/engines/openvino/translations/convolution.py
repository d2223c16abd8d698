"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    dims,
    f32,
    ints,
    per_channel,
    rank,
    reshape,
    scalar,
    static_dims,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Ints, Result, Tensor, refusal

_INT32_MAX = 2**31 - 1

AUTO_PAD: dict[str, str] = {
    "valid": "valid",
    "custom": "explicit",
    "same": "same_upper",
    "same_lower": "same_lower",
}
"""MIL ``pad_type`` -> OpenVINO ``auto_pad``."""


def auto_pad(pad_type: str) -> str:
    """Return OpenVINO's name of a MIL ``pad_type``.

    Raises:
        UnsupportedOpError: No such ``pad_type``.
    """
    if pad_type not in AUTO_PAD:
        raise refusal("unknown pad_type", pad_type, ", ".join(AUTO_PAD))
    return AUTO_PAD[pad_type]


def split_pad(
    pad_type: str, pad: Sequence[int] | None, spatial: int
) -> tuple[list[int], list[int]]:
    """Return padding before and after ``spatial`` dimensions; zeros unless ``custom``."""
    if pad is None or pad_type != "custom":
        return [0] * spatial, [0] * spatial
    return list(pad[0::2]), list(pad[1::2])


@translation("conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Result:
    """Convolution of ``x`` [N, C_in, *spatial] with ``weight`` [C_out, C_in / groups, *kernel]."""
    axes = rank(x)
    unit = [1] * (axes - 2)
    begin, end = split_pad(pad_type, pad, axes - 2)
    strides = tuple(strides or unit)
    if any(begin + end) and strides != tuple(unit) and _is_pointwise(weight):
        x, strides = _pad_and_stride(x, begin, end, strides), tuple(unit)
        begin = end = [0] * len(unit)
    build = ops.convolution
    if groups != 1 or _may_become_product(weight):
        build = ops.group_convolution
        out_channels, in_channels, *kernel = static_dims(weight, range(axes))
        weight = reshape(weight, (groups, out_channels // groups, in_channels, *kernel))
    result = build(
        x, weight, list(strides), begin, end, list(dilations or unit), auto_pad(pad_type)
    )
    return result if bias is None else ops.add(result, per_channel(bias, axes))


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in dims(weight)[2:])


def _may_become_product(weight: Tensor) -> bool:
    """Whether OpenVINO 2026.4 may turn the convolution into a matrix product.

    It does so for decompressed weights, and then mistakes transposes and reshapes around the
    convolution for changes between channels-first and channels-last. It does not do so for a group
    convolution, even with one group.
    """
    is_decompressed = constant_data(weight) is None and None not in dims(weight)
    return is_decompressed and rank(weight) == 4 and _is_pointwise(weight)


def _pad_and_stride(
    x: Tensor, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Return the pixels of ``x`` that a strided 1 x 1 convolution reads, padding included.

    OpenVINO moves the strides of such a convolution to the op that produces its input, and ignores
    the padding.
    """
    padded = ops.pad(x, ints([0, 0, *begin]), ints([0, 0, *end]), "constant", scalar(0.0, x))
    axes = list(range(2, 2 + len(strides)))
    first, last = ints([0] * len(axes)), ints([_INT32_MAX] * len(axes))
    return ops.slice(padded, first, last, ints(strides), ints(axes))


@translation("conv_quantized")
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
) -> Result:
    """Convolution with ``weight * quant_scale + quant_bias``; 8-bit weights only."""
    if quantization_type != "linear" or nbits != 8:
        raise refusal("conv_quantized", f"{nbits}-bit {quantization_type}", "8-bit linear weights")
    axes = rank(weight)
    scale, shift = (per_channel(value, axes, 0) for value in (quant_scale, quant_bias))
    dense = ops.add(ops.multiply(f32(weight), scale), shift)
    floats = None if bias is None else f32(bias)
    return conv(x, dense, floats, strides, pad_type, pad, dilations, groups)


@translation("conv_transpose")
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
) -> Result:
    """Transposed convolution with ``weight`` [C_in, C_out / groups, *kernel]."""
    axes = rank(x)
    spatial = axes - 2
    stride = list(strides or [1] * spatial)
    dilation = list(dilations or [1] * spatial)
    in_channels, out_channels, *kernel = static_dims(weight, range(axes))
    extent = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    begin, end = split_pad(pad_type, pad, spatial)
    if pad_type == "same":
        begin, end = _same_padding(extent, stride)
    if output_shape is not None:
        sizes = static_dims(x, range(2, axes))
        defaults = [
            (size - 1) * step + reach - before - after
            for size, step, reach, before, after in zip(
                sizes, stride, extent, begin, end, strict=True
            )
        ]
        requested = output_shape[-spatial:]
        end = [
            after + default - size
            for after, default, size in zip(end, defaults, requested, strict=True)
        ]
    build = ops.convolution_backprop_data
    if groups != 1:
        build = ops.group_convolution_backprop_data
        weight = reshape(weight, (groups, in_channels // groups, out_channels, *kernel))
    result = build(
        x,
        weight,
        stride,
        pads_begin=begin,
        pads_end=[max(after, 0) for after in end],
        dilations=dilation,
        auto_pad="explicit",
        # A negative pad at the end stands for outputs that the kernel does not reach.
        output_padding=[max(-after, 0) for after in end],
    )
    return result if bias is None else ops.add(result, per_channel(bias, axes))


def _same_padding(extent: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return padding for outputs of ``stride`` times the input size; an odd one pads the end."""
    totals = [reach - step for reach, step in zip(extent, stride, strict=True)]
    begin = [max(total, 0) // 2 for total in totals]
    return begin, [total - before for total, before in zip(totals, begin, strict=True)]
