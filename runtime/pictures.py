"""Convert between Pillow's pictures and the pixels of image features.

A program's pixels are floats from 0 to 255, with one channel or three, in the order of its color
space; the program scales them.

Source: ``ImageFeatureType`` in coremltools' ``FeatureTypes.proto``.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from coreml_delegate.errors import InputError
from coreml_delegate.formats.added_steps import BRIGHTEST
from coreml_delegate.runtime.engines.input_shapes import check_shape
from coreml_delegate.runtime.mil.program import ColorSpace, Feature
from coreml_delegate.runtime.snapshots import Array

MODES = {
    ColorSpace.RGB: "RGB",
    ColorSpace.BGR: "RGB",
    ColorSpace.GRAYSCALE: "L",
    ColorSpace.GRAYSCALE_FLOAT16: "F",
}
"""Color space of an image feature -> Pillow's mode."""


def is_picture(value: object) -> bool:
    """Whether ``value`` is a ``PIL.Image.Image``; Pillow need not be installed."""
    return hasattr(value, "mode") and hasattr(value, "getbands")


def picture_to_array(picture: Any, feature: Feature) -> Array:
    """Convert a ``PIL.Image.Image`` to the array of an image feature.

    Args:
        picture: Picture of mode ``RGB``, ``L`` or ``F``, depending on the color space.
        feature: An image feature.

    Returns:
        fp32 [1, C, H, W].

    Raises:
        InputError: The picture has the wrong mode or size, or the feature is no image.
    """
    if feature.color_space is None:
        raise InputError(
            f"input {feature.name!r} is no image",
            got=f"a picture of {_size(picture)}",
            expected="an array",
        )
    mode = MODES[feature.color_space]
    if picture.mode != mode:
        raise InputError(
            f"image input {feature.name!r} has another mode",
            got=picture.mode,
            expected=mode,
            remedy=f"Pass image.convert({mode!r})",
        )
    pixels = np.asarray(picture, dtype=np.float32)
    channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    try:
        check_shape(feature, (1, *channels.shape))
    except InputError as error:
        height, width = (feature.type.shape or (None, None))[-2:]
        is_fixed = not feature.shapes and not feature.bounds
        raise InputError(
            f"image input {feature.name!r} has another size",
            got=_size(picture),
            expected=f"{width} x {height} pixels" if is_fixed else error.expected,
            remedy="Pass image.resize((width, height))",
        ) from None
    ordered = channels[::-1] if feature.color_space is ColorSpace.BGR else channels
    return np.ascontiguousarray(ordered[None])


def _size(picture: Any) -> str:
    return f"{picture.width} x {picture.height} pixels"


def array_to_picture(pixels: Array, color_space: ColorSpace) -> Any:
    """Convert an image output to a ``PIL.Image.Image``.

    Args:
        pixels: [1, C, H, W]; values beyond 0 to 255 are clipped, others rounded, unless the color
            space has floats.
        color_space: Color space of the output.
    """
    image = importlib.import_module("PIL.Image")
    plane = pixels.astype(np.float32)[0]
    if color_space is ColorSpace.GRAYSCALE_FLOAT16:
        return image.fromarray(plane[0])
    rounded = np.rint(plane.clip(0, BRIGHTEST)).astype(np.uint8)
    if color_space is ColorSpace.GRAYSCALE:
        return image.fromarray(rounded[0])
    ordered = rounded[::-1] if color_space is ColorSpace.BGR else rounded
    return image.fromarray(np.ascontiguousarray(ordered.transpose(1, 2, 0)))
