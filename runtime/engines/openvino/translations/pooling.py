"""Pooling over windows."""

from __future__ import annotations

import math
from typing import Any

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import ints, rank, scalar, static_dims
from coreml_delegate.runtime.engines.openvino.plugin import nan
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.translations.convolution import auto_pad, split_pad
from coreml_delegate.runtime.engines.openvino.values import Ints, Result, Tensor


@translation("max_pool")
def max_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    ceil_mode: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """Maximum over windows of ``x`` [N, C, *spatial]."""
    spatial = rank(x) - 2
    begin, end = split_pad(pad_type, pad, spatial)

    def pool(x: Tensor) -> Any:
        return ops.max_pool(
            x,
            list(strides or [1] * spatial),
            [1] * spatial,
            begin,
            end,
            list(kernel_sizes),
            _rounding(ceil_mode),
            _auto_pad(pad_type),
        ).output(0)

    return nan.spread_nan(pool, x, sign=1) if exact_nan else pool(x)


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
    kernel, stride = list(kernel_sizes), list(strides or [1] * spatial)
    begin, end = split_pad(pad_type, pad, spatial)
    exclude = exclude_padding_from_average
    if ceil_mode and not exclude:
        x, begin, end = _pad_counted(x, kernel, stride, begin, end)
        ceil_mode, exclude = False, True
    return ops.avg_pool(
        x, stride, begin, end, kernel, exclude, _rounding(ceil_mode), _auto_pad(pad_type)
    )


def _pad_counted(
    x: Tensor, kernel: list[int], stride: list[int], begin: list[int], end: list[int]
) -> tuple[Any, list[int], list[int]]:
    """Return ``x`` with its padding as data, and the padding that is left to OpenVINO.

    MIL includes the padding in the mean, but not positions beyond it that windows cover. OpenVINO
    has only one kind of padding, so it gets the positions beyond.
    """
    total = rank(x)
    beyond: list[int] = []
    for size, reach, step, before, after in zip(
        static_dims(x, range(2, total)), kernel, stride, begin, end, strict=True
    ):
        outputs = -(-(size + before + after - reach) // step) + 1
        if (outputs - 1) * step >= size + before:
            outputs -= 1
        beyond.append(max((outputs - 1) * step + reach - (size + before + after), 0))
    if any(begin) or any(end):
        x = ops.pad(x, ints([0, 0, *begin]), ints([0, 0, *end]), "constant", scalar(0, x))
    return x, [0] * len(beyond), beyond


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
    x = ops.multiply(x, x)
    if ceil_mode:  # with zeros for positions beyond the padding
        spatial = rank(x) - 2
        begin, end = split_pad(pad_type, pad, spatial)
        steps = list(strides or [1] * spatial)
        x, _, beyond = _pad_counted(x, list(kernel_sizes), steps, begin, end)
        pads = ints([0] * rank(x)), ints([0, 0, *beyond])
        x, pad_type, pad = ops.pad(x, *pads, "constant", scalar(0, x)), "valid", None
    mean = avg_pool(x, kernel_sizes, pad_type, strides, pad)
    return ops.sqrt(ops.multiply(mean, scalar(math.prod(kernel_sizes), x)))


def _rounding(ceil_mode: bool) -> str:
    # torch's rule, which MIL documents too: no window may start in the padding after the input.
    return "ceil_torch" if ceil_mode else "floor"


def _auto_pad(pad_type: str) -> str:
    # OpenVINO ignores the rounding mode under "valid"; zero explicit pads are the same padding.
    return "explicit" if pad_type == "valid" else auto_pad(pad_type)
