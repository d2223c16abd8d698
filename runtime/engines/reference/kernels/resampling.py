"""Sampling of images at computed positions: crops, grids, affine maps.

Source: coremltools' MIL op reference, ``image_resizing``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.runtime.engines.reference.kernels.resizing import (
    sample_linearly,
    sampling_grid,
)
from coreml_delegate.targets import Opset


def _corners(boxes: Tensor, mode: str) -> Tensor:
    """Return boxes [M, 4] of any mode as first row, first column, last row, last column."""
    layout, _, order = mode.rpartition("_")[0].rpartition("_")
    if layout not in ("CORNERS", "CENTER_SIZE") or order not in ("HEIGHT", "WIDTH"):
        raise ValueError(
            f"box coordinate mode is {mode!r}, not CORNERS or CENTER_SIZE with _HEIGHT_FIRST or "
            "_WIDTH_FIRST"
        )
    if order == "WIDTH":
        boxes = boxes[:, [1, 0, 3, 2]]
    if layout == "CORNERS":
        return boxes
    centre, half = boxes[:, :2], boxes[:, 2:] / 2
    return torch.cat([centre - half, centre + half], dim=1)


def _crop(image: Tensor, rows: Tensor, columns: Tensor, pad_value: float | None) -> Tensor:
    """Return a crop of ``image`` [..., H, W], with ``pad_value`` (or the border) outside of it."""
    h, w = image.shape[-2:]
    crop = sample_linearly(image, -2, rows.clamp(0, h - 1))
    crop = sample_linearly(crop, -1, columns.clamp(0, w - 1))
    if pad_value is None:
        return crop
    inside = ((rows >= 0) & (rows <= h - 1))[:, None] & (columns >= 0) & (columns <= w - 1)
    return torch.where(inside, crop, crop.new_tensor(pad_value))


def _positions(
    x: Tensor, boxes: Tensor, mode: str, normalized: bool, spatial_scale: float
) -> Tensor:
    """Return boxes [M, 4] of any mode as corners in ``x``, fp64, see ``_corners``."""
    corners = _corners(boxes.double(), mode)
    if normalized:
        corners = corners * corners.new_tensor([size - 1 for size in x.shape[-2:]]).repeat(2)
    return corners * spatial_scale


def _crops(
    images: Sequence[Tensor],
    corners: Tensor,
    target: tuple[int, int],
    sampling_mode: str,
    pad_value: float | None,
) -> Tensor:
    rows = sampling_grid(sampling_mode, corners[:, 0], corners[:, 2], target[0])
    columns = sampling_grid(sampling_mode, corners[:, 1], corners[:, 3], target[1])
    return torch.stack(
        [_crop(*arguments, pad_value) for arguments in zip(images, rows, columns, strict=True)]
    )


def _split_regions(x: Tensor, roi: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the images of each box, and boxes [N, 4]."""
    rows = roi.reshape(roi.shape[0], -1)
    indexed = rows.shape[1] == 5
    return [x[int(row[0])].unsqueeze(0) if indexed else x for row in rows], rows[:, -4:]


@kernel("crop_resize", widen=True)
def crop_resize_ios15(
    x: Tensor,
    roi: Tensor,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """Boxes of ``x``: [B, C, H, W], resized; positions outside take the border's value.

    ``roi``: [N, 1, 4, 1, 1] for boxes of all images, or [N, 1, 5, 1, 1] with an image index first.
    """
    images, boxes = _split_regions(x, roi)
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(images, corners, (target_height, target_width), sampling_mode, None)


@kernel("crop_resize", since=Opset.iOS16, widen=True)
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
) -> Tensor:
    """As for iOS 15, but positions outside take ``pad_value``."""
    images, boxes = _split_regions(x, roi)
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(images, corners, (target_height, target_width), sampling_mode, pad_value)


@kernel("crop_resize", since=Opset.iOS17, widen=True)
def crop_resize_ios17(
    x: Tensor,
    boxes: Tensor,
    box_indices: Ints | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Tensor:
    """Boxes [N, 4] of images ``box_indices`` [N] of ``x``: [B, C, H, W], resized."""
    images = [x[i] for i in (range(boxes.shape[0]) if box_indices is None else box_indices)]
    corners = _positions(x, boxes, box_coordinate_mode, normalized_coordinates, spatial_scale)
    return _crops(images, corners, (target_height, target_width), sampling_mode, pad_value)


_PADDING_MODES = {
    "constant": "zeros",
    "border": "border",
    "reflection": "reflection",
    "symmetric": "reflection",
}


def _pixels(coordinates: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    """Return coordinates of ``mode`` as positions, where 0 is the centre of the first pixel."""
    if mode == "unnormalized":
        return coordinates
    if mode == "normalized_minus_one_to_one":
        coordinates = (coordinates + 1) / 2
    elif mode != "normalized_zero_to_one":
        raise ValueError(
            f"coordinates mode is {mode!r}, not unnormalized, normalized_minus_one_to_one or "
            "normalized_zero_to_one"
        )
    return coordinates * (size - 1) if align_corners else coordinates * size - 0.5


@kernel("resample", widen=True)
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """``x``: [B, C, H1, W1], sampled at ``coordinates``: [B, H2, W2, 2] of (column, row)."""
    if padding_mode not in _PADDING_MODES:
        raise ValueError(
            f"padding mode is {padding_mode!r}, not one of {', '.join(_PADDING_MODES)}"
        )
    # torch reflects about the outer pixels' centres if corners are aligned, else about their edges.
    centred = padding_mode == "reflection"
    normalized = [
        _normalize(_pixels(axis, size, coordinates_mode, align_corners), size, centred)
        for axis, size in zip(
            coordinates.double().unbind(-1), (x.shape[3], x.shape[2]), strict=True
        )
    ]
    shift = padding_value if padding_mode == "constant" else 0.0
    sampled = F.grid_sample(
        x.double() - shift,
        torch.stack(normalized, dim=-1),
        mode=sampling_mode,
        padding_mode=_PADDING_MODES[padding_mode],
        align_corners=centred,
    )
    return (sampled + shift).to(x.dtype)


def _normalize(pixels: Tensor, size: int, centred: bool) -> Tensor:
    if centred:
        return pixels * 2 / (size - 1) - 1 if size > 1 else torch.zeros_like(pixels)
    return (pixels * 2 + 1) / size - 1


@kernel("affine", widen=True)
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
) -> Tensor:
    """``x``: [B, C, H, W], sampled at an affine map of the output's coordinates.

    ``transform_matrix``: [B or 1, 6], rows of (a0, a1, a2, b0, b1, b2).
    """
    theta = transform_matrix.reshape(-1, 2, 3).expand(x.shape[0], -1, -1)
    size = [x.shape[0], x.shape[1], output_height, output_width]
    grid = F.affine_grid(theta.double(), size, align_corners=align_corners)
    return resample(
        x, grid, sampling_mode, padding_mode, padding_value, coordinates_mode, align_corners
    )
