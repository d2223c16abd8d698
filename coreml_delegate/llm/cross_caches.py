"""Cross-attention caches with the interface of ``transformers``: keys and values of a source.

The decoder's first call computes them from the encoder's result, once per source; ``encode``
returns them. Later calls pass them to the decoder as a filled cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from coreml_delegate.llm.attention import Segment
from coreml_delegate.patches.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
else:
    Cache, CacheLayerMixin = transformers().Cache, transformers().cache_utils.CacheLayerMixin
    EncoderDecoderCache = transformers().EncoderDecoderCache


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, of a source or of the only token of a text."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: ``update`` sets the tensors."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of the call's tokens and offset 0: a call sees its own tokens."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Store keys and values; return them."""
        del args, kwargs
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def empty_caches(layers: int) -> EncoderDecoderCache:
    """Return empty self-attention and cross-attention caches for the first call."""
    own, cross = (Cache(layers=[_Layer() for _ in range(layers)]) for _ in range(2))
    return EncoderDecoderCache(own, cross)


def cross_rows(cache: EncoderDecoderCache) -> list[torch.Tensor]:
    """Return the keys and values of the source, layer by layer."""
    layers: list[Any] = cache.cross_attention_cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def with_source(own: Cache, cross: Sequence[torch.Tensor]) -> EncoderDecoderCache:
    """Return the caches for later calls.

    Args:
        own: Self-attention cache of the decoder's text.
        cross: Keys and values of the source, layer by layer, each [1, heads, N, width].
    """
    layers: list[Any] = [_Layer() for _ in own.layers]
    for index, layer in enumerate(layers):
        layer.update(cross[2 * index], cross[2 * index + 1])
    return EncoderDecoderCache(own, Cache(layers=layers))
