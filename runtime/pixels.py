"""Pictures as what ML Programs with image features compute on.

A program takes pixels as floats [1, C, H, W] from 0 to 255, one channel or three, in the order its
color space names. What scales them is part of the program.

Source: ``ImageFeatureType`` in coremltools' ``FeatureTypes.proto``.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.mil.program import ColorSpace, Feature
from coreml_delegate.runtime.snapshots import Array

_MODES = {
    ColorSpace.RGB: "RGB",
    ColorSpace.BGR: "RGB",
    ColorSpace.GRAYSCALE: "L",
    ColorSpace.GRAYSCALE_FLOAT16: "F",
}
_BRIGHTEST = 255


def from_picture(picture: Any, feature: Feature) -> Array:
    """Pixels of a ``PIL.Image.Image`` as an image feature takes them.

    Args:
        picture: Of mode ``RGB``, ``L`` or ``F``, as the color space demands.
        feature: An image feature.

    Returns:
        fp32 [1, C, H, W].

    Raises:
        InputError: The picture has another mode, or the feature is none of an image.
    """
    if feature.color_space is None:
        raise InputError(f"input {feature.name!r} is no image", got=f"a picture {picture.size}")
    mode = _MODES[feature.color_space]
    if picture.mode != mode:
        raise InputError(
            f"image input {feature.name!r} has another mode", got=picture.mode, expected=mode
        )
    pixels = np.asarray(picture, dtype=np.float32)
    if pixels.ndim == 2:
        return pixels[None, None]
    ordered = pixels[..., ::-1] if feature.color_space is ColorSpace.BGR else pixels
    return np.ascontiguousarray(ordered.transpose(2, 0, 1)[None])


def to_picture(pixels: Array, color_space: ColorSpace) -> Any:
    """A ``PIL.Image.Image`` of an image output.

    Args:
        pixels: [1, C, H, W]; values beyond 0 to 255 are cut to the range, others rounded, unless
            the color space has floats.
        color_space: Of the output.
    """
    image = importlib.import_module("PIL.Image")
    plane = pixels.astype(np.float32)[0]
    if color_space is ColorSpace.GRAYSCALE_FLOAT16:
        return image.fromarray(plane[0])
    whole = np.rint(plane.clip(0, _BRIGHTEST)).astype(np.uint8)
    if color_space is ColorSpace.GRAYSCALE:
        return image.fromarray(whole[0])
    ordered = whole[::-1] if color_space is ColorSpace.BGR else whole
    return image.fromarray(np.ascontiguousarray(ordered.transpose(1, 2, 0)))
