"""Reads images as inputs: as a model declares them, or with ImageNet's preprocessing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.runtime.pictures import MODES, picture_to_array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's pixels in [0, 1], per channel (RGB)."""
STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's pixels in [0, 1], per channel (RGB)."""

_CROPPED = 0.875  # share of the resized shorter side that the crop keeps: 224 of 256


def read_image(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Read, resize, crop and normalise an RGB image.

    The shorter side is resized (bilinear) to the target's divided by 0.875, the centre is cut out,
    and pixels in [0, 1] are normalised with ImageNet's mean and standard deviation.

    Args:
        path: A file Pillow reads.
        shape: [N, 3, H, W] of the result, which repeats the image N times.
        dtype: Floating-point type of the result.

    Raises:
        InputError: The input does not have the shape or dtype of images.
        OptionError: The file cannot be read, or Pillow is not installed.
    """
    if len(shape) != 4 or shape[1] != 3 or not dtype.is_floating_point:
        raise InputError(
            f"{path} is an image, but the input does not take one",
            got=f"{str(dtype).removeprefix('torch.')}{list(shape)}",
            expected="floating point, [N, 3, H, W]",
        )
    height, width = shape[2:]
    image = _cover(open_image(path), (width, height), _CROPPED)
    pixels = np.asarray(image).astype(np.float32) / 255
    normal = (pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(normal).permute(2, 0, 1).expand(shape).to(dtype).contiguous()


def read_picture(path: Path, feature: Feature, shape: tuple[int, ...]) -> torch.Tensor:
    """Read an image as the image input of a model declares it: color space, and pixels 0 to 255.

    An image of a size that the input takes is not resized. Any other image is resized (bilinear) to
    cover the default size, and its centre is cut out.

    Args:
        path: A file Pillow reads.
        feature: The input, an image.
        shape: [1, C, H, W], its default.

    Returns:
        fp32 [1, C, H, W].

    Raises:
        OptionError: The file cannot be read, or Pillow is not installed.
    """
    picture = open_image(path, "RGB" if feature.color_space is None else MODES[feature.color_space])
    try:
        pixels = picture_to_array(picture, feature)
    except InputError:
        height, width = shape[2:]
        pixels = picture_to_array(_cover(picture, (width, height)), feature)
    return torch.from_numpy(pixels)


def _cover(image: Any, target: tuple[int, int], share: float = 1) -> Any:
    """Return the centre of an image in the target's size, after the image was resized."""
    width, height = target
    resized = image.resize(
        _resized((image.width, image.height), target, share),
        resample=import_pillow().Image.Resampling.BILINEAR,
    )
    left = round((resized.width - width) / 2)
    top = round((resized.height - height) / 2)
    return resized.crop((left, top, left + width, top + height))


def _resized(image: tuple[int, int], target: tuple[int, int], share: float) -> tuple[int, int]:
    """Return width and height before the crop: they cover ``target`` and keep proportions."""
    width, height = (round(side / share) for side in target)
    if height * image[0] >= width * image[1]:
        return int(height * image[0] / image[1]), height
    return width, int(width * image[1] / image[0])


def open_image(path: Path, mode: str = "RGB") -> Any:
    """Return a Pillow image, converted to one of Pillow's modes.

    Raises:
        OptionError: The file cannot be read, or Pillow is not installed.
    """
    pillow = import_pillow().Image
    try:
        with pillow.open(path) as image:
            return image.convert(mode)
    except (OSError, SyntaxError, ValueError) as error:
        raise OptionError("cannot read the image", got=f"{path} ({error})") from error


def import_pillow() -> Any:
    """Import the ``PIL`` package with its drawing modules.

    Raises:
        OptionError: Pillow is not installed.
    """
    try:
        for part in ("Image", "ImageDraw", "ImageFont"):
            importlib.import_module(f"PIL.{part}")
        return importlib.import_module("PIL")
    except ModuleNotFoundError:
        raise OptionError(
            "images need Pillow", remedy="pip install 'coreml-delegate[vision]'"
        ) from None
