"""Keys and values of a source, behind the interface of ``transformers``.

They are made once for each source, by the first call of a decoder that gets the encoder's result.
``encode`` takes them from there; in later calls the decoder finds them as if it had made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from coreml_delegate.llm.attention import Segment
from coreml_delegate.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
else:
    Cache, CacheLayerMixin = transformers().Cache, transformers().cache_utils.CacheLayerMixin
    EncoderDecoderCache = transformers().EncoderDecoderCache


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: of a source, or of the only token of a text."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is no storage of its own."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return that a call sees its own tokens."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens that are kept."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """Return that there is no bound."""
        return -1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Keep keys and values; return them."""
        del args, kwargs
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def empty_caches(layers: int) -> EncoderDecoderCache:
    """Return caches for the first call: of a source, and of one token.

    Args:
        layers: Number of layers of the decoder.
    """
    own, cross = (Cache(layers=[_Layer() for _ in range(layers)]) for _ in range(2))
    return EncoderDecoderCache(own, cross)


def cross_rows(cache: EncoderDecoderCache) -> list[torch.Tensor]:
    """Return the keys and values of the source that each layer in turn has made."""
    layers: list[Any] = cache.cross_attention_cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def with_source(own: Cache, cross: Sequence[torch.Tensor]) -> EncoderDecoderCache:
    """Return caches for later calls.

    Args:
        own: Of the decoder's text.
        cross: Keys and values of the source of each layer in turn, each [1, heads, N, width].
    """
    layers: list[Any] = [_Layer() for _ in own.layers]
    for index, layer in enumerate(layers):
        layer.update(cross[2 * index], cross[2 * index + 1])
    return EncoderDecoderCache(own, Cache(layers=layers))
