"""Resampling of the spatial axes on a regular grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    dims,
    f32,
    ints,
    is_float,
    known_ints,
    rank,
    static_dims,
)
from coreml_delegate.runtime.engines.openvino.registry import (
    Result,
    Tensor,
    refuse,
    translation,
)

# MIL sampling mode -> OpenVINO's coordinate transformation
_COORDINATES = {
    "DEFAULT": "asymmetric",
    "STRICT_ALIGN_CORNERS": "align_corners",
    "UNALIGN_CORNERS": "half_pixel",
}


# The same for the nearest neighbour, with the rounding of its coordinate
_NEAREST = {
    "DEFAULT": ("asymmetric", "floor"),
    "UNALIGN_CORNERS": ("half_pixel", "round_prefer_ceil"),
}


def _interpolate(
    x: Tensor, sizes: Sequence[int], mode: str, coordinates: str, nearest_mode: str = "floor"
) -> Any:
    """Interpolate the last ``len(sizes)`` axes to fixed sizes."""
    total = rank(x)
    axes = list(range(total - len(sizes), total))
    return ops.interpolate(
        x,
        ints(list(sizes)),
        mode,
        "sizes",
        coordinate_transformation_mode=coordinates,
        nearest_mode=nearest_mode,
        axes=ints(axes),
    )


def _scaled(x: Tensor, height: float, width: float) -> tuple[int, int]:
    rows, columns = static_dims(x, (-2, -1))
    return math.floor(rows * height), math.floor(columns * width)


@translation("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Result:
    """``x`` [*, H, W] scaled by factors; each element takes the nearest at or below it."""
    sizes = _scaled(x, scale_factor_height, scale_factor_width)
    return _interpolate(x, sizes, "nearest", "asymmetric")


@translation("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Result:
    """``x`` [*, H, W] at given sizes; each element takes the nearest at or below it."""
    return _interpolate(x, (target_size_height, target_size_width), "nearest", "asymmetric")


@translation("upsample_bilinear")
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Result:
    """``x`` [*, H, W] scaled by factors, bilinearly."""
    centred = not align_corners if half_pixel_centers is None else half_pixel_centers
    if align_corners and centred:
        raise refuse("upsample_bilinear", "align_corners with half_pixel_centers", "one of them")
    mode = "STRICT_ALIGN_CORNERS" if align_corners else "UNALIGN_CORNERS" if centred else "DEFAULT"
    return _linear(x, _scaled(x, scale_factor_height, scale_factor_width), mode)


@translation("resize_bilinear")
def resize_bilinear(
    x: Tensor,
    target_size_height: int = 1,
    target_size_width: int = 1,
    sampling_mode: str = "DEFAULT",
) -> Result:
    """``x`` [*, H, W] at given sizes, bilinearly."""
    return _linear(x, (target_size_height, target_size_width), sampling_mode)


@translation("resize")
def resize(
    x: Tensor,
    shape: Tensor,
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Result:
    """``x`` with its last ``resized_dims`` axes at the sizes that end ``shape``; 0 keeps one."""
    wanted = known_ints(shape)
    if wanted is None or not is_float(x):
        raise refuse("resize", "a run-time shape or integers", "a constant shape and floats")
    have = dims(x)[rank(x) - resized_dims :]
    sizes = [size or old for size, old in zip(wanted[-resized_dims:], have, strict=True)]
    if None in sizes:
        raise refuse("resize that keeps an unknown dimension", have)
    fixed = [size for size in sizes if size is not None]
    if interpolation_mode == "LINEAR":
        return _linear(x, fixed, sampling_mode)
    if interpolation_mode != "NEAREST_NEIGHBOR" or sampling_mode not in _NEAREST:
        raise refuse("resize mode", f"{interpolation_mode} {sampling_mode}")
    return _interpolate(x, fixed, "nearest", *_NEAREST[sampling_mode])


def _linear(x: Tensor, sizes: Sequence[int], mode: str) -> Any:
    if mode in _COORDINATES and len(sizes) == 2:
        return _interpolate(x, sizes, "linear_onnx", _COORDINATES[mode])
    # Grids that OpenVINO does not have: one product with an interpolation matrix per axis.
    total = rank(x)
    result = f32(x)
    for place, size in enumerate(sizes):
        axis = total - len(sizes) + place
        (length,) = static_dims(x, (axis,))
        matrix = ops.constant(_matrix(_grid(mode, length, size), length))
        swap = list(range(total))
        swap[axis], swap[-1] = swap[-1], swap[axis]
        moved = ops.matmul(ops.transpose(result, ints(swap)), matrix, False, True)
        result = ops.transpose(moved, ints(swap))
    return result


def _grid(mode: str, length: int, size: int) -> NDArray[np.float64]:
    """Where each of ``size`` outputs falls among ``length`` inputs."""
    places = np.arange(size, dtype=np.float64)
    step = length / size
    corners = (length - 1) / max(size - 1, 1)
    delta = max(1, length - 1) / size
    grids = {
        "DEFAULT": places * step,
        "STRICT_ALIGN_CORNERS": places * corners,
        "ALIGN_CORNERS": places * corners if size > 1 else np.full(1, (length - 1) / 2),
        "UNALIGN_CORNERS": places * step + 0.5 * step - 0.5,
        "OFFSET_CORNERS": 0.5 * delta + places * delta,
    }
    if mode not in grids:
        raise refuse("unknown sampling mode", mode, ", ".join(grids))
    return grids[mode].clip(0, length - 1)


def _matrix(grid: NDArray[np.float64], length: int) -> NDArray[np.float32]:
    """[outputs, inputs] weights of linear interpolation at ``grid``."""
    low = np.floor(grid).astype(int)
    high = np.minimum(low + 1, length - 1)
    weight = grid - low
    matrix = np.zeros((grid.size, length), dtype=np.float32)
    rows = np.arange(grid.size)
    np.add.at(matrix, (rows, low), 1 - weight)
    np.add.at(matrix, (rows, high), weight)
    return matrix
