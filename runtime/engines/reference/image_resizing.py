"""Resizing, cropping and resampling of images.

Resizing is separable: each dimension has a grid of source positions, and the result is linear
interpolation at those (or the nearest element).

Source: coremltools' MIL op reference, ``image_resizing``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.registry import Ints, kernel
from coreml_delegate.runtime.mil.opset import Opset


def _grid(mode: str, start: Tensor, end: Tensor, count: int) -> Tensor:
    """Positions at which [start, end] is sampled ``count`` times.

    Args:
        mode: MIL's ``sampling_mode``.
        start: [*], fp64: position of the first element.
        end: [*], fp64: position of the last.
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


def _whole(mode: str, size: int, count: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return _grid(mode, zero, zero + (size - 1), count).clamp(0, size - 1)


def _linear(x: Tensor, axis: int, positions: Tensor) -> Tensor:
    low = positions.floor().clamp(0, x.shape[axis] - 1)
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    weight = (positions - low).to(x.dtype).reshape(-1, *(1,) * (-axis - 1))
    below, above = x.index_select(axis, low.long()), x.index_select(axis, high.long())
    return below + (above - below) * weight


def _resize(x: Tensor, sizes: Sequence[int], mode: str) -> Tensor:
    """``x`` with its last dimensions resized to ``sizes``, interpolated linearly."""
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        x = _linear(x, axis, _whole(mode, x.shape[axis], size))
    return x


def _resize_nearest(x: Tensor, sizes: Sequence[int], mode: str, *, rounded: bool) -> Tensor:
    """``x`` with its last dimensions resized by picking elements.

    A position picks the element it falls into, or, ``rounded``, the nearest (of two, the later).
    """
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        positions = _whole(mode, x.shape[axis], size) + (0.5 if rounded else 0.0)
        x = x.index_select(axis, positions.floor().long().clamp(max=x.shape[axis] - 1))
    return x


def _scaled(x: Tensor, height: float, width: float) -> tuple[int, int]:
    return int(x.shape[-2] * height), int(x.shape[-1] * width)


@kernel("upsample_nearest_neighbor")
def upsample_nearest_neighbor(
    x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """The last two dimensions scaled; sizes are rounded down."""
    sizes = _scaled(x, scale_factor_height, scale_factor_width)
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
) -> Tensor:
    """The last two dimensions scaled; the scale is recomputed from the rounded sizes."""
    return upsample_bilinear_half_pixel(x, scale_factor_height, scale_factor_width, align_corners)


@kernel("upsample_bilinear", since=Opset.iOS16, widen=True)
def upsample_bilinear_half_pixel(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """As before; without ``align_corners``, pixels are points at their corner or their centre."""
    centred = not align_corners if half_pixel_centers is None else half_pixel_centers
    if align_corners and centred:
        raise ValueError("align_corners and half_pixel_centers exclude each other")
    unaligned = "UNALIGN_CORNERS" if centred else "DEFAULT"
    sizes = _scaled(x, scale_factor_height, scale_factor_width)
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
    """The last ``resized_dims`` dimensions resized to those of ``shape``; 0 keeps a size."""
    if interpolation_mode not in ("LINEAR", "NEAREST_NEIGHBOR"):
        raise ValueError(
            f"interpolation mode is {interpolation_mode!r}, not LINEAR or NEAREST_NEIGHBOR"
        )
    if resized_dims == 0:
        return x
    kept = x.shape[-resized_dims:]
    sizes = [size or old for size, old in zip(shape[-resized_dims:], kept, strict=True)]
    if interpolation_mode == "NEAREST_NEIGHBOR":
        # Rounded, unlike resize_nearest_neighbor of iOS15; Source: coremltools' test of this op.
        return _resize_nearest(x, sizes, sampling_mode, rounded=True)
    if x.is_floating_point():
        return _resize(x, sizes, sampling_mode)
    return _resize(x.double(), sizes, sampling_mode).to(x.dtype)


# --- crops ----------------------------------------------------------------------------------------


def _corners(boxes: Tensor, mode: str) -> Tensor:
    """Boxes [M, 4] of any convention as [M, 4]: first row, first column, last row, last column."""
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
    """One crop of ``image``: [..., H, W], with ``pad_value`` (or the border) outside of it."""
    h, w = image.shape[-2:]
    crop = _linear(image, -2, rows.clamp(0, h - 1))
    crop = _linear(crop, -1, columns.clamp(0, w - 1))
    if pad_value is None:
        return crop
    inside = ((rows >= 0) & (rows <= h - 1))[:, None] & (columns >= 0) & (columns <= w - 1)
    return torch.where(inside, crop, crop.new_tensor(pad_value))


def _crops(
    images: Sequence[Tensor],
    boxes: Tensor,
    target: tuple[int, int],
    normalized: bool,
    spatial_scale: float,
    box_mode: str,
    sampling_mode: str,
    pad_value: float | None,
) -> Tensor:
    corners = _corners(boxes.double(), box_mode)
    if normalized:
        limits = corners.new_tensor([size - 1 for size in images[0].shape[-2:]])
        corners = corners * limits.repeat(2)
    corners = corners * spatial_scale
    rows = _grid(sampling_mode, corners[:, 0], corners[:, 2], target[0])
    columns = _grid(sampling_mode, corners[:, 1], corners[:, 3], target[1])
    return torch.stack(
        [_crop(*arguments, pad_value) for arguments in zip(images, rows, columns, strict=True)]
    )


@kernel("crop_resize", widen=True)
def crop_resize(
    x: Tensor,
    roi: Tensor,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """Boxes of ``x``: [B, C, H, W] resized; positions outside take the border's value.

    ``roi``: [N, 1, 4, 1, 1] for boxes of all images, or [N, 1, 5, 1, 1] with an image index first.
    """
    return _crop_rois(
        x,
        roi,
        (target_height, target_width),
        normalized_coordinates,
        spatial_scale,
        box_coordinate_mode,
        sampling_mode,
        None,
    )


@kernel("crop_resize", since=Opset.iOS16, widen=True)
def crop_resize_padded(
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
    """As before; positions outside take ``pad_value``."""
    return _crop_rois(
        x,
        roi,
        (target_height, target_width),
        normalized_coordinates,
        spatial_scale,
        box_coordinate_mode,
        sampling_mode,
        pad_value,
    )


def _crop_rois(
    x: Tensor,
    roi: Tensor,
    target: tuple[int, int],
    normalized: bool,
    spatial_scale: float,
    box_mode: str,
    sampling_mode: str,
    pad_value: float | None,
) -> Tensor:
    rows = roi.reshape(roi.shape[0], -1)
    indexed = rows.shape[1] == 5
    images = [x[int(row[0])].unsqueeze(0) if indexed else x for row in rows]
    boxes = rows[:, -4:]
    return _crops(
        images, boxes, target, normalized, spatial_scale, box_mode, sampling_mode, pad_value
    )


@kernel("crop_resize", since=Opset.iOS17, widen=True)
def crop_resize_boxes(
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
    """``boxes``: [N, 4] of the images ``box_indices`` of ``x``: [B, C, H, W], resized."""
    return _crops(
        [x[i] for i in (range(boxes.shape[0]) if box_indices is None else box_indices)],
        boxes,
        (target_height, target_width),
        normalized_coordinates,
        spatial_scale,
        box_coordinate_mode,
        sampling_mode,
        pad_value,
    )


# --- resampling -----------------------------------------------------------------------------------

_PADDING_MODES = {
    "constant": "zeros",
    "border": "border",
    "reflection": "reflection",
    "symmetric": "reflection",
}


def _pixels(coordinates: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    """Coordinates of ``mode`` as positions: 0 is the centre of the first pixel."""
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
    """``x``: [B, C, H1, W1] at ``coordinates``: [B, H2, W2, 2] of (column, row)."""
    if padding_mode not in _PADDING_MODES:
        raise ValueError(
            f"padding mode is {padding_mode!r}, not one of {', '.join(_PADDING_MODES)}"
        )
    # torch reflects about the outer pixels' centres if corners are aligned, else about their edges.
    centred = padding_mode == "reflection"
    normalized = [
        _normalized(_pixels(axis, size, coordinates_mode, align_corners), size, centred)
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


def _normalized(pixels: Tensor, size: int, centred: bool) -> Tensor:
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
    """``x``: [B, C, H, W] at an affine map of the output's coordinates.

    ``transform_matrix``: [B or 1, 6], rows of (a0, a1, a2, b0, b1, b2).
    """
    theta = transform_matrix.reshape(-1, 2, 3).expand(x.shape[0], -1, -1)
    size = [x.shape[0], x.shape[1], output_height, output_width]
    grid = F.affine_grid(theta.double(), size, align_corners=align_corners)
    return resample(
        x, grid, sampling_mode, padding_mode, padding_value, coordinates_mode, align_corners
    )
