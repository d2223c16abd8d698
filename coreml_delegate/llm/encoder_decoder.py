"""An encoder-decoder model of ``transformers``, prepared for export.

As for a decoder, the modules stay those of ``transformers``, and the logits are compared before and
after. Cross-attention has a cache too: the keys and values of a source do not change while an
answer is generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import MASKED, Call, active_call
from coreml_delegate.llm.caches import (
    EncoderDecoderCache,
    LayerCache,
    as_computed,
    as_stored,
    buffer_caches,
    cross_rows,
    empty_caches,
    input_caches,
    new_tensors,
    read_layers,
    with_source,
)
from coreml_delegate.llm.decoder import require_equal, use_our_attention
from coreml_delegate.llm.positions import (
    tabulate_decoder_positions,
    tabulate_positions,
    tabulate_relative_biases,
)
from coreml_delegate.llm.samples import Reach, over_samples, prepare_samples
from coreml_delegate.llm.source import SourceKind
from coreml_delegate.llm.stored_weights import StoredWeight
from coreml_delegate.patches.third_party import transformers, wrap_errors

_PROBE_TOKENS = 3  # of the text whose logits are compared
_SPECIAL = 4  # number of first tokens that may be padding or an end
_POSITIONS = "decoder_position_ids"  # parameter of models with rotary positions
_HEAD_PADDING = "head_dim_padding"
_FRAMES_PER_POSITION = 2  # frames of a spectrogram that become one position of an encoder
_INPUTS = {
    "input_ids": SourceKind.TOKENS,
    "input_features": SourceKind.AUDIO,
    "input_values": SourceKind.SAMPLES,
}


def source_kind(name: str) -> SourceKind:
    """Return the kind of an encoder's source, by the name of its input in ``transformers``.

    Raises:
        LoweringError: The input is something else.
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
    """Results of the unchanged model for a source and a text of T tokens.

    Attributes:
        source: Tokens [1, n] or a spectrogram.
        outputs: Logits [1, T, V], caches and the encoder's result [1, N, width].
    """

    source: torch.Tensor
    outputs: Any


class EncoderDecoder(nn.Module):
    """Encoder-decoder model from a source and tokens to logits.

    Args:
        model: A sequence-to-sequence model of ``transformers`` in fp32 and eval mode; changed.
        context: Number of tokens of the longest answer, its start tokens included.
        source: Number of tokens of the longest source text, or of samples of the longest recording;
            None for a model that takes spectrograms, whose number of frames is in the
            configuration.

    Attributes:
        source: Number of tokens, samples or frames.
        layers: Shapes of the self-attention cache of each decoder layer.
        cross: Shapes of the cross-attention cache of each decoder layer.

    Raises:
        LoweringError: The model has an unsupported part, which the error names.
        OptionError: The context or the source is too short, or too long for the model.
    """

    def __init__(self, model: Any, *, context: int, source: int | None = None) -> None:
        super().__init__()
        for name, size in (("context", context), ("source", context if source is None else source)):
            if size < 2:
                raise OptionError(f"the {name} is too short", got=str(size), expected="2 or more")
        self.context = context
        self.model = model
        self.kind = source_kind(model.main_input_name)
        _refuse_experts(model)
        if source is None:  # frames of a spectrogram
            source = _FRAMES_PER_POSITION * int(model.config.max_source_positions)
        self.source = source
        self._refusal = f"{type(model).__name__} does not compute with caches of keys and values"
        with torch.no_grad(), wrap_errors(self._refusal, kind=LoweringError):
            trials = [self._run_trial(source) for source in self._sources()]
        self.layers, self.cross, self._encoded = _cache_shapes(trials[0].outputs)
        self._accepted = inspect.signature(model.forward).parameters
        self._reach: Reach | None = None
        self._prepare()
        with torch.no_grad(), wrap_errors(self._refusal, kind=LoweringError):
            for trial in trials:
                self._check(trial)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the model; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
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
        """Number of positions N of the encoder's result."""
        return self._encoded[1]

    def example(self) -> tuple[torch.Tensor, ...]:
        """Return example inputs of ``encode``: a source, and its length if it has padding."""
        if self.kind is SourceKind.AUDIO:
            return (self._sources()[0],)
        return (self._sources()[0], torch.tensor([self.source]))

    def encode(
        self, source: torch.Tensor, length: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of the source, layer by layer, each [1, heads, N, width].

        Args:
            source: Tokens [1, n], integers, samples [1, n], or a spectrogram [1, bins, frames].
            length: Number of tokens or samples without padding, [1]; None for a spectrogram.
        """
        call, cache = Call(), empty_caches(len(self.layers))
        call.positions = (torch.arange(1), torch.arange(1))
        call.source_length = length
        with active_call(call, self.model):
            self.model(
                **{self.model.main_input_name: source},
                **self._encoder_mask(length),
                decoder_input_ids=torch.zeros(1, 1, dtype=torch.long),
                cache=cache,
                use_cache=True,
            )
        return tuple(cross_rows(cache))

    def pack(self, cross: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return results of ``encode`` as one tensor [1, all heads, N, width].

        Raises:
            LoweringError: The layers have keys or values of different widths.
        """
        widths = {tensor.shape[3] for tensor in cross}
        if len(widths) > 1:
            raise LoweringError(
                "keys and values of the source have different widths, and are not one tensor",
                got=", ".join(map(str, sorted(widths))),
                remedy="Export with --layout methods",
            )
        return torch.cat(list(cross), dim=1)

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the results of ``encode`` from the tensor of ``pack``."""
        heads = [sizes[0] for layer in self.cross for sizes in (layer.keys, layer.values) if sizes]
        return list(packed.split(heads, dim=1))

    def advance(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        past: Sequence[torch.Tensor],
        cross: Sequence[torch.Tensor],
        length: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the logits [1, V] of one token, then the call's keys and values.

        Args:
            tokens: [1, L], integers.
            position: Position of the first token, [1], integers.
            past: Keys and values, layer by layer, each [1, kv_heads, S, width].
            cross: Results of ``encode``.
            length: The ``length`` passed to ``encode``.
            last: Index of the token whose logits are returned, [1]; None for a single token.
        """
        call, count = Call(), tokens.shape[1]
        own = input_caches(
            self.layers, as_computed(past), position, call, length=count, ordered=False
        )
        caches = with_source(own, as_computed(cross))
        logits = self._logits(tokens, position, caches, call, length)
        chosen = logits if last is None else logits.index_select(1, last)
        return (chosen[:, 0], *as_stored(new_tensors(own), past[0].dtype))

    def append(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        cross: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the logits [1, V] of one token, whose keys and values are written to the caches.

        Args:
            tokens: [1, 1], integers.
            position: Position of the token, [1], integers.
            buffers: Keys and values, layer by layer, each [1, kv_heads, S, width]; changed.
            cross: Results of ``encode``, of a spectrogram.
        """
        own = buffer_caches(self.layers, buffers, position, length=1)
        caches = with_source(own, as_computed(cross))
        return self._logits(tokens, position, caches, Call())[:, 0]

    def _logits(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        caches: EncoderDecoderCache,
        call: Call,
        length: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [1, L, V] of a call."""
        count = tokens.shape[1]
        layers: list[Any] = caches.self_attention_cache.layers
        _, columns = layers[0].get_mask_sizes(count)
        call.positions = (position + torch.arange(count), columns)
        # A placeholder: the caches have the keys and values of the encoder's result.
        encoded = torch.zeros(self._encoded)
        outputs = transformers().modeling_outputs.BaseModelOutput(last_hidden_state=encoded)
        mask = self._source_mask(length)
        options: dict[str, Any] = {}
        if self.kind is SourceKind.TOKENS:
            options["attention_mask"] = mask
        else:
            outputs.attention_mask = mask  # where Moonshine's decoder reads it
        if _POSITIONS in self._accepted:
            positions = position + torch.arange(count)
            # Padding after the end of the context has no position of its own.
            options[_POSITIONS] = positions.clamp(max=self.context - 1)[None]
        with active_call(call, self.model):
            return self.model(
                encoder_outputs=outputs,
                decoder_input_ids=tokens,
                cache=caches,
                use_cache=True,
                **options,
            ).logits

    def _source_mask(self, length: torch.Tensor | None) -> torch.Tensor | None:
        """Return the mask [1, 1, 1, positions] of a source's padding; None without padding."""
        if length is None:
            return None
        count = length if self._reach is None else self._reach.count(length)
        visible = torch.arange(self.positions) < count
        return torch.where(visible, 0.0, MASKED)[None, None, None]

    def _encoder_mask(self, length: torch.Tensor | None) -> dict[str, torch.Tensor]:
        mask = self._source_mask(length)
        if mask is None:
            return {}
        return {"attention_mask": mask if self._reach is None else over_samples(mask, self._reach)}

    def _sources(self) -> list[torch.Tensor]:
        """Return sources for trials: the longest, and if it may be shorter, half of it."""
        random = torch.Generator().manual_seed(0)
        if self.kind is SourceKind.AUDIO:
            bins = self.model.config.num_mel_bins
            return [torch.randn(1, bins, self.source, generator=random)]
        if self.kind is SourceKind.SAMPLES:
            samples = 0.1 * torch.randn(1, self.source, generator=random)
            return [samples, samples[:, : self.source // 2]]
        text = _probe_tokens(self.source, self.model.config.vocab_size)
        return [text, text[:, : self.source // 2]]

    def _run_trial(self, source: torch.Tensor) -> _Trial:
        outputs = self.model(
            **{self.model.main_input_name: source},
            decoder_input_ids=_probe_tokens(min(_PROBE_TOKENS, self.context), self.vocabulary),
            use_cache=True,
        )
        if not isinstance(getattr(outputs, "cache", None), EncoderDecoderCache):
            raise LoweringError(self._refusal)
        return _Trial(source, outputs)

    def _prepare(self) -> None:
        model = self.model
        if self.kind is SourceKind.SAMPLES:
            self._reach = prepare_samples(model.get_encoder())
        for module in model.modules():
            if hasattr(module, _HEAD_PADDING):  # for kernels of other processors
                setattr(module, _HEAD_PADDING, 0)
        tabulate_positions(model, max(self.context, self.positions))
        tabulate_relative_biases(model, context=self.context, source=self.positions)
        with wrap_errors(f"{type(model).__name__} has no {self.context} positions"):
            tabulate_decoder_positions(model, self.context)
        _use_gelu(model)
        _scale_residuals(model)
        use_our_attention(model)

    def _check(self, trial: _Trial) -> None:
        """Compare the logits of a text in two calls with the unchanged model's."""
        inputs: list[torch.Tensor] = [trial.source]
        length = None
        if self.kind is not SourceKind.AUDIO:
            length = torch.tensor([trial.source.shape[1]])
            padding = trial.source.new_zeros(1, self.source - trial.source.shape[1])
            inputs = [torch.cat((trial.source, padding), dim=1), length]
        cross = self.encode(*inputs)
        expected = trial.outputs.logits
        tokens = _probe_tokens(expected.shape[1], self.vocabulary)
        past = [empty for layer in self.layers for empty in layer.empty(self.context, 0).values()]
        start = 0
        for count in (tokens.shape[1] - 1, 1):
            logits, *new = self.advance(
                tokens[:, start : start + count],
                torch.tensor([start]),
                past,
                cross,
                length,
                torch.tensor([count - 1]),
            )
            start += count
            require_equal(self.model, logits, expected[:, start - 1])
            for rows, own in zip(past, new, strict=True):
                target = rows[:, :, start - count : start]
                target.copy_(own[:, :, : target.shape[2]])


def _refuse_experts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__:
            raise LoweringError(
                "mixtures of experts are not supported in encoder-decoder models",
                got=f"{type(module).__name__} at {name}",
            )


def _use_gelu(model: nn.Module) -> None:
    """Replace the decomposed tanh GELU of gated T5 by Core ML's operator.

    0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): coremltools does not recognise it after two
    linear layers, and the cube overflows in fp16.
    """
    decomposed = transformers().activations.NewGELUActivation
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, decomposed):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def _probe_tokens(length: int, vocabulary: int) -> torch.Tensor:
    """Return tokens [1, L] without the first few, which may be special tokens."""
    first = min(_SPECIAL, vocabulary - 1)
    return first + torch.arange(length)[None] % (vocabulary - first)


def _cache_shapes(
    outputs: Any,
) -> tuple[tuple[LayerCache, ...], tuple[LayerCache, ...], tuple[int, ...]]:
    """Return the shapes of both caches of each layer, and of the encoder's result.

    Raises:
        LoweringError: Some layers do not see the source, or their caches have other contents.
    """
    own, cross = (
        _initialized_layers(cache)
        for cache in (outputs.cache.self_attention_cache, outputs.cache.cross_attention_cache)
    )
    if len(own) != len(cross):
        raise LoweringError(
            "not every layer of the decoder sees the source", got=f"{len(cross)} of {len(own)}"
        )
    return own, cross, tuple(outputs.encoder_last_hidden_state.shape)


def _initialized_layers(cache: Any) -> tuple[LayerCache, ...]:
    """Return the shapes of the decoder's layers in a cache, which may have more layers."""
    used = type(cache)()
    used.layers = [layer for layer in cache.layers if layer.is_initialized]
    return read_layers(used)


# T5's residual stream exceeds 65504, the largest fp16 number, and its modules clamp it. Every layer
# reads it through an RMS norm, which is scale-invariant except for its epsilon: with the factor f
# of all terms and f^2 of epsilon the result is the same. f is a power of two, so it is exact in
# fp32.

_FACTOR = 1 / 16
"""sqrt(1e-6) times this, the root of the scaled epsilon, is still a normal fp16 number."""


class _ScaledEmbedding(nn.Module):
    """An embedding, whose weight may be shared, times ``_FACTOR``."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [..., width] of ``tokens`` [...]."""
        return self.embedding(tokens) * _FACTOR


def _scale_residuals(model: Any) -> None:
    """Scale the residual stream of T5 in place; other models are not changed."""
    for stack in (model.get_encoder(), model.get_decoder()):
        if not all(hasattr(stack, name) for name in ("block", "embed_tokens", "final_layer_norm")):
            return
        stack.embed_tokens = _ScaledEmbedding(stack.embed_tokens)
        for module in stack.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= _FACTOR**2
            if (linear := _branch_layer(module)) is not None:
                linear.weight = nn.Parameter(_scaled_weight(linear.weight), requires_grad=False)


def _branch_layer(module: Any) -> Any:
    """Return the linear layer that scales with a module's residual branch, or None.

    For a gated layer wo(gelu(wi_0 x) * wi_1 x) it is wi_1, because the product may overflow too.
    """
    if hasattr(module, "wo"):
        return getattr(module, "wi_1", module.wo)
    return module.o if all(hasattr(module, name) for name in "qkvo") else None


def _scaled_weight(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, StoredWeight):
        return StoredWeight(partial(_read_scaled, weight), weight.shape)
    return weight * _FACTOR


def _read_scaled(weight: StoredWeight) -> torch.Tensor:
    return weight.read() * _FACTOR
