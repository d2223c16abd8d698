"""Pooling over windows."""

from __future__ import annotations

import math

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.convolution import auto_pad, split_pad
from coreml_delegate.runtime.engines.openvino.graph import rank, scalar
from coreml_delegate.runtime.engines.openvino.registry import Ints, Result, Tensor, translation


@translation("max_pool")
def max_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Result:
    """Maximum over windows of ``x`` [N, C, *spatial]."""
    spatial = rank(x) - 2
    begin, end = split_pad(pad_type, pad, spatial)
    return ops.max_pool(
        x,
        list(strides or [1] * spatial),
        [1] * spatial,
        begin,
        end,
        list(kernel_sizes),
        _rounding(ceil_mode),
        _pool_pad(pad_type),
    ).output(0)


@translation("avg_pool")
def avg_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Result:
    """Mean over windows of ``x`` [N, C, *spatial]."""
    spatial = rank(x) - 2
    begin, end = split_pad(pad_type, pad, spatial)
    return ops.avg_pool(
        x,
        list(strides or [1] * spatial),
        begin,
        end,
        list(kernel_sizes),
        exclude_padding_from_average,
        _rounding(ceil_mode),
        _pool_pad(pad_type),
    )


@translation("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Result:
    """Euclidean norm over windows of ``x`` [N, C, *spatial]."""
    mean = avg_pool(ops.multiply(x, x), kernel_sizes, pad_type, strides, pad, ceil_mode=ceil_mode)
    return ops.sqrt(ops.multiply(mean, scalar(math.prod(kernel_sizes), x)))


def _rounding(ceil_mode: bool) -> str:
    # torch's rule, which MIL states too: no window may start in the padding after the input.
    return "ceil_torch" if ceil_mode else "floor"


def _pool_pad(pad_type: str) -> str:
    # OpenVINO ignores the rounding mode under "valid"; zero explicit pads are the same padding.
    return "explicit" if pad_type == "valid" else auto_pad(pad_type)
