"""Resizing, cropping and resampling of images."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.targets import Opset
from support.op_cases.case import OpCase, normal, uniform

_I15, _I16, _I17 = Opset.iOS15, Opset.iOS16, Opset.iOS17
_IMAGE = normal(2, 3, 5, 4)


def _interpolate(mode: str = "bilinear", **options):
    return lambda x, **_: F.interpolate(x, mode=mode, **options)


def _rounded(height: int, width: int):
    """The element nearest to each of evenly spaced positions from the first on."""

    def expected(x, **_):
        for axis, size in ((-2, height), (-1, width)):
            positions = torch.arange(size) * x.shape[axis] / size
            x = x.index_select(axis, (positions + 0.5).long().clamp(max=x.shape[axis] - 1))
        return x

    return expected


# Positions at which a row of two pixels, 0 and 1, is sampled five times: the table in the
# documentation of resize_bilinear.
_FIVE_OF_TWO = {
    "STRICT_ALIGN_CORNERS": [0, 0.25, 0.5, 0.75, 1],
    "ALIGN_CORNERS": [0, 0.25, 0.5, 0.75, 1],
    "DEFAULT": [0, 0.4, 0.8, 1, 1],
    "OFFSET_CORNERS": [0.1, 0.3, 0.5, 0.7, 0.9],
    "UNALIGN_CORNERS": [0, 0.1, 0.5, 0.9, 1],
}
_ROW = np.array([[[0, 1]]], dtype=np.float32)

RESIZE = [
    *(
        OpCase(
            "upsample_bilinear",
            f"align-{align}",
            {"x": _IMAGE},
            {},
            {"scale_factor_height": 2, "scale_factor_width": 3, "align_corners": align},
            opset,
            expected=_interpolate(scale_factor=(2, 3), align_corners=align),
        )
        for align in (True, False)
        for opset in (_I15, _I16)
    ),
    OpCase(
        "upsample_bilinear",
        "fractional",
        {"x": _IMAGE},
        {},
        {
            "scale_factor_height": np.float32(2.5),
            "scale_factor_width": np.float32(1.5),
            "align_corners": False,
        },
        expected=_interpolate(size=(12, 6), align_corners=False),
    ),
    OpCase(
        "upsample_bilinear",
        "corners",
        {"x": np.array([[[[1, 2]]]], dtype=np.float32)},
        {},
        {"scale_factor_width": 3, "align_corners": False, "half_pixel_centers": False},
        expected=lambda x: torch.tensor([[[[1, 4 / 3, 5 / 3, 2, 2, 2]]]]),
    ),
    OpCase(
        "upsample_nearest_neighbor",
        "2x3",
        {"x": _IMAGE},
        {},
        {"scale_factor_height": 2, "scale_factor_width": 3},
        expected=_interpolate("nearest", scale_factor=(2, 3)),
    ),
    OpCase(
        "resize_nearest_neighbor",
        "down-up",
        {"x": _IMAGE},
        {},
        {"target_size_height": 3, "target_size_width": 7},
        expected=_interpolate("nearest", size=(3, 7)),
    ),
    *(
        OpCase(
            "resize_bilinear",
            mode.lower(),
            {"x": _ROW},
            {},
            {"target_size_height": 1, "target_size_width": 5, "sampling_mode": mode},
            expected=lambda x, p=positions: torch.tensor([[p]]),
        )
        for mode, positions in _FIVE_OF_TWO.items()
    ),
    OpCase(
        "resize_bilinear",
        "align-one",
        {"x": _ROW},
        {},
        {"target_size_height": 1, "target_size_width": 1, "sampling_mode": "ALIGN_CORNERS"},
        expected=lambda x: torch.tensor([[[0.5]]]),
    ),
    OpCase(
        "resize",
        "linear",
        {"x": _IMAGE},
        {},
        {"shape": [9, 0, 7], "resized_dims": np.uint32(2), "sampling_mode": "UNALIGN_CORNERS"},
        expected=_interpolate(size=(5, 7), align_corners=False),
    ),
    *(
        OpCase(
            "resize",
            f"nearest-{mode.lower()}",
            {"x": _IMAGE},
            {},
            {
                "shape": [3, 7],
                "resized_dims": np.uint32(2),
                "interpolation_mode": "NEAREST_NEIGHBOR",
                "sampling_mode": mode,
            },
            expected=expected,
        )
        for mode, expected in (
            ("DEFAULT", _rounded(3, 7)),
            ("UNALIGN_CORNERS", _interpolate("nearest-exact", size=(3, 7))),
        )
    ),
]

_GRID_IMAGE = normal(2, 3, 4, 5)
_GRID = uniform(2, 6, 7, 2, low=-1.6, high=1.6, seed=1)
_PADDING = {"constant": "zeros", "border": "border", "reflection": "reflection"}


def _resample(note: str, coordinates, expected, **attributes) -> OpCase:
    return OpCase(
        "resample",
        note,
        {"x": _GRID_IMAGE, "coordinates": coordinates},
        {"padding_value": np.float32(attributes.pop("padding_value", 0))},
        {
            "sampling_mode": "bilinear",
            "padding_mode": "constant",
            "coordinates_mode": "normalized_minus_one_to_one",
            "align_corners": True,
            **attributes,
        },
        _I16,
        expected=lambda x, coordinates, padding_value: expected(x, coordinates),
    )


RESAMPLE = [
    *(
        _resample(
            f"{padding}-{mode}-align-{align}",
            _GRID,
            lambda x, c, m=mode, p=torch_padding, a=align: F.grid_sample(
                x, c, mode=m, padding_mode=p, align_corners=a
            ),
            padding_mode=padding,
            sampling_mode=mode,
            align_corners=align,
        )
        for padding, torch_padding in _PADDING.items()
        for mode in ("bilinear", "nearest")
        for align in (True, False)
        # MIL reflects about pixel centres whatever align_corners says; torch only if it is set.
        if padding != "reflection" or align
    ),
    _resample(
        "symmetric",
        _GRID,
        lambda x, c: F.grid_sample(x, c, padding_mode="reflection", align_corners=False),
        padding_mode="symmetric",
        align_corners=False,
    ),
    _resample(
        "padding-value",
        _GRID,
        lambda x, c: F.grid_sample(x - 2, c, align_corners=True) + 2,
        padding_value=2,
    ),
    _resample(
        "zero-to-one",
        _GRID,
        lambda x, c: F.grid_sample(x, 2 * c - 1, align_corners=True),
        coordinates_mode="normalized_zero_to_one",
    ),
    _resample(
        "unnormalized",
        np.array([[[[0, 0], [4, 3]]], [[[1, 2], [2, 1]]]], dtype=np.int32),
        lambda x, c: torch.stack(
            [x[n][:, c[n, :, :, 1].long(), c[n, :, :, 0].long()] for n in range(2)]
        ),
        coordinates_mode="unnormalized",
    ),
    OpCase(
        "affine",
        "map",
        {"x": _GRID_IMAGE, "transform_matrix": normal(2, 6, seed=2)},
        {"padding_value": np.float32(0)},
        {
            "output_height": 3,
            "output_width": 6,
            "sampling_mode": "bilinear",
            "padding_mode": "constant",
            "coordinates_mode": "normalized_minus_one_to_one",
            "align_corners": True,
        },
        expected=lambda x, transform_matrix, padding_value: F.grid_sample(
            x,
            F.affine_grid(transform_matrix.reshape(2, 2, 3), [2, 3, 3, 6], align_corners=True),
            align_corners=True,
        ),
        fp16=False,  # sampling positions rounded to fp16 are other positions
    ),
]

_SQUARE = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
_CROP = {"target_height": 2, "target_width": 2, "sampling_mode": "ALIGN_CORNERS"}


def _corners(x, top, left, bottom, right):
    return x[..., [top, top, bottom, bottom], [left, right, left, right]].reshape(-1, 1, 2, 2)


CROP_RESIZE = [
    *(
        OpCase(
            "crop_resize",
            note,
            {"x": _SQUARE, "roi": np.array(roi, np.float32).reshape(1, 1, -1, 1, 1)},
            {},
            {**_CROP, **attributes},
            opset,
            expected=lambda x, roi: _corners(x, 1, 0, 2, 3)[None],
        )
        for opset in (_I15, _I16)
        for note, roi, attributes in (
            ("corners", [1, 0, 2, 3], {}),
            ("width-first", [0, 1, 3, 2], {"box_coordinate_mode": "CORNERS_WIDTH_FIRST"}),
            ("centre", [1.5, 1.5, 1, 3], {"box_coordinate_mode": "CENTER_SIZE_HEIGHT_FIRST"}),
            ("scaled", [2, 0, 4, 6], {"spatial_scale": np.float32(0.5)}),
            ("indexed", [0, 1, 0, 2, 3], {}),
        )
    ),
    OpCase(
        "crop_resize",
        "outside",
        {"x": _SQUARE, "boxes": np.array([[-1, 0, 2, 3], [0, 0, 1, 1]], np.float32)},
        {"pad_value": np.float32(9)},
        {**_CROP, "box_indices": np.array([0, 0], np.int32)},
        expected=lambda x, boxes, pad_value: torch.cat(
            [
                torch.tensor([9.0, 9, float(x[0, 0, 2, 0]), float(x[0, 0, 2, 3])]).reshape(
                    1, 1, 2, 2
                ),
                _corners(x, 0, 0, 1, 1),
            ]
        ),
    ),
]

CASES = [*RESIZE, *RESAMPLE, *CROP_RESIZE]
