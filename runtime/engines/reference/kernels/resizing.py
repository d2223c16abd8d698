"""Resizing of images.

Resizing is separable: each dimension has a grid of source positions, and the result is interpolated
linearly at them (or takes the nearest element).

Source: coremltools' MIL op reference, ``image_resizing``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.targets import Opset


def sampling_grid(mode: str, start: Tensor, end: Tensor, count: int) -> Tensor:
    """Return the positions that sample [start, end] ``count`` times.

    Args:
        mode: MIL's ``sampling_mode``.
        start: [*], fp64: position of the first element.
        end: [*], fp64: position of the last element.
        count: Number of samples.

    Returns:
        [*, count], fp64, not yet bounded to the image.
    """
    steps = torch.arange(count, dtype=torch.float64)
    start, end = start.unsqueeze(-1), end.unsqueeze(-1)
    length = end - start
    extent = length + torch.where(length < 0, -1.0, 1.0)
    if mode == "ALIGN_CORNERS" and count == 1:
        return start + length / 2
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        return start + steps * length / max(1, count - 1)
    if mode == "DEFAULT":
        return start + steps * extent / count
    if mode == "UNALIGN_CORNERS":
        return start + (steps + 0.5) * extent / count - 0.5
    if mode == "OFFSET_CORNERS":
        return start + (steps + 0.5) * length.clamp(min=1.0) / count
    raise ValueError(
        f"sampling mode is {mode!r}, not STRICT_ALIGN_CORNERS, ALIGN_CORNERS, DEFAULT, "
        "UNALIGN_CORNERS or OFFSET_CORNERS"
    )


def _full_grid(mode: str, size: int, count: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return sampling_grid(mode, zero, zero + (size - 1), count).clamp(0, size - 1)


def sample_linearly(x: Tensor, axis: int, positions: Tensor) -> Tensor:
    """Interpolate ``x`` linearly at ``positions`` [count] along ``axis``, which is negative."""
    low = positions.floor().clamp(0, x.shape[axis] - 1)
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    weight = (positions - low).to(x.dtype).reshape(-1, *(1,) * (-axis - 1))
    below, above = x.index_select(axis, low.long()), x.index_select(axis, high.long())
    return below + (above - below) * weight


def _resize(x: Tensor, sizes: Sequence[int], mode: str) -> Tensor:
    """Return ``x`` with its last dimensions resized to ``sizes`` by linear interpolation."""
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        x = sample_linearly(x, axis, _full_grid(mode, x.shape[axis], size))
    return x


def _resize_nearest(x: Tensor, sizes: Sequence[int], mode: str, *, rounded: bool) -> Tensor:
    """Return ``x`` with its last dimensions resized: ``x[floor(position)]`` along each.

    If ``rounded``, ``x[floor(position + 0.5)]``.
    """
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        positions = _full_grid(mode, x.shape[axis], size) + (0.5 if rounded else 0.0)
        x = x.index_select(axis, positions.floor().long().clamp(max=x.shape[axis] - 1))
    return x


def _scale_sizes(x: Tensor, height: float, width: float) -> tuple[int, int]:
    return int(x.shape[-2] * height), int(x.shape[-1] * width)


@kernel("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """``x`` [*, H, W] scaled: ``y[i] = x[floor(i * size / new_size)]`` along each axis."""
    sizes = _scale_sizes(x, scale_factor_height, scale_factor_width)
    return _resize_nearest(x, sizes, "DEFAULT", rounded=False)


@kernel("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    """The last two dimensions resized."""
    sizes = (target_size_height, target_size_width)
    return _resize_nearest(x, sizes, "DEFAULT", rounded=False)


@kernel("upsample_bilinear", widen=True)
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """``x`` [*, H, W] scaled by bilinear interpolation; the new sizes are rounded down.

    Without ``align_corners``, pixels are at their corners or their centres.
    """
    centred = not align_corners if half_pixel_centers is None else half_pixel_centers
    if align_corners and centred:
        raise ValueError("align_corners and half_pixel_centers exclude each other")
    unaligned = "UNALIGN_CORNERS" if centred else "DEFAULT"
    sizes = _scale_sizes(x, scale_factor_height, scale_factor_width)
    return _resize(x, sizes, "STRICT_ALIGN_CORNERS" if align_corners else unaligned)


@kernel("resize_bilinear", widen=True)
def resize_bilinear(
    x: Tensor,
    target_size_height: int = 1,
    target_size_width: int = 1,
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """The last two dimensions resized."""
    return _resize(x, (target_size_height, target_size_width), sampling_mode)


@kernel("resize", since=Opset.iOS17, widen=True)
def resize(
    x: Tensor,
    shape: Ints,
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """``x`` with its last ``resized_dims`` axes resized to the end of ``shape``; 0 keeps a size."""
    if interpolation_mode not in ("LINEAR", "NEAREST_NEIGHBOR"):
        raise ValueError(
            f"interpolation mode is {interpolation_mode!r}, not LINEAR or NEAREST_NEIGHBOR"
        )
    if resized_dims == 0:
        return x
    old_sizes = x.shape[-resized_dims:]
    sizes = [size or old for size, old in zip(shape[-resized_dims:], old_sizes, strict=True)]
    if interpolation_mode == "NEAREST_NEIGHBOR":
        # Rounded, not floored as by resize_nearest_neighbor. Source: coremltools' test of this op.
        return _resize_nearest(x, sizes, sampling_mode, rounded=True)
    if x.is_floating_point():
        return _resize(x, sizes, sampling_mode)
    return _resize(x.double(), sizes, sampling_mode).to(x.dtype)
