"""Sampling of images at computed positions: crops, grids, affine maps.

Source: coremltools' MIL op reference, ``image_resizing``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino.graph import (
    dim_of,
    dims,
    f32,
    ints,
    magnitude,
    rank,
    reshape,
    scalar,
    shape_of,
    static_dims,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal
from coreml_delegate.targets import Opset

# --- crops ----------------------------------------------------------------------------------------

# Order of first row, first column, last row, last column among a box's four numbers.
_ORDERS = {"HEIGHT_FIRST": (0, 1, 2, 3), "WIDTH_FIRST": (1, 0, 3, 2)}
_LAYOUTS = ("CORNERS", "CENTER_SIZE")


@translation("crop_resize")
def crop_resize_ios15(
    x: Tensor,
    roi: Tensor,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
) -> Result:
    """Boxes of ``x``: [B, C, H, W], resized; positions outside take the border's value.

    ``roi``: [N, 1, 4, 1, 1] for boxes of all images, or [N, 1, 5, 1, 1] with an image index first.
    """
    images, boxes = _split_regions(x, roi)
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(x, images, corners, (target_height, target_width), sampling_mode, None)


@translation("crop_resize", since=Opset.iOS16)
def crop_resize_ios16(
    x: Tensor,
    roi: Tensor,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Result:
    """As for iOS 15, but positions outside take ``pad_value``."""
    images, boxes = _split_regions(x, roi)
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(x, images, corners, (target_height, target_width), sampling_mode, pad_value)


@translation("crop_resize", since=Opset.iOS17)
def crop_resize_ios17(
    x: Tensor,
    boxes: Tensor,
    box_indices: Tensor | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Result:
    """Boxes [N, 4] of images ``box_indices`` [N] of ``x``: [B, C, H, W], resized."""
    if box_indices is None:
        images = ops.range(ints(0), dim_of(boxes, 0), ints(1), "i32")
    else:
        images = ops.convert(box_indices, "i32")
    boxes = f32(boxes)
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(x, images, corners, (target_height, target_width), sampling_mode, pad_value)


def _split_regions(x: Tensor, roi: Tensor) -> tuple[Any, Any]:
    """Return image indices, [N, 1] or [1, B] for all images, and boxes [N, 1, 4]."""
    (numbers,) = static_dims(roi, (2,))
    rows = reshape(f32(roi), (-1, 1, numbers))
    if numbers == 4:
        images = ops.range(ints(0), dim_of(x, 0), ints(1), "i32")
        return reshape(images, (1, -1)), rows
    indices, boxes = ops.variadic_split(rows, ints(2), ints((1, 4))).outputs()
    return ops.squeeze(ops.convert(indices, "i32"), ints((2,))), boxes


def _corners(boxes: Any, mode: str) -> Any:
    """Return boxes [..., 4] of any mode as first row, first column, last row, last column."""
    modes = {f"{layout}_{order}": (layout, order) for layout in _LAYOUTS for order in _ORDERS}
    if mode not in modes:
        raise refusal("box coordinate mode", mode, ", ".join(modes))
    layout, order = modes[mode]
    boxes = ops.gather(boxes, ints(_ORDERS[order]), ints(-1))
    if layout == "CORNERS":
        return boxes
    centre, size = ops.split(boxes, ints(-1), 2).outputs()
    half = ops.multiply(size, scalar(0.5, size))
    return ops.concat([ops.subtract(centre, half), ops.add(centre, half)], -1)


def _positions(x: Tensor, boxes: Any, mode: str, normalized: bool, spatial_scale: float) -> Any:
    """Return the corners of boxes as positions in ``x``; 0 is the centre of the first pixel."""
    corners = _corners(boxes, mode)
    scale = ops.constant(np.full(4, spatial_scale, np.float32))
    if normalized:
        sizes = f32(ops.gather(shape_of(x), ints((-2, -1, -2, -1)), ints(0)))
        scale = ops.multiply(ops.subtract(sizes, scalar(1, sizes)), scale)
    return ops.multiply(corners, scale)


def _crops(
    x: Tensor,
    images: Any,
    corners: Any,
    target: tuple[int, int],
    sampling_mode: str,
    pad_value: float | None,
) -> Any:
    """Return crops [*lead, C, *target] of ``x`` [B, C, H, W].

    ``images`` [*lead] and ``corners`` [*lead, 4] broadcast. Each sample reads four pixels with all
    their channels, so the cost does not grow with the image.
    """
    lead = rank(corners) - 1
    first_row, first_column, last_row, last_column = ops.split(corners, ints(-1), 4).outputs()
    rows = ops.unsqueeze(_grid(sampling_mode, first_row, last_row, target[0]), ints(-1))
    columns = ops.unsqueeze(_grid(sampling_mode, first_column, last_column, target[1]), ints(-2))
    height, width = dim_of(x, 2), dim_of(x, 3)
    (top_row, bottom_row, down), (left_column, right_column, across) = (
        _neighbours(rows, height),
        _neighbours(columns, width),
    )
    pixels = ops.transpose(f32(x), ints((0, 2, 3, 1)))
    pixels = ops.reshape(
        pixels, ops.concat([ints((-1,)), reshape(dim_of(x, 1), (1,))], 0), special_zero=False
    )
    start = ops.multiply(ops.unsqueeze(images, ints((-1, -2))), height)

    def read(row: Any, column: Any) -> Any:
        index = ops.add(ops.multiply(ops.add(start, row), width), column)
        return ops.gather(pixels, index, ints(0))

    crop = _interpolate(
        _interpolate(read(top_row, left_column), read(bottom_row, left_column), down),
        _interpolate(read(top_row, right_column), read(bottom_row, right_column), down),
        across,
    )
    axes = range(lead)
    crop = ops.transpose(crop, ints([*axes, lead + 2, lead, lead + 1]))
    if pad_value is None:
        return crop
    inside = ops.logical_and(_inside(rows, height), _inside(columns, width))
    return ops.select(ops.unsqueeze(inside, ints(-3)), crop, scalar(pad_value, crop))


def _grid(mode: str, start: Any, end: Any, count: int) -> Any:
    """Return the positions [..., count] that sample [start, end]; both bounds are [..., 1]."""
    limits.require_constant(count, f"a grid of {count} positions")
    steps = np.arange(count, dtype=np.float64)
    length = ops.subtract(end, start)
    if mode == "ALIGN_CORNERS" and count == 1:
        return ops.add(start, ops.multiply(length, scalar(0.5, length)))
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        share = steps / max(1, count - 1)
        # Not start + share * length, which may miss the end by a rounding error.
        return ops.add(ops.multiply(start, _row(1 - share)), ops.multiply(end, _row(share)))
    one = scalar(1, length)
    sign = ops.select(ops.less(length, scalar(0, length)), ops.negative(one), one)
    extent = ops.add(length, sign)
    if mode == "DEFAULT":
        return ops.add(start, ops.multiply(extent, _row(steps / count)))
    if mode == "UNALIGN_CORNERS":
        centres = ops.multiply(extent, _row((steps + 0.5) / count))
        return ops.subtract(ops.add(start, centres), scalar(0.5, start))
    if mode == "OFFSET_CORNERS":
        return ops.add(start, ops.multiply(ops.maximum(length, one), _row((steps + 0.5) / count)))
    modes = "STRICT_ALIGN_CORNERS, ALIGN_CORNERS, DEFAULT, UNALIGN_CORNERS, OFFSET_CORNERS"
    raise refusal("unknown sampling mode", mode, modes)


def _row(numbers: NDArray[np.float64]) -> Any:
    return ops.constant(numbers.astype(np.float32))


def _neighbours(positions: Any, size: Any) -> tuple[Any, Any, Any]:
    """Return indices of the pixels before and after each position, and the fraction in between."""
    last = ops.subtract(size, ints(1))
    bounded = ops.minimum(ops.maximum(positions, scalar(0, positions)), f32(last))
    floor = ops.floor(bounded)
    low = ops.convert(floor, "i32")
    return low, ops.minimum(ops.add(low, ints(1)), last), ops.subtract(bounded, floor)


def _interpolate(below: Any, above: Any, share: Any) -> Any:
    """Return ``below + (above - below) * share`` for pixels [..., C] and shares [...]."""
    return ops.add(below, ops.multiply(ops.subtract(above, below), ops.unsqueeze(share, ints(-1))))


def _inside(positions: Any, size: Any) -> Any:
    last = f32(ops.subtract(size, ints(1)))
    return ops.logical_and(
        ops.greater_equal(positions, scalar(0, positions)), ops.less_equal(positions, last)
    )


# --- resampling -----------------------------------------------------------------------------------

# MIL padding mode -> OpenVINO's padding mode, and whether positions must be relative to the centres
# of the outer pixels (True), to their edges (False), or to either (None)
_PADDING: dict[str, tuple[str, bool | None]] = {
    "constant": ("zeros", None),
    "border": ("border", None),
    "reflection": ("reflection", True),
    "symmetric": ("reflection", False),
}
_COORDINATES = ("unnormalized", "normalized_minus_one_to_one", "normalized_zero_to_one")
_SAMPLING = ("nearest", "bilinear")


@translation("resample")
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Result:
    """``x``: [B, C, H1, W1], sampled at ``coordinates``: [B, H2, W2, 2] of (column, row)."""
    for what, got, modes in (
        ("sampling mode", sampling_mode, _SAMPLING),
        ("padding mode", padding_mode, tuple(_PADDING)),
        ("coordinates mode", coordinates_mode, _COORDINATES),
    ):
        if got not in modes:
            raise refusal(what, got, ", ".join(modes))
    padding, from_centres = _PADDING[padding_mode]
    centred = align_corners if from_centres is None else from_centres
    grid = _grid_positions(x, f32(coordinates), coordinates_mode, align_corners, centred)
    if sampling_mode == "nearest" and padding == "reflection":
        # OpenVINO rounds before it reflects, and so takes the wrong one of two equally near pixels.
        grid, padding = _reflect(grid), "border"
    shift = scalar(padding_value if padding_mode == "constant" else 0, x)
    shifted = ops.subtract(x, shift) if padding_value else x
    options = {"align_corners": centred, "mode": sampling_mode, "padding_mode": padding}
    sampled = ops.grid_sample(shifted, grid, options)
    return ops.add(sampled, shift) if padding_value else sampled


def _grid_positions(
    x: Tensor, coordinates: Any, mode: str, align_corners: bool, centred: bool
) -> Any:
    """Return coordinates with -1 and 1 at centres (``centred``) or edges of the outer pixels."""
    one = scalar(1, coordinates)
    if mode == "normalized_zero_to_one":
        coordinates = ops.subtract(ops.add(coordinates, coordinates), one)
    if mode != "unnormalized" and align_corners is centred:
        return coordinates
    sizes = f32(ops.gather(shape_of(x), ints((3, 2)), ints(0)))
    steps = ops.maximum(ops.subtract(sizes, one), one)
    if mode == "unnormalized":
        doubled = ops.add(coordinates, coordinates)
        if centred:
            return ops.subtract(ops.divide(doubled, steps), one)
        return ops.subtract(ops.divide(ops.add(doubled, one), sizes), one)
    # Both conventions agree on the middle of the image.
    ratio = ops.divide(sizes, steps) if centred else ops.divide(ops.subtract(sizes, one), sizes)
    return ops.multiply(coordinates, ratio)


def _reflect(grid: Any) -> Any:
    """Return coordinates reflected at -1 and 1 until they lie in between."""
    one, half = scalar(1, grid), scalar(0.5, grid)
    distance = magnitude(ops.multiply(ops.add(grid, one), half))
    turns = ops.floor(distance)
    fraction = ops.subtract(distance, turns)
    odd = ops.not_equal(ops.floor_mod(turns, scalar(2, turns)), scalar(0, turns))
    share = ops.select(odd, ops.subtract(one, fraction), fraction)
    return ops.subtract(ops.add(share, share), one)


@translation("affine")
def affine(
    x: Tensor,
    transform_matrix: Tensor,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Result:
    """``x``: [B, C, H, W], sampled at an affine map of the output's coordinates.

    ``transform_matrix``: [B or 1, 6], rows of (a0, a1, a2, b0, b1, b2).
    """
    base = _base_grid((output_height, output_width), align_corners)
    maps = reshape(transform_matrix, (-1, 2, 3))
    grid = reshape(
        ops.matmul(ops.constant(base), maps, False, True), (-1, output_height, output_width, 2)
    )
    if dims(transform_matrix)[0] != dims(x)[0]:
        batch = reshape(dim_of(x, 0), (1,))
        shape = ops.concat([batch, ints((output_height, output_width, 2))], 0)
        grid = ops.broadcast(grid, shape)
    return resample(
        x, grid, sampling_mode, padding_mode, padding_value, coordinates_mode, align_corners
    )


def _base_grid(sizes: Sequence[int], align_corners: bool) -> NDArray[np.float32]:
    """Return homogeneous coordinates [1, H * W, 3] of the output pixels, between -1 and 1."""
    limits.require_constant(3 * math.prod(sizes), f"a grid of {list(sizes)} positions")
    rows, columns = (
        np.linspace(-1, 1, size) if align_corners and size > 1 else _centres(size, align_corners)
        for size in sizes
    )
    y, x = np.meshgrid(rows, columns, indexing="ij")
    return np.stack([x, y, np.ones_like(x)], -1).reshape(1, -1, 3).astype(np.float32)


def _centres(size: int, align_corners: bool) -> NDArray[np.float64]:
    """Return the centres of ``size`` pixels that fill [-1, 1]; 0 for a single aligned pixel."""
    return np.zeros(1) if align_corners else (2 * np.arange(size) + 1) / size - 1
