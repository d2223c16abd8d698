"""Interpolation of the spatial axes to given sizes or by factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_ints,
    dim_of,
    dims,
    element_type,
    f32,
    ints,
    is_float,
    magnitude,
    rank,
    require_room,
    reshape,
    scalar,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal

# MIL sampling mode -> OpenVINO's coordinate transformation
_COORDINATES = {
    "DEFAULT": "asymmetric",
    "STRICT_ALIGN_CORNERS": "align_corners",
    "UNALIGN_CORNERS": "half_pixel",
}

# For the nearest neighbour, only in these modes does OpenVINO agree with MIL
_NEAREST = {"DEFAULT": "asymmetric", "UNALIGN_CORNERS": "half_pixel"}


def _interpolate(
    x: Tensor, sizes: Sequence[Any], mode: str, coordinates: str, nearest_mode: str = "floor"
) -> Any:
    """Interpolate the last ``len(sizes)`` axes to ``sizes``, i32 scalars of the graph."""
    total = rank(x)
    axes = list(range(total - len(sizes), total))
    return ops.interpolate(
        x,
        ops.concat([reshape(size, (1,)) for size in sizes], 0),
        mode,
        "sizes",
        coordinate_transformation_mode=coordinates,
        nearest_mode=nearest_mode,
        axes=ints(axes),
    )


def _scale_sizes(x: Tensor, height: float, width: float) -> list[Any]:
    """Return the last two sizes of ``x`` times factors, rounded down."""
    return [_scale_size(x, -2, height), _scale_size(x, -1, width)]


def _scale_size(x: Tensor, axis: int, factor: float) -> Any:
    size = dims(x)[axis]
    if size is not None:
        return ints(math.floor(size * factor))
    return ops.convert(
        ops.floor(ops.multiply(f32(dim_of(x, axis)), ops.constant(np.float32(factor)))), "i32"
    )


@translation("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Result:
    """``x`` [*, H, W] scaled: ``y[i] = x[floor(i * size / new_size)]`` along each axis."""
    sizes = _scale_sizes(x, scale_factor_height, scale_factor_width)
    return _interpolate(x, sizes, "nearest", "asymmetric")


@translation("resize_nearest_neighbor")
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Result:
    """``x`` [*, H, W] resized: ``y[i] = x[floor(i * size / new_size)]`` along each axis."""
    sizes = [ints(target_size_height), ints(target_size_width)]
    return _interpolate(x, sizes, "nearest", "asymmetric")


@translation("upsample_bilinear")
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Result:
    """``x`` [*, H, W] scaled by bilinear interpolation."""
    centred = not align_corners if half_pixel_centers is None else half_pixel_centers
    if align_corners and centred:
        raise refusal("upsample_bilinear", "align_corners with half_pixel_centers", "one of them")
    mode = "STRICT_ALIGN_CORNERS" if align_corners else "UNALIGN_CORNERS" if centred else "DEFAULT"
    return _linear(x, _scale_sizes(x, scale_factor_height, scale_factor_width), mode)


@translation("resize_bilinear")
def resize_bilinear(
    x: Tensor,
    target_size_height: int = 1,
    target_size_width: int = 1,
    sampling_mode: str = "DEFAULT",
) -> Result:
    """``x`` [*, H, W] resized by bilinear interpolation."""
    return _linear(x, [ints(target_size_height), ints(target_size_width)], sampling_mode)


@translation("resize")
def resize(
    x: Tensor,
    shape: Tensor,
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Result:
    """``x`` with its last ``resized_dims`` axes resized to the end of ``shape``; 0 keeps a size."""
    if interpolation_mode not in ("LINEAR", "NEAREST_NEIGHBOR"):
        raise refusal("interpolation mode", interpolation_mode, "LINEAR or NEAREST_NEIGHBOR")
    if resized_dims == 0:
        return x
    sizes = [_target_size(x, shape, dimension) for dimension in range(-resized_dims, 0)]
    batch_sizes = [dim_of(x, axis) for axis in range(rank(x) - resized_dims)]
    result = ops.concat([reshape(size, (1,)) for size in (*batch_sizes, *sizes)], 0)
    sizes = [require_room(size, result, x) for size in sizes]
    if interpolation_mode == "LINEAR":
        if not is_float(x):
            # The result is truncated, so a rounding error in f32 can change it by one.
            raise refusal("linear interpolation of integers", element_type(x), "fp16 or fp32")
        return _linear(x, sizes, sampling_mode)
    if sampling_mode in _NEAREST and is_float(x):
        # Rounded, not floored as by resize_nearest_neighbor. Source: coremltools' test of this op.
        return _interpolate(x, sizes, "nearest", _NEAREST[sampling_mode], "round_prefer_ceil")
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        positions = _grid(sampling_mode, dim_of(x, axis), size)
        indices = ops.convert(ops.floor(ops.add(positions, scalar(0.5, positions))), "i32")
        x = ops.gather(x, indices, ints(axis))
    return x


def _target_size(x: Tensor, shape: Tensor, dimension: int) -> Any:
    """Return ``shape[dimension]``, or that size of ``x`` if it is 0; ``dimension`` is negative."""
    sizes = constant_ints(shape)
    if sizes is not None:
        return ints(sizes[dimension]) if sizes[dimension] else dim_of(x, dimension)
    size = ops.gather(ops.convert(shape, "i32"), ints(dimension), ints(0))
    return ops.select(ops.equal(size, ints(0)), dim_of(x, dimension), size)


def _linear(x: Tensor, sizes: Sequence[Any], mode: str) -> Any:
    if mode in _COORDINATES and len(sizes) == 2:
        return _interpolate(x, sizes, "linear_onnx", _COORDINATES[mode])
    # Modes that OpenVINO lacks: one product with an interpolation matrix per axis.
    total = rank(x)
    result = f32(x)
    for index, size in enumerate(sizes):
        axis = total - len(sizes) + index
        matrix = _matrix(_grid(mode, dim_of(x, axis), size), dim_of(x, axis))
        swap = list(range(total))
        swap[axis], swap[-1] = swap[-1], swap[axis]
        moved = ops.matmul(ops.transpose(result, ints(swap)), matrix, False, True)
        result = ops.transpose(moved, ints(swap))
    return result


def _grid(mode: str, length: Any, size: Any) -> Any:
    """Return the positions of ``size`` outputs among ``length`` inputs; both are i32 scalars."""
    indices = f32(ops.range(ints(0), size, ints(1), "i32"))
    one = scalar(1, indices)
    half = scalar(0.5, indices)
    last = f32(ops.subtract(length, ints(1)))
    count = f32(size)

    def spread(positions: Any, extent: Any, parts: Any) -> Any:
        # Multiply first, so that integer positions stay exact.
        return ops.divide(ops.multiply(positions, extent), parts)

    centres = ops.add(indices, half)
    corners = spread(indices, last, ops.maximum(ops.subtract(count, one), one))
    grids: dict[str, Callable[[], Any]] = {
        "DEFAULT": lambda: spread(indices, f32(length), count),
        "STRICT_ALIGN_CORNERS": lambda: corners,
        "ALIGN_CORNERS": lambda: ops.select(
            ops.greater(size, ints(1)), corners, ops.multiply(last, half)
        ),
        "UNALIGN_CORNERS": lambda: ops.subtract(spread(centres, f32(length), count), half),
        "OFFSET_CORNERS": lambda: spread(centres, ops.maximum(last, one), count),
    }
    if mode not in grids:
        raise refusal("unknown sampling mode", mode, ", ".join(grids))
    return ops.minimum(ops.maximum(grids[mode](), scalar(0, indices)), last)


def _matrix(grid: Any, length: Any) -> Any:
    """Return interpolation weights [outputs, inputs], ``max(1 - abs(grid - input), 0)``."""
    inputs = f32(ops.range(ints(0), length, ints(1), "i32"))
    distance = magnitude(ops.subtract(ops.unsqueeze(grid, ints(1)), ops.unsqueeze(inputs, ints(0))))
    return ops.relu(ops.subtract(scalar(1, distance), distance))
