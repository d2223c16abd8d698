"""Pooling.

Every mode pads explicitly and pools without padding. Averages are divided by a count that is pooled
likewise, so that excluded padding and windows cut by ``ceil_mode`` are no special cases.

Source: coremltools' MIL op reference, ``pool``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.runtime.engines.reference.kernels.convolution import (
    Padding,
    pad_spatial,
    resolve_padding,
)

_MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True, slots=True)
class _Windows:
    sizes: Ints
    strides: Ints
    padding: Padding  # of the program
    overhang: Padding  # elements beyond the padding that windows cover with ceil_mode

    @property
    def pads(self) -> bool:
        return any(pair != (0, 0) for pair in (*self.padding, *self.overhang))


def _windows(
    spatial: Sequence[int],
    sizes: Ints,
    strides: Ints | None,
    pad_type: str,
    pad: Ints | None,
    ceil_mode: bool,
) -> _Windows:
    strides = strides or (1,) * len(sizes)
    padding = resolve_padding(pad_type, pad, spatial, sizes, strides)
    overhang = ((0, 0),) * len(sizes)
    if ceil_mode:
        overhang = tuple(
            (0, _overhang(size + sum(pair), size + pair[0], k, s))
            for size, pair, k, s in zip(spatial, padding, sizes, strides, strict=True)
        )
    return _Windows(sizes, strides, padding, overhang)


def _overhang(padded: int, last_start: int, window: int, stride: int) -> int:
    count = -(-(padded - window) // stride) + 1
    # Drop a window that would start in the padding after the input, if there is such padding.
    if (count - 1) * stride >= last_start and padded > last_start:
        count -= 1
    return max(0, (count - 1) * stride + window - padded)


@kernel("max_pool")
def max_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum per window of ``x``: [N, C, *spatial], padded with minus infinity."""
    windows = _windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = pad_spatial(pad_spatial(x, windows.padding, -math.inf), windows.overhang, -math.inf)
    return _MAX[x.dim() - 2](padded, windows.sizes, windows.strides)


@kernel("avg_pool", widen=True)
def avg_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """Mean per window of ``x``: [N, C, *spatial]; the padding counts unless it is excluded."""
    windows = _windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, ceil_mode)
    mean = _mean(x, windows)
    if not windows.pads:
        return mean
    counted = pad_spatial(
        x.new_ones(1, 1, *x.shape[2:]), windows.padding, float(not exclude_padding_from_average)
    )
    counted = pad_spatial(counted, windows.overhang)
    share = _MEAN[x.dim() - 2](counted, windows.sizes, windows.strides)
    return torch.where(share > 0, mean / share, torch.zeros_like(mean))


@kernel("l2_pool", widen=True)
def l2_pool(
    x: Tensor,
    kernel_sizes: Ints,
    pad_type: str,
    strides: Ints | None = None,
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """``sqrt(sum(x ** 2))`` per window of ``x``: [N, C, *spatial]."""
    windows = _windows(x.shape[2:], kernel_sizes, strides, pad_type, pad, ceil_mode)
    return torch.sqrt(_mean(x * x, windows) * math.prod(windows.sizes))


def _mean(x: Tensor, windows: _Windows) -> Tensor:
    padded = pad_spatial(pad_spatial(x, windows.padding), windows.overhang)
    return _MEAN[x.dim() - 2](padded, windows.sizes, windows.strides)
