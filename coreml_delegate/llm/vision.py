"""Models of ``transformers`` that read images: a vision tower, a projector, and a language model.

The projector turns an image into embeddings, which replace the embeddings of its image token. So
the language model takes embeddings, and two more methods compute them: ``vision`` and ``embed``.
``image_rows.py`` has what else some language models need to know of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import Call, active_call
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.image_rows import COUNTER, ImageRows
from coreml_delegate.llm.images import ImageInput, Preparation, size_text
from coreml_delegate.llm.patch_towers import PatchTower, patches_of
from coreml_delegate.llm.positions import read_axes, use_axes
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.patches.third_party import wrap_errors

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_Inputs = dict[str, torch.Tensor]
_SIDE = 448  # pixels; of images of models that take images of any size


class _Family:
    """How the modules of an architecture turn an image into embeddings."""

    def size(self, config: Any, chosen: tuple[int, int] | None) -> tuple[int, int]:
        """Return the height and width of a model's images.

        Args:
            config: Configuration of the model.
            chosen: The size that the user wants; None for the model's own.

        Raises:
            OptionError: The model takes images of another size, or of any size.
        """
        size = getattr(config.vision_config, "image_size", None)
        if size is None:
            raise OptionError(
                "the model takes images of any size, which is not supported",
                got=f"a vision_config with model_type {config.vision_config.model_type!r}",
                expected="a vision_config with image_size",
            )
        height, width = size if isinstance(size, list | tuple) else (size, size)
        own = int(height), int(width)
        if chosen not in (None, own):
            raise OptionError(
                "the model takes images of one size",
                got=f"--image-size {size_text(chosen)}",
                expected=size_text(own),
                remedy="Leave out --image-size",
            )
        return own

    def prepare(self, model: Any, size: tuple[int, int]) -> None:
        """Replace modules that cannot be exported, for images of a height and width."""

    def positions(self, model: Any, pixels: torch.Tensor) -> int:
        """Return the number of positions of an image, by the unchanged model."""
        return _Family.see(self, model, pixels).shape[1]

    def model_inputs(self, config: Any, pixels: torch.Tensor, tokens: torch.Tensor) -> _Inputs:
        """Return the inputs that the unchanged model takes beside tokens.

        Args:
            config: Configuration of the model.
            pixels: [1, 3, H, W].
            tokens: [1, T], with a token for each position of the image.
        """
        del config, tokens
        return {"pixel_values": pixels}

    def rows(self, config: Any, size: tuple[int, int], count: int) -> ImageRows:
        """Return the ``ImageRows`` of an image of ``count`` positions."""
        del size
        return ImageRows(count, _width(config))

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the features [1, N, channels] that replace image tokens; see ``ImageRows``."""
        features = model.get_image_features(pixel_values=pixels).pooler_output
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

    def positions(self, model: Any, pixels: torch.Tensor) -> int:
        """See ``_Family``: the model takes several images of several texts."""
        return _Family.see(self, model, pixels[None]).shape[1]

    def model_inputs(self, config: Any, pixels: torch.Tensor, tokens: torch.Tensor) -> _Inputs:
        """See ``_Family``: the model takes several images of several texts."""
        del config, tokens
        return {"pixel_values": pixels[None]}

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """See ``_Family``."""
        tower, connector = model.model.vision_model, model.model.connector
        hidden = tower.encoder(inputs_embeds=tower.embeddings(pixels), attention_mask=None)
        return connector(tower.post_layernorm(hidden.last_hidden_state))


class _BidirectionalFamily(_Family):
    """Language models whose attention goes in both directions among the positions of an image."""

    def model_inputs(self, config: Any, pixels: torch.Tensor, tokens: torch.Tensor) -> _Inputs:
        """See ``_Family``: without types of tokens the model's attention would be causal."""
        is_image = (tokens == config.image_token_id).to(torch.long)
        return {"pixel_values": pixels, "token_type_ids": is_image}

    def rows(self, config: Any, size: tuple[int, int], count: int) -> ImageRows:
        """See ``_Family``."""
        del size
        return ImageRows(count, _width(config), bidirectional=True)


class _AnySizeFamily(_Family):
    """Models that take images of any size."""

    def unit(self, config: Any) -> int:
        """Return the height and width, in pixels, of a position of an image."""
        raise NotImplementedError

    def size(self, config: Any, chosen: tuple[int, int] | None) -> tuple[int, int]:
        """See ``_Family``: multiples of a unit."""
        unit = self.unit(config)
        default = max(_SIDE // unit, 1) * unit
        size = chosen or (default, default)
        if any(side % unit or not side for side in size):
            raise OptionError(
                "the model does not take images of this size",
                got=f"--image-size {size_text(size)}",
                expected=f"multiples of {unit} pixels",
            )
        return size

    def grid(self, config: Any, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of an image in positions."""
        unit = self.unit(config)
        return size[0] // unit, size[1] // unit

    def positions(self, model: Any, pixels: torch.Tensor) -> int:
        """See ``_Family``."""
        height, width = self.grid(model.config, (pixels.shape[2], pixels.shape[3]))
        return height * width


class _NaFlexFamily(_AnySizeFamily):
    """LFM2-VL: SigLIP 2, whose position embeddings are resized to the image."""

    def unit(self, config: Any) -> int:
        """See ``_AnySizeFamily``."""
        return config.vision_config.patch_size * config.downsample_factor

    def prepare(self, model: Any, size: tuple[int, int]) -> None:
        """Replace the embedding of patches, which resizes the positions."""
        tower = model.model.vision_tower
        original, patch = tower.embeddings, tower.config.patch_size
        weight = in_memory(original.patch_embedding.weight).unflatten(1, (patch, patch, 3))
        patches = nn.Conv2d(3, weight.shape[0], patch, stride=patch, device="meta")
        patches.weight = nn.Parameter(weight.permute(0, 3, 1, 2).contiguous(), requires_grad=False)
        patches.bias = original.patch_embedding.bias
        side, shape = original.position_embedding_size, [side // patch for side in size]
        positions = original.resize_positional_embeddings(
            in_memory(original.position_embedding.weight).view(side, side, -1),
            torch.tensor([shape]),
            max_length=shape[0] * shape[1],
        )
        tower.embeddings = PatchEmbedding(patches, positions)

    def model_inputs(self, config: Any, pixels: torch.Tensor, tokens: torch.Tensor) -> _Inputs:
        """See ``_Family``: patches, none of which is padding."""
        del tokens
        patch = config.vision_config.patch_size
        rows, columns = (side // patch for side in pixels.shape[2:])
        blocks = pixels.view(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        return {
            "pixel_values": blocks.reshape(1, rows * columns, -1),
            "spatial_shapes": torch.tensor([[rows, columns]]),
            "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int),
        }

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """See ``_Family``."""
        tower = model.model.vision_tower
        hidden = tower.encoder(inputs_embeds=tower.embeddings(pixels), attention_mask=None)
        patches = tower.post_layernorm(hidden.last_hidden_state)
        shape = [side // tower.config.patch_size for side in pixels.shape[2:]]
        rows = model.model.multi_modal_projector(patches.unflatten(1, shape))
        return rows.reshape(1, -1, rows.shape[-1])


class _GridFamily(_AnySizeFamily):
    """The Qwen-VL family: positions of three dimensions."""

    def unit(self, config: Any) -> int:
        """See ``_AnySizeFamily``."""
        return config.vision_config.patch_size * config.vision_config.spatial_merge_size

    def prepare(self, model: Any, size: tuple[int, int]) -> None:
        """Replace the tower."""
        model.model.visual = PatchTower(model.model.visual, size)

    def model_inputs(self, config: Any, pixels: torch.Tensor, tokens: torch.Tensor) -> _Inputs:
        """See ``_Family``: patches, their grid, and which tokens are an image."""
        vision = config.vision_config
        rows, columns = (side // vision.patch_size for side in pixels.shape[2:])
        return {
            "pixel_values": patches_of(pixels, vision),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
            "mm_token_type_ids": (tokens == config.image_token_id).to(torch.int),
        }

    def rows(self, config: Any, size: tuple[int, int], count: int) -> ImageRows:
        """See ``_Family``."""
        layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        return ImageRows(count, _width(config), grid=self.grid(config, size), layers=layers)

    def see(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """See ``_Family``."""
        return model.model.visual(pixels)


def _width(config: Any) -> int:
    return config.get_text_config(decoder=True).hidden_size


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
    "gemma3": _BidirectionalFamily(),
    "qwen2_vl": _GridFamily(),
    "qwen2_5_vl": _GridFamily(),
    "qwen3_vl": _GridFamily(),
    "qwen3_5": _GridFamily(),
    "lfm2_vl": _NaFlexFamily(),
}
"""Supported families by ``model_type``."""

_TILES = "tiles of an image, whose number depends on its size"
_CROSS = "layers of the language model that attend to the image"

REFUSED: Mapping[str, str] = {
    "paligemma": "attention in both directions among the positions of an image and of the prompt",
    "glm4v": "a tower of its own for images of any size",
    "llava_next": _TILES,
    "llava_onevision": _TILES,
    "mistral3": "tokens between the rows of an image, which only its processor knows",
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


def image_size(config: Any, chosen: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the height and width of a model's images.

    Args:
        config: Configuration of a model of the ``FAMILIES``.
        chosen: The size that the user wants; None for the model's own, or a default.

    Raises:
        OptionError: The model does not take images of the chosen size.
    """
    return _FAMILIES[config.model_type].size(config, chosen)


class VisionDecoder(Decoder):
    """Language model from embeddings of tokens and images to logits.

    Args:
        model: A model of ``transformers`` of one of the ``FAMILIES``, in fp32 and eval mode;
            changed.
        context: Number of positions of the longest text, images included.
        image_size: See ``image_size``.

    Attributes:
        size: Height and width of an image, in pixels.
        positions: Number of positions of an image.
        image_rows: What the language model has to know of them.

    Raises:
        LoweringError: See ``Decoder``; or logits with an image differ from the unchanged model's.
        OptionError: The context is too long for the model, or has no room for an image.
    """

    def __init__(
        self, model: Any, *, context: int, image_size: tuple[int, int] | None = None
    ) -> None:
        config = model.config
        family = _FAMILIES[config.model_type]
        size = family.size(config, image_size)
        refusal = f"{type(model).__name__} does not compute with an image and a text"
        pixels = _example_image(size)
        with torch.no_grad(), wrap_errors(refusal, kind=LoweringError):
            count = family.positions(model, pixels)
            text = torch.tensor([_probe_text(config.image_token_id, count)])
            self._require_room(context, text.shape[1], count)
            image_rows = family.rows(config, size, count)
            inputs = family.model_inputs(config, pixels, text)
            expected = model(input_ids=text, **inputs).logits
            axes = None if image_rows.grid is None else read_axes(model.get_decoder())
            family.prepare(model, size)
        super().__init__(model, context=context)
        self.size, self.positions, self.image_rows = size, count, image_rows
        self._family = family
        if axes is not None:
            use_axes(model, axes)
            self.layers = (*self.layers, COUNTER)
        image_rows.add_features(model.get_decoder().layers)
        with torch.no_grad(), wrap_errors(refusal, kind=LoweringError):
            rows = self.embed(text)
            rows[:, 1 : 1 + count] = self.see(pixels)
            self._check_whole(expected, rows)
            self._check_steps(expected, rows, count + 1 if image_rows.bidirectional else None)

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
        """Return the rows [1, N, channels] of an image, pixels [1, 3, H, W]."""
        with active_call(Call(), self.model):
            return self.image_rows.of_image(self._family.see(self.model, pixels))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, L, channels] of tokens [1, L]."""
        return self.image_rows.of_tokens(self.embedding(tokens))

    @property
    def least_chunk(self) -> int:
        """See ``Decoder``: an image whose rows see each other has to be in one call."""
        return self.positions if self.image_rows.bidirectional else 1

    def model_inputs(
        self,
        inputs: torch.Tensor,
        call: Call,
        positions: torch.Tensor,
        cache: Cache | None = None,
    ) -> dict[str, torch.Tensor]:
        """See ``Decoder``; embeddings are rows [1, L, channels]."""
        if not inputs.is_floating_point():
            return super().model_inputs(inputs, call, positions, cache)
        return self.image_rows.model_inputs(inputs, call, positions, cache)

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that compute with tokens, by name: all except tower and projector."""
        inside = {id(module) for module in self.model.get_decoder().modules()} | {id(self.head)}
        for name, module in self.named_modules():
            if id(module) in inside:
                yield name, module

    def inputs(self, length: int) -> torch.Tensor:
        """Return example embeddings of ``length`` tokens for ``advance``."""
        with torch.no_grad():
            return Embed(self)(super().inputs(length))

    def input_modules(self, chunk: int) -> list[tuple[nn.Module, torch.Tensor]]:
        """Return the modules that compute embeddings of an image and of tokens; see ``Decoder``."""
        return [
            (Vision(self), _example_image(self.size)),
            (Embed(self), super().inputs(chunk)),
        ]


def _example_image(size: tuple[int, int]) -> torch.Tensor:
    """Return random pixels [1, 3, H, W] from -1 to 1."""
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1


class Vision(nn.Module):
    """Method ``vision``: an image."""

    def __init__(self, decoder: VisionDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, N, channels] of pixels [1, 3, H, W], fp32."""
        return self.decoder.see(pixels)


class Embed(nn.Module):
    """Method ``embed``: a chunk of tokens."""

    def __init__(self, decoder: VisionDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, L, channels] of tokens [1, L], int64."""
        return self.decoder.embed(tokens)


def read_preparation(
    config: Any, folder: Path | None, chosen: tuple[int, int] | None = None
) -> Preparation | None:
    """Return the preprocessing of a model's images; None for a text-only model.

    Args:
        config: Configuration of ``transformers``.
        folder: Its checkpoint; None to stretch images to the model's size.
        chosen: See ``image_size``.

    Raises:
        OptionError: See ``Preparation.read`` and ``image_size``.
    """
    if not reads_images(config):
        return None
    size = image_size(config, chosen)
    return Preparation(size) if folder is None else Preparation.read(folder, size)


def image_input(decoder: Decoder, preparation: Preparation | None) -> ImageInput | None:
    """Return the layout's constants about images; None for a text-only decoder."""
    if not isinstance(decoder, VisionDecoder) or preparation is None:
        return None
    return ImageInput(
        token=decoder.model.config.image_token_id,
        positions=decoder.positions,
        width=decoder.image_rows.channels,
        preparation=preparation,
    )


def _probe_text(image: int, positions: int) -> list[int]:
    """Return tokens of a text with an image between other tokens."""
    first, second, third = [token for token in range(4) if token != image][:3]
    return [first, *[image] * positions, second, third]
