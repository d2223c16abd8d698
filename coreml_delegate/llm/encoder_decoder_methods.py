"""The methods of an encoder-decoder model: encode a source once, then decode tokens.

``encode`` takes a source, and returns its keys and values for each layer of the decoder.
``decode`` and ``prefill`` take these and the caches, and otherwise equal a decoder's methods.

In the standard layout ``encoder`` returns these keys and values as one tensor, because ExecuTorch's
``AsrRunner`` passes one; ``text_decoder`` holds the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.caches import as_stored
from coreml_delegate.llm.decoder_methods import CacheBuffers, Positions, keep_sizes_static
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.export import drop_unused_buffers
from coreml_delegate.llm.layout import (
    DECODE,
    ENCODE,
    ENCODER,
    PREFILL,
    TEXT_DECODER,
    CacheKind,
    Layout,
)
from coreml_delegate.llm.stored_weights import read_weights
from coreml_delegate.patches.third_party import wrap_errors

Tensors = Sequence[torch.Tensor]

_ATEN: Any = torch.ops.aten
_WITHOUT_EFFECT = (_ATEN._assert_tensor_metadata.default, _ATEN.dropout.default)
"""Operators without effect in eval mode, which dead code elimination would keep."""


def export_encoder_decoder(
    model: EncoderDecoder, layout: Layout, *, cache_dtype: torch.dtype = torch.float32
) -> dict[str, ExportedProgram]:
    """Export the methods in ATen dialect; they share the model's weights.

    Args:
        model: In eval mode; its weights are read into memory.
        layout: Kind of the caches, chunk and context.
        cache_dtype: Of caches that are not Core ML states, and of the results of the encoder.

    Raises:
        LoweringError: ``torch.export`` cannot capture the model.
    """
    read_weights(model)
    source, *length = model.example()
    # Two tensors, because torch.export merges inputs that are the same object.
    position, last = torch.tensor([0]), torch.tensor([0])
    empty = [layer.empty(layout.context, 0, cache_dtype) for layer in model.layers]
    caches = [cache for tensors in empty for cache in tensors.values()]
    token, chunk = ((torch.arange(n) % model.vocabulary)[None] for n in (1, layout.chunk))
    empty_cross = [layer.empty(model.positions, 0, cache_dtype) for layer in model.cross]
    cross = [cache for tensors in empty_cross for cache in tensors.values()]
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        if layout.standard:
            encoder = StandardEncoder(model, cache_dtype).eval()
            decoder = StandardTextDecoder(model, layout, cache_dtype).eval()
            program = torch.export.export(decoder, (token, encoder(source), position))
            keep_sizes_static(program, "it checks the position or writes a cache")
            encoding = torch.export.export(encoder, (source,))
            return {ENCODER: _prune(encoding), TEXT_DECODER: _prune(program)}
        methods: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
            ENCODE: (Encode(model, cache_dtype), (source, *length)),
            DECODE: (Decode(model), (token, position, caches, cross, *length)),
            PREFILL: (Prefill(model), (chunk, position, last, caches, cross, *length)),
        }
        return {
            name: _prune(torch.export.export(module.eval(), inputs))
            for name, (module, inputs) in methods.items()
        }


def _prune(program: ExportedProgram) -> ExportedProgram:
    """Remove dead code and unused buffers from the program, in place; return it.

    In ``encode`` the decoder's layers are dead code except for their keys and values. Their
    weights, and tables of the other stack, would be stored with the method.
    """
    graph = program.graph
    graph.eliminate_dead_code(lambda node: node.is_impure() and node.target not in _WITHOUT_EFFECT)
    drop_unused_buffers(program)
    return program


class _Method(nn.Module):
    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model


class _Encoding(_Method):
    """A method that encodes a source.

    Args:
        model: The model.
        dtype: Of the results.
    """

    def __init__(self, model: EncoderDecoder, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    def encode(
        self, source: torch.Tensor, length: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the results of ``EncoderDecoder.encode``."""
        return as_stored(self.model.encode(source, length), self._dtype)


class Encode(_Encoding):
    """Method ``encode``: a source."""

    def forward(
        self, source: torch.Tensor, length: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of the source, layer by layer, each [1, heads, N, width].

        Args:
            source: Tokens [1, N], int64, or a spectrogram [1, bins, frames].
            length: Number of tokens without padding, [1], int64; None for a spectrogram.
        """
        return self.encode(source, length)


class Decode(_Method):
    """Method ``decode``: one token."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        caches: Tensors,
        cross: Tensors,
        length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V], then keys and values [1, heads, 1, width] of each layer.

        Args:
            tokens: [1, 1], int64.
            position: [1], int64: number of tokens in the caches.
            caches: Keys and values, layer by layer, each [1, heads, S, width].
            cross: Results of ``encode``.
            length: The ``length`` passed to ``encode``.
        """
        return self.model.advance(tokens, position, caches, cross, length)


class Prefill(_Method):
    """Method ``prefill``: a chunk of tokens."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Tensors,
        cross: Tensors,
        length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V] of one token, and keys and values [1, heads, L, width].

        Args:
            tokens: [1, L], int64; padding after the last token is ignored.
            position: [1], int64: number of tokens in the caches.
            last: [1], int64: index of the last token.
            caches: As for ``Decode``.
            cross: Results of ``encode``.
            length: The ``length`` passed to ``encode``.
        """
        return self.model.advance(tokens, position, caches, cross, length, last)


class StandardEncoder(_Encoding):
    """Method ``encoder`` of the standard layout: a spectrogram."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the keys and values of all layers, [1, tensors * heads, N, width].

        Args:
            features: [1, bins, frames].
        """
        return self.model.pack(self.encode(features))


class StandardTextDecoder(CacheBuffers):
    """Method ``text_decoder`` of the standard layout: one token; the caches are buffers.

    Args:
        model: The model.
        layout: Context and kind of the caches; see ``StandardForward``.
        cache_dtype: Of caches that ExecuTorch's kernels write.
    """

    def __init__(self, model: EncoderDecoder, layout: Layout, cache_dtype: torch.dtype) -> None:
        has_states = layout.cache is CacheKind.STATE
        dtype = torch.float32 if has_states else cache_dtype
        super().__init__(model.layers, layout.context, dtype=dtype)
        self.positions = Positions(layout.context)
        self.core_ml = _AppendToken(model) if has_states else _AdvanceToken(model)

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, cache_position: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [1, V].

        Args:
            tokens: [1, 1], int64.
            encoded: Result of ``encoder``.
            cache_position: [1], int64: number of tokens before.
        """
        position = self.positions(cache_position)
        caches = self.caches
        if isinstance(self.core_ml, _AppendToken):
            return self.core_ml(tokens, encoded, position, caches)
        logits, *new = self.core_ml(tokens, encoded, position, caches)
        for cache, values in zip(caches, new, strict=True):
            torch.ops.aten.index_put_.default(cache, [None, None, position], values)
        return logits


class _AdvanceToken(_Method):
    """A token; the caches are read, and not written."""

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, position: torch.Tensor, caches: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V], then keys and values [1, heads, 1, width] of each layer."""
        return self.model.advance(tokens, position, caches, self.model.unpack(encoded))


class _AppendToken(_Method):
    """A token, written to the caches."""

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, position: torch.Tensor, caches: Tensors
    ) -> torch.Tensor:
        """Return logits [1, V]."""
        return self.model.append(tokens, position, caches, self.model.unpack(encoded))
