"""An encoder-decoder model of ``transformers``, made ready for export.

As for a decoder, the modules are those of ``transformers``, and what they compute is compared with
what they computed before. Attention between the decoder and the source has a cache too: the keys
and values that the decoder's layers make of a source do not change while an answer is generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import MASKED, Call, calling
from coreml_delegate.llm.caches import LayerCache, new_tensors, passed_caches, read_layers
from coreml_delegate.llm.cross_caches import (
    EncoderDecoderCache,
    cross_rows,
    empty_caches,
    with_source,
)
from coreml_delegate.llm.decoder import require_equal, use_our_attention
from coreml_delegate.llm.norms import make_norms_safe
from coreml_delegate.llm.position_tables import tabulate_decoder_positions, tabulate_distances
from coreml_delegate.llm.residuals import scale_residuals
from coreml_delegate.llm.source import SourceKind
from coreml_delegate.third_party import transformers, wrap_errors

_TRIED = 3  # tokens of the text that is computed before and after
_SPECIAL = 4  # tokens that may be padding or an end
_HALVES = 2  # frames of a spectrogram that become one position of an encoder
_INPUTS = {"input_ids": SourceKind.TOKENS, "input_features": SourceKind.AUDIO}


def source_kind(name: str) -> SourceKind:
    """Return what an encoder takes, by the name of its input in ``transformers``.

    Raises:
        LoweringError: Neither tokens nor a spectrogram.
    """
    if name not in _INPUTS:
        raise LoweringError(
            "the encoder takes a source that is not supported",
            got=name,
            expected=" or ".join(_INPUTS),
        )
    return _INPUTS[name]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A source, and what the unchanged model makes of it and of a text of T tokens.

    Attributes:
        source: Tokens [1, n] or a spectrogram.
        made: Logits [1, T, V], caches and the encoder's result [1, N, width].
    """

    source: torch.Tensor
    made: Any


class EncoderDecoder(nn.Module):
    """Encoder-decoder model from a source and tokens to logits.

    Args:
        model: A sequence-to-sequence model of ``transformers`` in fp32 and eval mode; changed.
        context: Number of tokens of the longest answer, its beginning included.
        source: Number of tokens of the longest source text; None for a model that takes
            spectrograms, whose number of frames the configuration says.
        safe_norms: Compute so that fp16 does not overflow; a norm costs a few operations more.

    Attributes:
        model: The model.
        kind: What the encoder takes.
        context: Number of tokens of the longest answer.
        source: Number of tokens or frames.
        layers: What each layer of the decoder keeps of an answer's token.
        cross: What each layer of the decoder keeps of a source's position.

    Raises:
        LoweringError: The model has a part that is not supported; the error names it.
        OptionError: The context or the source is too short, or too long for the model.
    """

    def __init__(
        self, model: Any, *, context: int, source: int | None = None, safe_norms: bool = False
    ) -> None:
        super().__init__()
        for what, size in (("context", context), ("source", context if source is None else source)):
            if size < 2:
                raise OptionError(f"the {what} is too short", got=str(size), expected="2 or more")
        self.context = context
        self.model = model
        self.kind = source_kind(model.main_input_name)
        _refuse_experts(model)
        self.source = _frames(model.config) if source is None else source
        self._refusal = f"{type(model).__name__} does not compute with caches of keys and values"
        with torch.no_grad(), wrap_errors(self._refusal, kind=LoweringError):
            tried = [self._try(source) for source in self._sources()]
        self.layers, self.cross, self._encoded = _sizes(tried[0].made)
        self._prepare(safe_norms)
        with torch.no_grad(), wrap_errors(self._refusal, kind=LoweringError):
            for trial in tried:
                self._check(trial)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.model.config.get_text_config(decoder=True).vocab_size

    @property
    def bos(self) -> int | None:
        """Token that begins a source text, or None."""
        bos = getattr(self.model.config, "bos_token_id", None)
        return bos if self.kind is SourceKind.TOKENS else None

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that compute with tokens or their source, by name."""
        yield from self.named_modules()

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.model.get_input_embeddings()

    @property
    def positions(self) -> int:
        """Number of positions N that the encoder makes of a source."""
        return self._encoded[1]

    def example(self) -> tuple[torch.Tensor, ...]:
        """Return inputs of ``encode``: a source, and of tokens their number."""
        if self.kind is SourceKind.AUDIO:
            return (self._sources()[0],)
        return (self._sources()[0], torch.tensor([self.source]))

    def encode(
        self, source: torch.Tensor, length: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of the source of each layer in turn, [1, heads, N, width].

        Args:
            source: Tokens [1, N], integers, or a spectrogram [1, bins, frames].
            length: How many of the tokens are no padding, [1]; None for a spectrogram.
        """
        call, cache = Call(), empty_caches(len(self.layers))
        call.positions = (torch.arange(1), torch.arange(1))
        with calling(call, self.model):
            self.model(
                **{self.model.main_input_name: source},
                **self._source_mask(length),
                decoder_input_ids=torch.zeros(1, 1, dtype=torch.long),
                cache=cache,
                use_cache=True,
            )
        return tuple(cross_rows(cache))

    def advance(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        past: Sequence[torch.Tensor],
        cross: Sequence[torch.Tensor],
        length: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the logits [1, V] of one token, then the call's own keys and values.

        Args:
            tokens: [1, L], integers.
            position: Position of the first, [1], integers.
            past: Keys and values of each layer in turn, each [1, kv_heads, S, width].
            cross: What ``encode`` returns.
            length: As ``encode`` got it.
            last: Index of the token, [1]; None if there is one.
        """
        call, count = Call(), tokens.shape[1]
        own = passed_caches(self.layers, past, position, call, length=count, placed=False)
        layers: list[Any] = own.layers
        _, columns = layers[0].get_mask_sizes(count)
        call.positions = (position + torch.arange(count), columns)
        # Whose values nobody reads, because the caches have what is made of them.
        encoded = torch.zeros(self._encoded)
        with calling(call, self.model):
            made = self.model(
                encoder_outputs=(encoded,),
                **self._source_mask(length),
                decoder_input_ids=tokens,
                cache=with_source(own, cross),
                use_cache=True,
            )
        logits = made.logits if last is None else made.logits.index_select(1, last)
        return (logits[:, 0], *new_tensors(own))

    def _source_mask(self, length: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if length is None:
            return {}
        seen = torch.arange(self.source) < length
        return {"attention_mask": torch.where(seen, 0.0, MASKED)[None, None, None]}

    def _sources(self) -> list[torch.Tensor]:
        """Return sources to try: the longest, and of texts one of half its length."""
        if self.kind is SourceKind.AUDIO:
            random = torch.Generator().manual_seed(0)
            bins = self.model.config.num_mel_bins
            return [torch.randn(1, bins, self.source, generator=random)]
        text = _text(self.source, self.model.config.vocab_size)
        return [text, text[:, : self.source // 2]]

    def _try(self, source: torch.Tensor) -> _Trial:
        made = self.model(
            **{self.model.main_input_name: source},
            decoder_input_ids=_text(min(_TRIED, self.context), self.vocabulary),
            use_cache=True,
        )
        if not isinstance(getattr(made, "cache", None), EncoderDecoderCache):
            raise LoweringError(self._refusal)
        return _Trial(source, made)

    def _prepare(self, safe_norms: bool) -> None:
        model = self.model
        tabulate_distances(model, context=self.context, source=self.positions)
        with wrap_errors(f"{type(model).__name__} has no {self.context} positions"):
            tabulate_decoder_positions(model, self.context)
        _use_gelu(model)
        if safe_norms:
            make_norms_safe(model)
            scale_residuals(model)
        use_our_attention(model)

    def _check(self, trial: _Trial) -> None:
        """Compare the logits of a text in two calls with those of the unchanged model."""
        given: list[torch.Tensor] = [trial.source]
        length = None
        if self.kind is SourceKind.TOKENS:
            length = torch.tensor([trial.source.shape[1]])
            padding = torch.zeros(1, self.source - trial.source.shape[1], dtype=torch.long)
            given = [torch.cat((trial.source, padding), dim=1), length]
        cross = self.encode(*given)
        logits = trial.made.logits
        tokens = _text(logits.shape[1], self.vocabulary)
        past = [empty for layer in self.layers for empty in layer.empty(self.context, 0).values()]
        start = 0
        for count in (tokens.shape[1] - 1, 1):
            found, *new = self.advance(
                tokens[:, start : start + count],
                torch.tensor([start]),
                past,
                cross,
                length,
                torch.tensor([count - 1]),
            )
            start += count
            require_equal(self.model, found, logits[:, start - 1])
            for rows, own in zip(past, new, strict=True):
                free = rows[:, :, start - count : start]
                free.copy_(own[:, :, : free.shape[2]])


def _refuse_experts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__:
            raise LoweringError(
                "mixtures of experts are not supported in encoder-decoder models",
                got=f"{type(module).__name__} at {name}",
            )


def _use_gelu(model: nn.Module) -> None:
    """Replace a GELU that is written out, in gated T5, by the operator that Core ML has.

    Coremltools does not recognise it behind two linear layers, and its cube overflows in fp16.
    """
    written_out = transformers().activations.NewGELUActivation
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, written_out):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def _text(length: int, vocabulary: int) -> torch.Tensor:
    """Return tokens [1, L], without the first few, which have meanings of their own."""
    first = min(_SPECIAL, vocabulary - 1)
    return first + torch.arange(length)[None] % (vocabulary - first)


def _sizes(
    made: Any,
) -> tuple[tuple[LayerCache, ...], tuple[LayerCache, ...], tuple[int, ...]]:
    """Return what layers keep of a token and of a source, and the shape of the encoder's result.

    Raises:
        LoweringError: Some layers do not see the source, or keep something else.
    """
    own, cross = (
        _layers(cache)
        for cache in (made.cache.self_attention_cache, made.cache.cross_attention_cache)
    )
    if len(own) != len(cross):
        raise LoweringError(
            "not every layer of the decoder sees the source", got=f"{len(cross)} of {len(own)}"
        )
    return own, cross, tuple(made.encoder_last_hidden_state.shape)


def _layers(cache: Any) -> tuple[LayerCache, ...]:
    """Return what each layer keeps; caches may have room for layers that the decoder has not."""
    used = type(cache)()
    used.layers = [layer for layer in cache.layers if layer.is_initialized]
    return read_layers(used)


def _frames(config: Any) -> int:
    """Return the number of frames of a spectrogram."""
    return _HALVES * config.max_source_positions
