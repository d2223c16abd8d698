"""Models of ``transformers`` that read images: a vision tower, a projector, and a language model.

The projector turns an image into embeddings, which replace the embeddings of its image token. So
the language model takes embeddings, and two more methods compute them: ``vision`` and ``embed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import Call, active_call
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.images import ImageInput, Preparation
from coreml_delegate.patches.third_party import wrap_errors


class _Family:
    """How the modules of an architecture turn an image into embeddings."""

    def prepare(self, model: Any, size: tuple[int, int]) -> None:
        """Replace modules that cannot be exported, for images of a height and width."""

    def model_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels [1, 3, H, W] in the shape that the unchanged model takes."""
        return pixels

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, N, width] that replace image tokens."""
        features = model.get_image_features(pixel_values=self.model_input(pixels)).pooler_output
        rows = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
        return rows.reshape(1, -1, rows.shape[-1])


class _PaddedFamily(_Family):
    """Towers that take padded images, here for images without padding.

    The model skips images that are all zero. That depends on values, so only the tower is called.
    """

    def prepare(self, model: Any, size: tuple[int, int]) -> None:
        """Replace the patch embedding, which derives positions from the padding."""
        tower = model.model.vision_model
        original = tower.embeddings
        present = torch.ones(1, *(side // original.patch_size for side in size), dtype=torch.bool)
        positions: list[torch.Tensor] = []
        hook = original.position_embedding.register_forward_hook(
            lambda *module_inputs_output: positions.append(module_inputs_output[-1])
        )
        original(pixel_values=torch.zeros(1, 3, *size), patch_attention_mask=present)
        hook.remove()
        tower.embeddings = PatchEmbedding(original.patch_embedding, positions[0])

    def model_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """See ``_Family``: the model takes several images of several texts."""
        return pixels[None]

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """See ``_Family``."""
        tower, connector = model.model.vision_model, model.model.connector
        hidden = tower.encoder(inputs_embeds=tower.embeddings(pixels), attention_mask=None)
        return connector(tower.post_layernorm(hidden.last_hidden_state))


class PatchEmbedding(nn.Module):
    """Embeddings of the patches of an image without padding.

    Args:
        patches: Convolution from pixels to patches.
        positions: Embeddings [1, N, width] of their positions.
    """

    def __init__(self, patches: nn.Module, positions: torch.Tensor) -> None:
        super().__init__()
        self.patches = patches
        self.positions = nn.Parameter(positions, requires_grad=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, N, width] of pixels [1, 3, H, W]."""
        return self.patches(pixels).flatten(2).transpose(1, 2) + self.positions


_FAMILIES: Mapping[str, _Family] = {
    "llava": _Family(),
    "smolvlm": _PaddedFamily(),
    "idefics3": _PaddedFamily(),
    "vipllava": _Family(),
    "aya_vision": _Family(),
    "cohere2_vision": _Family(),
    "internvl": _Family(),
}
"""Supported families by ``model_type``."""

_BIDIRECTIONAL = "attention in both directions among the positions of an image"
_POSITIONS = "positions of tokens that depend on the image"
_TILES = "tiles of an image, whose number depends on its size"
_LAYERED = "images that enter several layers of the language model"
_CROSS = "layers of the language model that attend to the image"

REFUSED: Mapping[str, str] = {
    "gemma3": _BIDIRECTIONAL,
    "paligemma": f"{_BIDIRECTIONAL} and of the prompt",
    "qwen2_vl": _POSITIONS,
    "qwen2_5_vl": _POSITIONS,
    "glm4v": _POSITIONS,
    "qwen3_vl": f"{_LAYERED}, and {_POSITIONS}",
    "qwen3_5": _POSITIONS,
    "llava_next": _TILES,
    "llava_onevision": _TILES,
    "mistral3": "images of any size",
    "idefics": _CROSS,
}
"""What is not supported about the images of models, by ``model_type``."""

TEXT_REFUSED = ("paligemma", "idefics")
"""Each ``model_type`` of ``REFUSED`` that ``Decoder`` does not support either."""

FAMILIES = tuple(_FAMILIES)
"""Each ``model_type`` that is supported."""


def reads_images(config: Any) -> bool:
    """Whether ``VisionDecoder`` supports the model of a configuration of ``transformers``."""
    return config.model_type in _FAMILIES


def leave_out_images(model: Any) -> None:
    """Remove the parts of a model of ``transformers`` outside its decoder, embedding and head."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    language = {id(module) for part in parts for module in part.modules()}
    parents = [model]
    while parents:
        parent = parents.pop()
        for name, _ in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, None)  # such as LLaVA-NeXT's embedding of a line's end
        for name, child in list(parent.named_children()):
            if id(child) in language:
                continue
            if any(id(module) in language for module in child.modules()):
                parents.append(child)
            else:
                setattr(parent, name, None)


def image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of a model's images from its configuration.

    Raises:
        OptionError: The model takes images of any size.
    """
    size = getattr(config.vision_config, "image_size", None)
    if size is None:
        raise OptionError(
            "the model takes images of any size, which is not supported",
            got=f"a vision_config with model_type {config.vision_config.model_type!r}",
            expected="a vision_config with image_size",
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


class VisionDecoder(Decoder):
    """Language model from embeddings of tokens and images to logits.

    Args:
        model: A model of ``transformers`` of one of the ``FAMILIES``, in fp32 and eval mode;
            changed.
        context: Number of positions of the longest text, images included.

    Attributes:
        positions: Number of positions of an image.

    Raises:
        LoweringError: See ``Decoder``; or logits with an image differ from the unchanged model's.
        OptionError: The context is too long for the model, or has no room for an image.
    """

    def __init__(self, model: Any, *, context: int) -> None:
        family, size = _FAMILIES[model.config.model_type], image_size(model.config)
        refusal = f"{type(model).__name__} does not compute with an image and a text"
        pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
        with torch.no_grad(), wrap_errors(refusal, kind=LoweringError):
            shape = _Family.see(family, model, pixels).shape
            tokens = _probe_text(model.config.image_token_id, shape[1])
            self._require_room(context, len(tokens), shape[1])
            expected = model(
                input_ids=torch.tensor([tokens]), pixel_values=family.model_input(pixels)
            ).logits
            family.prepare(model, size)
        super().__init__(model, context=context)
        self.size, self.positions = size, int(shape[1])
        self._family = family
        self._width = int(shape[2])
        with torch.no_grad(), wrap_errors(refusal, kind=LoweringError):
            rows = self.embedding(torch.tensor([tokens]))
            rows[:, 1 : 1 + self.positions] = self.see(pixels)
            self._check_whole(expected, rows)
            self._check_steps(expected, rows)

    @staticmethod
    def _require_room(context: int, length: int, positions: int) -> None:
        if context < length:
            raise OptionError(
                "the context has no room for an image and a text",
                got=f"a context of {context} tokens",
                expected=f"at least {length}, of which the image takes {positions}",
                remedy="Export with a larger --context",
            )

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, N, width] of an image, pixels [1, 3, H, W]."""
        with active_call(Call(), self.model):
            return self._family.see(self.model, pixels)

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that compute with tokens, by name: all except tower and projector."""
        inside = {id(module) for module in self.model.get_decoder().modules()} | {id(self.head)}
        for name, module in self.named_modules():
            if id(module) in inside:
                yield name, module

    def inputs(self, length: int) -> torch.Tensor:
        """Return example embeddings of ``length`` tokens for ``advance``."""
        return torch.zeros(1, length, self._width)

    def input_modules(self, chunk: int) -> list[tuple[nn.Module, torch.Tensor]]:
        """Return the modules that compute embeddings of an image and of tokens; see ``Decoder``."""
        return [
            (Vision(self), torch.zeros(1, 3, *self.size)),
            (Embed(self), torch.zeros(1, chunk, dtype=torch.long)),
        ]


class Vision(nn.Module):
    """Method ``vision``: an image."""

    def __init__(self, decoder: VisionDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, N, width] of pixels [1, 3, H, W], fp32."""
        return self.decoder.see(pixels)


class Embed(nn.Module):
    """Method ``embed``: a chunk of tokens."""

    def __init__(self, decoder: VisionDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, L, width] of tokens [1, L], int64."""
        return self.decoder.embedding(tokens)


def read_preparation(config: Any, folder: Path | None) -> Preparation | None:
    """Return the preprocessing of a model's images; None for a text-only model.

    Args:
        config: Configuration of ``transformers``.
        folder: Its checkpoint; None to stretch images to the model's size.

    Raises:
        OptionError: See ``Preparation.read``.
    """
    if not reads_images(config):
        return None
    size = image_size(config)
    return Preparation(size) if folder is None else Preparation.read(folder, size)


def image_input(decoder: Decoder, preparation: Preparation | None) -> ImageInput | None:
    """Return the layout's constants about images; None for a text-only decoder."""
    if not isinstance(decoder, VisionDecoder) or preparation is None:
        return None
    return ImageInput(
        token=decoder.model.config.image_token_id,
        positions=decoder.positions,
        width=decoder.inputs(1).shape[2],
        preparation=preparation,
    )


def _probe_text(image: int, positions: int) -> list[int]:
    """Return tokens of a text with an image between other tokens."""
    first, second, third = [token for token in range(4) if token != image][:3]
    return [first, *[image] * positions, second, third]
