"""The methods of an exported decoder: what each takes and returns.

``decode`` takes one token, ``prefill`` a chunk of them, padded at its end. Both take the position
of their first token and the caches, and return logits and the keys and values of their own tokens
alone, which the caller writes into the caches: a step thus moves no cache out of the model.

``forward`` keeps the caches itself, as buffers that become states, and else takes what ``prefill``
does. It is the only method, because methods share no state on a device; a single token is a chunk
with one token in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from coreml_delegate.scripts.llm.decoder import MASKED, Decoder, Segment


class PassedCaches:
    """Caches that came with the call; what is new is collected to be returned.

    Args:
        past: Keys and values of each layer in turn, each [1, kv_heads, S, head_dim].
    """

    def __init__(self, past: Sequence[torch.Tensor]) -> None:
        self._past = past
        self.new: list[torch.Tensor] = []

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """See ``Memory``."""
        self.new += [keys, values]
        return (self._past[2 * layer], self._past[2 * layer + 1]), (keys, values)


class _Method(nn.Module):
    causal: torch.Tensor

    def __init__(self, decoder: Decoder, length: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.register_buffer(
            "causal", torch.full((length, length), MASKED).triu(1), persistent=False
        )

    def _advance(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        length, context = tokens.shape[1], caches[0].shape[2]
        empty = torch.arange(context) >= position
        past = (empty.to(self.causal.dtype) * MASKED).unsqueeze(0).expand(length, context)
        memory = PassedCaches(caches)
        hidden = self.decoder.hidden(
            tokens,
            position + torch.arange(length),
            torch.cat((past, self.causal), dim=-1),
            memory,
        )
        return hidden, memory.new


class Decode(_Method):
    """One token."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, 1)

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Logits [1, V], then keys and values [1, kv_heads, 1, head_dim] of each layer.

        Args:
            tokens: [1, 1], int64.
            position: [1], int64: how many tokens the caches hold.
            caches: Keys and values of each layer in turn, each [1, kv_heads, S, head_dim].
        """
        hidden, new = self._advance(tokens, position, caches)
        return (self.decoder.logits(hidden[:, 0]), *new)


class Prefill(_Method):
    """A chunk of tokens."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Logits [1, V] of one token, then keys and values [1, kv_heads, L, head_dim] of all.

        Args:
            tokens: [1, L], int64; what follows the last token is ignored.
            position: [1], int64: how many tokens the caches hold.
            last: [1], int64: index of the last token.
            caches: As for ``Decode``.
        """
        hidden, new = self._advance(tokens, position, caches)
        return (self.decoder.logits(hidden.index_select(1, last)[:, 0]), *new)


class KeptCaches:
    """Caches that a module keeps; what is new is written at its positions.

    Args:
        module: Has the buffers.
        positions: [L], integers.
    """

    def __init__(self, module: Forward, positions: torch.Tensor) -> None:
        self._module = module
        self._positions = positions

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """See ``Memory``."""
        caches = self._module.caches(layer)
        for cache, new in zip(caches, (keys, values), strict=True):
            cache[:, :, self._positions] = new
        return (caches,)


class Forward(nn.Module):
    """A chunk of tokens whose keys and values stay.

    What the padding writes into the caches is never seen: the tokens that come at its positions
    write there first. The caches have room for padding behind the last token of the context.
    """

    def __init__(self, decoder: Decoder, length: int, context: int) -> None:
        super().__init__()
        self.decoder = decoder
        settings = decoder.settings
        shape = (1, settings.kv_heads, context + length - 1, settings.head_dim)
        for layer in range(settings.layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{layer}", torch.zeros(shape))

    def caches(self, layer: int) -> Segment:
        """Keys and values of a layer."""
        return self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}")

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Logits [1, V] of one token.

        Args:
            tokens: [1, L], int64; what follows the last token is ignored.
            position: [1], int64: how many tokens came before.
            last: [1], int64: index of the last token.
        """
        positions = position + torch.arange(tokens.shape[1])
        keys, _ = self.caches(0)
        later = torch.arange(keys.shape[2]) > positions.unsqueeze(1)
        mask = later.to(keys.dtype) * MASKED
        hidden = self.decoder.hidden(tokens, positions, mask, KeptCaches(self, positions))
        return self.decoder.logits(hidden.index_select(1, last)[:, 0])
