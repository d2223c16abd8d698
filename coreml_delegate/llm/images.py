"""Images for a language model: preprocessing to pixels, and image tokens."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.patches.third_party import transformers, wrap_errors

_TOKEN = "get_image_token_id"
_RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Names of Pillow's filters, at the index of their number."""


class Fit(enum.Enum):
    """How an image of any size is fitted to the model's size."""

    STRETCH = "stretch"
    """Height and width are scaled independently."""
    SHORTER = "shorter"
    """The shorter side is scaled to a length, and the centre is cut out."""
    LONGER = "longer"
    """The longer side is scaled to a length, and the result is stretched."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """How an image becomes pixels.

    Attributes:
        size: Height and width of the pixels.
        fit: How the image is fitted to this size.
        side: Length of the side that ``fit`` names; 0 for ``Fit.STRETCH``.
        resampling: Name of Pillow's filter.
        factor: Factor of the values 0 to 255.
        mean: Mean by channel (RGB): a pixel is (factor * value - mean) / std.
        std: Standard deviation by channel.
    """

    size: tuple[int, int]
    fit: Fit = Fit.STRETCH
    side: int = 0
    resampling: str = "bicubic"
    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def read(cls, folder: Path, size: tuple[int, int]) -> Preparation:
        """Read a checkpoint's preprocessing of an image without tiles.

        Args:
            folder: Has a ``preprocessor_config.json``, or a ``processor_config.json``.
            size: Height and width that the model takes.

        Raises:
            OptionError: There is no such file, or its preprocessing is not a ``Fit``.
        """
        with wrap_errors(f"transformers cannot read how {folder} prepares images", _remedy):
            processor: Any = transformers().AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            )
            fit, side, processor_size = _fit(processor, size)
            if processor_size != size:
                raise OptionError(
                    f"{folder} prepares images of another size than its model takes",
                    got=f"{size_text(processor_size)} pixels",
                    expected=f"{size_text(size)} pixels",
                )
            normal = processor.do_normalize
            return cls(
                size,
                fit,
                side,
                _RESAMPLING[int(processor.resample)],
                float(processor.rescale_factor) if processor.do_rescale else 1.0,
                tuple(map(float, processor.image_mean)) if normal else (0.0, 0.0, 0.0),
                tuple(map(float, processor.image_std)) if normal else (1.0, 1.0, 1.0),
            )

    def pixels(self, image: Any) -> torch.Tensor:
        """Return the pixels [1, 3, H, W], fp32, of a Pillow image."""
        image = image.convert("RGB")
        if self.fit is Fit.SHORTER:
            scaled = self._resize(image, _scaled_size(image.size, self.side, shorter=True))
            (height, width), (scaled_width, scaled_height) = self.size, scaled.size
            x, y = (scaled_width - width) // 2, (scaled_height - height) // 2
            fitted = scaled.crop((x, y, x + width, y + height))
        else:
            if self.fit is Fit.LONGER:
                image = self._resize(image, _scaled_size(image.size, self.side, shorter=False))
            fitted = self._resize(image, (self.size[1], self.size[0]))
        values = np.asarray(fitted, np.float32) * np.float32(self.factor)
        normal = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(normal).permute(2, 0, 1)[None].contiguous()

    def _resize(self, image: Any, size: tuple[int, int]) -> Any:
        return image.resize(size, resample=_RESAMPLING.index(self.resampling))


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "pip install 'coreml-delegate[vision]'"
    return "Copy the preprocessor_config.json of the model into the folder"


def _fit(processor: Any, wanted: tuple[int, int]) -> tuple[Fit, int, tuple[int, int]]:
    """Return the fit, side and size of a processor of ``transformers``.

    Args:
        processor: The processor.
        wanted: Height and width for a processor that takes images of any size.

    Raises:
        OptionError: The processor fits images in another way.
    """
    size = processor.size
    tile = getattr(processor, "max_image_size", None)
    if hasattr(processor, "merge_size"):
        return Fit.STRETCH, 0, wanted
    if size is not None and processor.do_resize:
        if size.longest_edge and tile:
            side = tile["longest_edge"]
            return Fit.LONGER, size.longest_edge, (side, side)
        if not processor.do_pad:
            crop = processor.crop_size if processor.do_center_crop else None
            if crop is not None and (size.shortest_edge or 0) >= max(crop.height, crop.width):
                return Fit.SHORTER, size.shortest_edge, (crop.height, crop.width)
            if size.height and size.width and crop in (None, size):
                return Fit.STRETCH, 0, (size.height, size.width)
    raise OptionError(
        "the model prepares images in a way that is not supported",
        got=type(processor).__name__.removesuffix("Pil"),
        expected="images that are stretched, or scaled and cut out",
    )


def _scaled_size(size: tuple[int, int], side: int, *, shorter: bool) -> tuple[int, int]:
    """Scale a size to a shorter or longer side of ``side``, at about the same aspect ratio."""
    width, height = size
    if shorter:
        if width <= height:
            return side, int(side * height / width)
        return int(side * width / height), side
    # transformers makes the shorter side even.
    other = int(side / (width / height)) if width >= height else int(side * (width / height))
    other = max(other + other % 2, 1)
    return (side, other) if width >= height else (other, side)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A ``.pte``'s constants about images.

    Attributes:
        token: Token that stands for an image in a prompt.
        positions: Number of positions of an image in the context.
        width: Channels of a row, for a position of an image or a token.
        preparation: Preprocessing of an image.
    """

    token: int
    positions: int
    width: int
    preparation: Preparation

    def describe(self) -> str:
        """Return the size and number of positions of an image as text."""
        return f"{size_text(self.preparation.size)} pixels in {self.positions:,} positions"

    def constants(self) -> dict[str, Any]:
        """Return the constant methods by name, each with its value."""
        prepared = self.preparation
        return {
            _TOKEN: self.token,
            "get_image_positions": self.positions,
            "get_embedding_size": self.width,
            "get_image_size": list(prepared.size),
            "get_image_fit": prepared.fit.value,
            "get_image_side": prepared.side,
            "get_image_resampling": prepared.resampling,
            "get_image_factor": prepared.factor,
            "get_image_mean": list(prepared.mean),
            "get_image_std": list(prepared.std),
        }

    @classmethod
    def read(
        cls, names: Collection[str], call: Callable[[str], Sequence[Any]]
    ) -> ImageInput | None:
        """Read a program's constants; return None for a text-only model.

        Args:
            names: Names of all methods.
            call: Runs a method without inputs; returns its outputs.
        """
        if _TOKEN not in names:
            return None
        example = cls(0, 0, 0, Preparation((0, 0)))
        values: Mapping[str, Sequence[Any]] = {name: call(name) for name in example.constants()}
        height, width = values["get_image_size"]
        return cls(
            token=int(values[_TOKEN][0]),
            positions=int(values["get_image_positions"][0]),
            width=int(values["get_embedding_size"][0]),
            preparation=Preparation(
                (int(height), int(width)),
                Fit(values["get_image_fit"][0]),
                int(values["get_image_side"][0]),
                str(values["get_image_resampling"][0]),
                float(values["get_image_factor"][0]),
                tuple(map(float, values["get_image_mean"])),
                tuple(map(float, values["get_image_std"])),
            ),
        )

    def length(self, tokens: Sequence[int], images: int) -> int:
        """Return the number of positions of a prompt in which ``images`` tokens are images."""
        return len(tokens) + images * (self.positions - 1)

    def calls(self, length: int, begins: Sequence[int], chunk: int) -> Iterator[int]:
        """Yield the number of rows of each call; an image that fits into a call is not split.

        Args:
            length: Number of rows.
            begins: Index of the first row of each image.
            chunk: Largest number of rows of a call.
        """
        start = 0
        while start < length:
            end = min(start + chunk, length)
            for begin in begins:
                if start < begin < end < begin + self.positions <= begin + chunk:
                    end = begin
            yield end - start
            start = end

    def check(self, tokens: Sequence[int], images: Sequence[torch.Tensor]) -> None:
        """Check that images fit a prompt and the model.

        Raises:
            InputError: Their number differs from the number of image tokens, or a shape is wrong.
        """
        placeholders = list(tokens).count(self.token)
        if placeholders != len(images):
            raise InputError(
                "the number of image tokens in the prompt is not the number of images",
                got=f"{placeholders} times token {self.token}, and {_count_text(len(images))}",
                remedy="Put the token into the prompt once for each image",
            )
        expected = (1, 3, *self.preparation.size)
        for image in images:
            if tuple(image.shape) != expected:
                raise InputError(
                    "the image has another size than the model takes",
                    got=str(list(image.shape)),
                    expected=str(list(expected)),
                    remedy="Make the pixels with layout.image.preparation.pixels",
                )


def refuse_images(images: Collection[object]) -> None:
    """Refuse images for a text-only model.

    Raises:
        InputError: There is an image.
    """
    if images:
        raise InputError(
            "the model takes no images",
            got=_count_text(len(images)),
            remedy="Export a model with a vision_config, such as LLaVA",
        )


def _count_text(images: int) -> str:
    return f"{images} image{'' if images == 1 else 's'}"


def size_text(size: tuple[int, int]) -> str:
    """Return a height and width as text."""
    return f"{size[0]} x {size[1]}"
