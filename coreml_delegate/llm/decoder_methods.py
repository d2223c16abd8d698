"""The methods of a decoder, as modules that ``torch.export`` captures.

``decode`` takes one token, ``prefill`` a chunk of tokens, padded at its end. Both take the position
of their first token and the caches, and return logits and the keys and values of their own tokens
only, which the caller writes into the caches: no step copies a cache out of the model. Layers with
recurrent states return the new states.

``forward`` with Core ML states holds the caches as buffers, and otherwise takes the inputs of
``prefill``. It is the only method, because methods share no state on a device; a single token is a
chunk of one token and padding.

The standard ``forward`` takes up to a chunk of tokens and their position. ExecuTorch's kernels pad
the tokens for one of the modules above, which Core ML computes in fixed sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.attention import Call
from coreml_delegate.llm.caches import (
    LayerCache,
    as_computed,
    as_stored,
    buffer_caches,
    input_caches,
    new_tensors,
)
from coreml_delegate.llm.candidates import Selection
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.partition import do_not_delegate


class _Method(nn.Module):
    """A method of a decoder.

    Args:
        decoder: The model.
        selection: Tokens to return in place of logits; None for logits.
        all_logits: Whether to return the logits [1, L, V] of every token.
    """

    def __init__(
        self, decoder: Decoder, selection: Selection | None = None, *, all_logits: bool = False
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.selection = selection
        self.all_logits = all_logits

    def _advance(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        caches: Sequence[torch.Tensor],
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        call, decoder, dtype = Call(), self.decoder, caches[0].dtype
        cache = input_caches(
            decoder.layers,
            as_computed(caches),
            position,
            call,
            length=tokens.shape[1],
            ordered=decoder.ordered,
            last=last,
        )
        logits = decoder.advance(tokens, position, cache, call, last, all_logits=self.all_logits)
        return (*_select(logits, self.selection), *as_stored(new_tensors(cache), dtype))


class Decode(_Method):
    """Method ``decode``: one token."""

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V], then each layer's new cache tensors.

        These are the keys and values [1, kv_heads, 1, head_dim] of the token, or the new states.

        Args:
            tokens: [1, 1], int64.
            position: [1], int64: number of tokens in the caches.
            caches: Cache tensors, layer by layer; keys and values are [1, kv_heads, S, head_dim].
        """
        return self._advance(tokens, position, caches)


class Prefill(_Method):
    """Method ``prefill``: a chunk of tokens."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V] of one token, or of every, then new cache tensors as ``Decode``.

        Args:
            tokens: [1, L], int64; padding after the last token is ignored.
            position: [1], int64: number of tokens in the caches.
            last: [1], int64: index of the last token.
            caches: As for ``Decode``.
        """
        return self._advance(tokens, position, caches, last)


class Append(_Method):
    """A chunk of tokens, written to the caches."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return logits [1, V] of one token, or of every, or the selection's results.

        Args:
            tokens: [1, L], int64; padding after the last token is ignored.
            position: [1], int64: number of tokens before.
            last: [1], int64: index of the last token.
            caches: Cache tensors, which the call changes; keys and values have room for L - 1
                tokens after the last of the context.
        """
        decoder = self.decoder
        cache = buffer_caches(decoder.layers, caches, position, length=tokens.shape[1], last=last)
        logits = decoder.advance(tokens, position, cache, Call(), last, all_logits=self.all_logits)
        return logits if self.selection is None else self.selection.select(logits)


class CacheBuffers(nn.Module):
    """Caches of a decoder as buffers, by kind and layer: ``keys_0``.

    Args:
        layers: Shapes of the cache of each layer.
        context: Number of tokens of the longest text.
        ahead: See ``LayerCache.rows``.
        suffix: End of the names.
        dtype: Of the caches.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        context: int,
        ahead: int = 0,
        *,
        suffix: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._names: list[str] = []
        for index, layer in enumerate(layers):
            for kind, empty in layer.empty(context, ahead, dtype).items():
                self._names.append(f"{kind}_{index}{suffix}")
                self.register_buffer(self._names[-1], empty)

    @property
    def caches(self) -> list[torch.Tensor]:
        """The caches, layer by layer."""
        return [self.get_buffer(name) for name in self._names]


class Forward(CacheBuffers):
    """Method ``forward``: a chunk of tokens; the caches are buffers.

    No token attends to keys of padding: the tokens at these positions overwrite them first. The
    caches have room for padding after the last token of the context.

    Args:
        length: Number of tokens of a chunk.
        context: Number of tokens of the longest text.
        selection: Tokens to return in place of logits; None for logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        length: int,
        context: int,
        *,
        selection: Selection | None = None,
        suffix: str = "",
    ) -> None:
        super().__init__(decoder.layers, context, length - 1, suffix=suffix)
        self.append = Append(decoder, selection)

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See ``Append``."""
        return self.append(tokens, position, last, self.caches)


class StandardForward(CacheBuffers):
    """Method ``forward`` of the standard layout: up to a chunk of tokens; the caches are buffers.

    With ``CacheKind.STATE`` Core ML writes the caches. With ``CacheKind.BUFFER`` it reads them and
    returns rows of the call's tokens, which ExecuTorch's kernels write.

    Args:
        decoder: The model.
        layout: Chunk, context and kind of the caches.
        suffix: End of the caches' names.
        cache_dtype: Of caches that ExecuTorch's kernels write.
        all_logits: Whether to return the logits of every token.

    Raises:
        OptionError: A chunk is longer than a sliding window whose rows ExecuTorch's kernels write.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        *,
        suffix: str = "",
        cache_dtype: torch.dtype = torch.float32,
        all_logits: bool = False,
    ) -> None:
        has_states = layout.cache is CacheKind.STATE
        ahead = layout.chunk - 1 if has_states else 0
        dtype = torch.float32 if has_states else cache_dtype
        super().__init__(decoder.layers, layout.context, ahead, suffix=suffix, dtype=dtype)
        self.chunk, self.context = layout.chunk, layout.context
        self._replaced = decoder.replaced
        self._all_logits = all_logits
        self.core_ml = self._core_ml_module(decoder, has_states=has_states)
        windows = (layer.window for layer in decoder.layers if layer.window)
        window = min(windows, default=layout.context)
        if not has_states and layout.chunk > window:
            # Two tokens of a call would have the same row.
            raise OptionError(
                "a chunk is longer than the model's sliding window",
                got=f"{layout.chunk} tokens",
                expected=f"at most {window}",
                remedy="Choose a smaller --prefill-chunk, or --cache state",
            )
        self.positions = Positions(layout.context)

    def forward(self, tokens: torch.Tensor, start_pos: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of the last token, or [1, n, V] of every token.

        Args:
            tokens: [1, n], int64, or embeddings [1, n, width], with n up to the chunk.
            start_pos: [1], int64: number of tokens before.
        """
        count = tokens.shape[1]
        padding = (0,) * (2 * (tokens.dim() - 2))
        chunk = functional.pad(tokens, (*padding, 0, self.chunk - count))
        last = torch.full((1,), count - 1)
        position = self.positions(start_pos, last)
        caches = self.caches
        if isinstance(self.core_ml, Append):
            logits = self.core_ml(chunk, position, last, caches)
        else:
            logits, *new = self._compute(chunk, position, last, caches)
            self._write(new, position, count)
        return logits[:, :count] if self._all_logits else logits

    def _core_ml_module(self, decoder: Decoder, *, has_states: bool) -> nn.Module:
        """Return the module that Core ML computes as a whole."""
        kind = Append if has_states else Prefill
        return kind(decoder, all_logits=self._all_logits)

    def _compute(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits and new cache tensors; see ``Prefill``."""
        return self.core_ml(tokens, position, last, caches)

    def _write(self, new: Sequence[torch.Tensor], position: torch.Tensor, count: int) -> None:
        """Write the rows of ``count`` tokens, and the states, to the caches."""
        caches = self.caches
        real = torch.arange(count)
        own = position + real
        rows = {cache.shape[2] for cache in caches}
        at = {size: own if size >= self.context else own % size for size in sorted(rows)}
        for number, (cache, values) in enumerate(zip(caches, new, strict=True)):
            if number in self._replaced:
                cache.copy_(values)
            else:
                # Not a slice, whose strides torch.export would fix if there is no padding; not an
                # assignment, which would drop the values' first dimension: the kernel needs it.
                indices = [None, None, at[cache.shape[2]]]
                real_values = values.index_select(2, real)
                torch.ops.aten.index_put_.default(cache, indices, real_values)


class StandardEmbedding(nn.Module):
    """Method ``token_embedding`` of the standard layout: up to a chunk of tokens.

    Args:
        embedding: From tokens to rows.
        chunk: Most tokens of a call.
    """

    def __init__(self, embedding: nn.Module, chunk: int) -> None:
        super().__init__()
        self.core_ml = embedding
        self.chunk = chunk

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, n, width] of tokens [1, n], int64."""
        count = tokens.shape[1]
        return self.core_ml(functional.pad(tokens, (0, self.chunk - count)))[:, :count]


class Positions(nn.Module):
    """The check that a call is in the context.

    Args:
        context: Number of tokens of the longest text.
    """

    def __init__(self, context: int) -> None:
        super().__init__()
        # A byte for each position, all zero: reading one fails if it is not in the context.
        self.register_buffer("table", torch.zeros(context, dtype=torch.int8))

    def forward(self, start: torch.Tensor, last: torch.Tensor | int = 0) -> torch.Tensor:
        """Return the position ``start`` [1], int64; fail if ``start + last`` is too large."""
        return start + self.get_buffer("table")[start + last]


CORE_ML = "core_ml"
"""Name of the submodule of a standard method that Core ML computes as a whole."""

BOUNDARY = "boundary"
"""Name of a submodule of that one whose calls stay on ExecuTorch's kernels, between delegates."""


def is_core_ml(path: str) -> bool:
    """Whether Core ML computes the calls of a module of a standard method.

    Args:
        path: Of the module, as ``core_ml.decoder``.
    """
    names = path.split(".")
    return CORE_ML in names and BOUNDARY not in names


def keep_sizes_static(
    program: ExportedProgram, reason: str = "the number of tokens varies"
) -> None:
    """Keep the calls around a standard method's Core ML module on ExecuTorch's kernels.

    Args:
        program: The method.
        reason: For the report.
    """
    for node in program.graph.nodes:
        if node.op == "call_function":
            paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            if not is_core_ml(".".join(paths)):
                do_not_delegate(node, reason)


def _select(logits: torch.Tensor, selection: Selection | None) -> tuple[torch.Tensor, ...]:
    return (logits,) if selection is None else selection.select(logits)
