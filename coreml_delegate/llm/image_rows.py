"""Rows of images among those of tokens: what a language model has to know of them.

In some models attention goes in both directions among the rows of an image (Gemma 3). In others the
rotary positions of an image have three dimensions, and the text after it continues at its largest
position (Qwen-VL, arXiv:2409.12191, section 2.1), or its features enter several layers (DeepStack,
arXiv:2406.04334).

One number tells a row's place: 1 to P for the rows of an image, 0 for a token. It is one more
channel of the embeddings, and the features of further layers are channels, too. So the caller hands
on rows of numbers that it need not understand, and an image may stand anywhere in a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.attention import Call, current_call
from coreml_delegate.llm.caches import LayerCache
from coreml_delegate.llm.states import State, StateLayer

_MOST = 2048  # integers that fp16 holds exactly

_IMAGES = ("images", 0)
COUNTER = LayerCache(None, None, None, (State(_IMAGES, (1, 1, 1)),))
"""Cache of the number of images that have begun, after the caches of a model's layers."""


class ImageRows(nn.Module):
    """Channels that an image's rows have besides their embeddings, and their use.

    Args:
        count: Number P of rows of an image.
        width: Channels of an embedding.
        bidirectional: Whether the rows of an image see each other in both directions.
        grid: Height and width of an image in rows, for models with positions of three dimensions.
        layers: Layers of the language model, from the first on, to whose results features of an
            image are added.

    Raises:
        OptionError: An image has too many rows to number them in fp16.
    """

    def __init__(
        self,
        count: int,
        width: int,
        *,
        bidirectional: bool = False,
        grid: tuple[int, int] | None = None,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.count, self.bidirectional, self.grid = count, bidirectional, grid
        self._width, self._layers = width, layers
        if not self.is_numbered:
            return
        if count > _MOST:
            raise OptionError(
                "an image has too many positions",
                got=f"{count:,}",
                expected=f"at most {_MOST:,}",
                remedy="Export with a smaller --image-size",
            )
        if grid is not None:
            self.register_buffer("offsets", _offsets(grid), persistent=False)

    @property
    def is_numbered(self) -> bool:
        """Whether rows have a channel with their number."""
        return self.bidirectional or self.grid is not None

    @property
    def channels(self) -> int:
        """Channels of a row, its embedding included."""
        return self._width * (1 + self._layers) + int(self.is_numbered)

    def of_image(self, features: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, P, channels] of an image.

        Args:
            features: Embeddings, then features of further layers, [1, P, width * (1 + layers)].
        """
        if not self.is_numbered:
            return features
        numbers = torch.arange(1, self.count + 1, dtype=features.dtype)
        return torch.cat((features, numbers.view(1, -1, 1)), dim=-1)

    def of_tokens(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, L, channels] of tokens with embeddings [1, L, width]."""
        more = self.channels - self._width
        return functional.pad(embeddings, (0, more)) if more else embeddings

    def model_inputs(
        self, rows: torch.Tensor, call: Call, positions: torch.Tensor, cache: Any
    ) -> dict[str, torch.Tensor]:
        """Return the embeddings and rotary positions of rows; record the rest in the call.

        Args:
            rows: [1, L, channels].
            call: Gets what attention and layers need.
            positions: Positions [L] of the rows in the context, int64.
            cache: The model's, with the state of ``COUNTER`` at the end; None for a whole text.
        """
        if not self.is_numbered:
            return {"inputs_embeds": rows}
        embeddings, *features = rows[:, :, :-1].split(self._width, dim=-1)
        numbers = rows[0, :, -1].to(torch.long)
        call.features = features
        if self.bidirectional:
            ends = positions + (self.count - numbers)
            call.visible_ends = torch.where(numbers > 0, ends, positions)
        if self.grid is None:
            return {"inputs_embeds": embeddings}
        counter = None if cache is None else cache.layers[-1]
        rotary = self._rotary_positions(numbers, positions, counter)
        return {"inputs_embeds": embeddings, "position_ids": rotary[:, None]}

    def _rotary_positions(
        self, numbers: torch.Tensor, positions: torch.Tensor, counter: StateLayer | None
    ) -> torch.Tensor:
        """Return the positions [3, L] of rows: time, height and width.

        Args:
            numbers: See the module, [L].
            positions: Positions in the context, [L].
            counter: Number of images before the call, which the call replaces; None for no images.
        """
        begins = (numbers == 1).to(torch.long)
        begun = begins.cumsum(0)
        if counter is not None:
            before = counter.past(_IMAGES)
            counter.replace(_IMAGES, before + begins.to(before.dtype).sum())
            begun = begun + before[0, 0].to(torch.long)
        # An image takes as many positions as its longer side has rows.
        saved = self.count - max(self.grid or ())
        complete = begun - (numbers > 0).to(torch.long)
        shifted = positions - saved * complete + self.get_buffer("offsets")[:, numbers]
        # Padding within an image, whose result is not used, would be before the text.
        return shifted.clamp(min=0)

    def add_features(self, layers: Sequence[nn.Module]) -> None:
        """Let the first layers of a language model add an image's features to their results."""
        for index, layer in enumerate(layers[: self._layers]):
            layer.register_forward_hook(_Addition(index))


class _Addition:
    """Forward hook of a layer that adds features of the call's rows.

    Args:
        index: Of the layer.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def __call__(self, module: nn.Module, inputs: Any, result: torch.Tensor) -> torch.Tensor:
        del module, inputs
        features = current_call().features
        return result + features[self._index] if features else result


def _offsets(grid: tuple[int, int]) -> torch.Tensor:
    """Return the offsets [3, P + 1] of rotary positions to positions in the context, by number."""
    height, width = grid
    first = -torch.arange(height * width)
    places = torch.stack((first, first + torch.arange(height).repeat_interleave(width), first))
    places[2] += torch.arange(width).repeat(height)
    return functional.pad(places, (1, 0))
