"""A language model in a form for the neural engine.

The layers and the head run in Core ML on tensors of fixed sizes with the channels first
(``channels_first.py``), attention one head at a time, the head in parts of at most 16,384 outputs.
Every input is a float: token embeddings, masks, cosines and sines, and the caches, which are only
read. ExecuTorch's kernels compute these inputs, write the new rows, and join the logits.

The code of the layers is that of ``transformers``. The logits are compared with those of the
unchanged model, as for every ``Decoder``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import (
    Call,
    active_call,
    check_arguments,
    current_call,
    mask,
)
from coreml_delegate.llm.caches import (
    LayerCache,
    UnlimitedLayer,
    as_computed,
    as_stored,
    new_tensors,
    past_positions,
)
from coreml_delegate.llm.channels_first import ChannelsFirst, Operand, Parts
from coreml_delegate.llm.decoder import Decoder, require_equal, use_our_attention
from coreml_delegate.llm.decoder_methods import StandardForward
from coreml_delegate.llm.experts import Experts
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.positions import RotaryTables
from coreml_delegate.llm.states import (
    RECURRENCE,
    Name,
    Span,
    State,
    StateLayer,
    take_states,
)
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.patches.third_party import transformers, wrap_errors
from coreml_delegate.quantization.configs import PALETTE_OUTPUTS
from coreml_delegate.targets import LARGEST_DIMENSION

NAME = "coreml_delegate_neural_engine"
"""Name of the functions in the interfaces of ``transformers``."""

_HEADS = (0, 1, 3, 2)  # [B, heads, L, width] of [B, heads, width, L]
_PROBE_CHUNK = 3
_REMEDY = "Export it without --for"

Rotation = tuple[int, str | None]
"""Number of a rotary embedding in the model, and a layer type."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of a model.

    Attributes:
        function: Whether a token sees another, by their positions.
        rows: Number of rows of the caches that it covers.
    """

    function: Callable[..., torch.Tensor]
    rows: int

    def compute(self, position: torch.Tensor, length: int, context: int) -> torch.Tensor:
        """Return the additive mask [1, 1, L, rows + L] of a call.

        Args:
            position: Number of tokens before the call, [1], int64.
            length: Number L of the call's tokens.
            context: Number of tokens of the longest text.
        """
        past = past_positions(self.rows, position, ring=self.rows < context)
        columns = torch.cat((past, position + torch.arange(length)))
        return mask(1, length, columns.shape[0], position, columns, mask_function=self.function)


class Inputs(Call):
    """The inputs of one call, besides embeddings and caches.

    Args:
        masks: [1, 1, L, S] each, in the order in which the model asks for masks.
        rotations: Cosines and sines, each [1, 1, L, R].
        last: 1 for the token whose logits are wanted, else 0: [1, 1, 1, L].
    """

    def __init__(
        self,
        masks: Iterator[torch.Tensor],
        rotations: Mapping[Rotation, Sequence[torch.Tensor]],
        last: torch.Tensor,
    ) -> None:
        super().__init__()
        self.last = last
        self._masks = masks
        self._rotations = {
            key: [ChannelsFirst(rows.transpose(2, 3), (0, 3, 2)) for rows in pair]
            for key, pair in rotations.items()
        }

    def next_mask(self, asked: Mask) -> torch.Tensor:
        """Return the next mask."""
        del asked
        return next(self._masks)

    def rotation(self, key: Rotation) -> list[ChannelsFirst]:
        """Return cosines and sines [1, L, R]."""
        return self._rotations[key]


class _FirstCall(Inputs):
    """A call at position 0, which records the masks that the model asks for."""

    def __init__(self, length: int, context: int, *args: Any) -> None:
        super().__init__(iter(()), *args)
        self.asked: list[Mask] = []
        self._size = length, context

    def next_mask(self, asked: Mask) -> torch.Tensor:
        """Compute and record a mask."""
        self.asked.append(asked)
        return asked.compute(torch.tensor([0]), *self._size)


def given_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Return the mask of the current call; see ``attention.mask``."""
    del batch_size, args, options
    call: Any = current_call()
    return call.next_mask(Mask(mask_function, kv_length - q_length))


def attend_by_heads(
    module: nn.Module,
    query: ChannelsFirst,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[ChannelsFirst, None]:
    """Attention one head at a time: softmax(softcap tanh(scaling Q K^T / softcap) + mask) V.

    Args:
        module: The module that calls the function.
        query: [B, heads, L, width].
        key: [B, kv_heads, S, width].
        value: [B, kv_heads, S, width of a value].
        attention_mask: [1, 1, L, S], added to the scores; None if all tokens are visible.
        scaling: Factor of the scores; None for ``width ** -0.5``.
        softcap: Bound of the scores before the mask, or None.
        s_aux: Attention sinks: score of a column without a token, [heads], or None.
        options: Further arguments, which must not affect the result.

    Returns:
        [B, L, heads, width of a value], and no weights.

    Raises:
        LoweringError: The model passes an argument that is not implemented.
    """
    check_arguments(module, options)
    heads, width = query.shape[1], query.shape[3]
    queries = query.in_order(_HEADS) * (width**-0.5 if scaling is None else scaling)
    keys, values = key.split(1, dim=1), value.split(1, dim=1)
    group = heads // len(keys)
    results: list[torch.Tensor] = []
    for head, own in enumerate(queries.split(1, dim=1)):
        scores = own.transpose(2, 3) @ keys[head // group].transpose(2, 3)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        columns = scores.shape[3]
        if s_aux is not None:
            sink = s_aux[head].reshape(1, 1, 1, 1).expand(1, 1, scores.shape[2], 1)
            scores = torch.cat((scores, sink), dim=3)
        weights = torch.softmax(scores, dim=3)[..., :columns]
        results.append(values[head // group].transpose(2, 3) @ weights.transpose(2, 3))
    return ChannelsFirst.of_heads(torch.cat(results, dim=1)), None


_library = transformers()
_library.AttentionInterface.register(NAME, attend_by_heads)
_library.AttentionMaskInterface.register(NAME, given_mask)


class _Positions(Operand):
    """Positions of a call's tokens, whose use is refused.

    Core ML has them only as cosines, sines and masks.
    """

    @classmethod
    def apply(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuse the use.

        Raises:
            LoweringError: Always.
        """
        del args, kwargs
        raise LoweringError(
            "the model computes with positions besides rotary embeddings and masks",
            got=getattr(function, "__name__", str(function)),
            remedy=_REMEDY,
        )


# Modules in place of others


class GivenRotation(nn.Module):
    """Rotary embedding by the cosines and sines of the current call.

    Args:
        number: Number of the embedding in the model.
        config: Configuration of the embedding, which the model's code reads.
    """

    def __init__(self, number: int, config: Any) -> None:
        super().__init__()
        self.config = config
        self._number = number

    def forward(
        self, x: Any, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> list[ChannelsFirst]:
        """Return cosines and sines [1, L, R]."""
        del x, position_ids
        call: Any = current_call()
        return call.rotation((self._number, layer_type))


class PartialHead(nn.Module):
    """The head for one token, in parts of at most 16,384 outputs.

    The outputs of the last part are filled up to a multiple of 16 with zeros, so that palettes of
    16 outputs divide them.

    Args:
        linear: The projection to logits, with weight [V, C].
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        missing = -linear.weight.shape[0] % PALETTE_OUTPUTS
        parameters = [(linear.weight, linear.weight.new_zeros(missing, linear.weight.shape[1]))]
        if linear.bias is not None:
            parameters.append((linear.bias, linear.bias.new_zeros(missing)))
        for start in range(0, linear.weight.shape[0], LARGEST_DIMENSION):
            stop = start + LARGEST_DIMENSION
            part = nn.Linear(1, 1, bias=False, device="meta")
            for name, (rows, zeros) in zip(("weight", "bias"), parameters, strict=False):
                own = rows[start:stop]
                if missing and stop >= rows.shape[0]:
                    own = torch.cat((own, zeros))
                setattr(part, name, nn.Parameter(own, requires_grad=False))
            self.parts.append(part)

    def forward(self, x: ChannelsFirst) -> Parts:
        """Return the logits [1, V] of one token of [1, L, C], and zeros behind them."""
        call: Any = current_call()
        last = ChannelsFirst.of_channels((x.data * call.last).sum(3, keepdim=True))
        return Parts([part(last).data.flatten(1) for part in self.parts])


# Caches


class _Rows(UnlimitedLayer):
    """Keys and values of one layer during one call; the rows of earlier tokens are inputs."""

    def __init__(self, past: Sequence[torch.Tensor], window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self._past = past
        self.new: tuple[torch.Tensor, ...] | None = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of the scores, and no offset: masks are inputs."""
        return self._past[0].shape[2] + query_length, 0

    def get_seq_length(self) -> Any:
        """Return an operand that refuses its use."""
        return _Positions()

    def update(
        self, key_states: ChannelsFirst, value_states: ChannelsFirst, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Store the call's rows; return all keys and values [1, kv_heads, S, width]."""
        del args, kwargs
        self.new = tuple(rows.tensor() for rows in (key_states, value_states))
        return tuple(torch.cat(pair, dim=2) for pair in zip(self._past, self.new, strict=True))


class _States(StateLayer):
    """States of one layer during one call, as [1, inputs, C]; zero at the beginning of a text."""

    def past(self, name: Name) -> Any:
        """Return the state [1, C, inputs] before the call."""
        return ChannelsFirst(self._states[name].transpose(1, 2).unsqueeze(2), (0, 1, 3))


class _Ends(Span):
    """The end of a call's tokens, as matrices that select inputs of convolutions.

    Args:
        ends: Matrices [1, 1, count + L, count] by count, of zeros and ones.
    """

    def __init__(self, ends: Mapping[int, torch.Tensor]) -> None:
        self._ends = ends

    def ending(self, inputs: Any, count: int) -> torch.Tensor:
        """Return the inputs [1, count, C] that end with the last token; see ``Span``."""
        return (inputs.data @ self._ends[count])[:, :, 0].transpose(1, 2)


def end_matrix(last: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Return the matrix [1, 1, count + L, count] that selects the inputs up to a token.

    Args:
        last: Index of the token, [1], int64.
        length: Number L of tokens.
        count: Number of inputs.
    """
    chosen = torch.arange(count + length)[:, None] == last + torch.arange(1, count + 1)
    return chosen.to(torch.float32)[None, None]


# The model


class NeuralEngineDecoder(Decoder):
    """Language model from token embeddings to logits, in a form for the neural engine.

    Args:
        model: A causal language model of ``transformers`` in fp32 and eval mode; changed.
        context: Number of tokens of the longest text.

    Attributes:
        masks: The masks that a call asks for, in order.
        rotaries: The rotary embeddings.

    Raises:
        LoweringError: See ``Decoder``; or the model has a part without such a form.
        OptionError: See ``Decoder``.
    """

    def __init__(self, model: Any, *, context: int) -> None:
        super().__init__(model, context=context)
        self._refuse()
        self.layers = tuple(map(_with_channels_last, self.layers))
        self.rotaries = nn.ModuleList()
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, RotaryTables):
                    given = GivenRotation(len(self.rotaries), module.config)
                    self.rotaries.append(module)
                    setattr(parent, name, given)
        model.set_output_embeddings(PartialHead(self.head))
        use_our_attention(model, NAME)
        refusal = f"{type(model).__name__} has no form for the neural engine"
        with wrap_errors(refusal, lambda _: _REMEDY, kind=LoweringError), torch.no_grad():
            self.masks = self._record_masks()
            self._check_form()

    def end_matrices(self, last: torch.Tensor, length: int) -> dict[int, torch.Tensor]:
        """Return ``end_matrix`` by the number of inputs in the states of convolutions.

        Args:
            last: Index of the call's last token, [1], int64.
            length: Number L of the call's tokens.
        """
        counts = {state.shape[1] for layer in self.layers for state in layer.states}
        return {count: end_matrix(last, length, count) for count in sorted(counts)}

    def compute(
        self,
        embeddings: torch.Tensor,
        inputs: Inputs,
        ends: Mapping[int, torch.Tensor],
        caches: Sequence[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Return the logits of one token in parts [1, V_i], and the new cache tensors.

        Args:
            embeddings: [1, 1, L, width] of the call's tokens.
            inputs: Further inputs.
            ends: See ``end_matrix``; by count.
            caches: Keys and values [1, kv_heads, S, width], and states [1, inputs, C].
        """
        tensors, layers = iter(caches), list[Any]()
        for layer in self.layers:
            if layer.keys:
                layers.append(_Rows((next(tensors), next(tensors)), layer.window))
            else:
                states = take_states(layer.states, tensors)
                layers.append(_States(states, _Ends(ends), write=False))
        hidden = ChannelsFirst.of_channels(embeddings.permute(0, 3, 1, 2))
        cache = transformers().Cache(layers=layers)
        with active_call(inputs, self.model):
            outputs = self.model(
                inputs_embeds=hidden,
                position_ids=_Positions(),
                cache=cache,
                use_cache=True,
            )
        return outputs.logits.parts, new_tensors(cache)

    def check_palettes(self) -> None:
        """Check that groups of 16 outputs divide the layers; others would not be palettized.

        Raises:
            OptionError: They do not divide a layer.
        """
        for name, module in self.named_modules():
            outputs = module.weight.shape[0] if isinstance(module, nn.Linear) else 0
            if outputs % PALETTE_OUTPUTS:
                raise OptionError(
                    f"palettes for {PALETTE_OUTPUTS} outputs do not divide {name}",
                    got=f"{outputs} outputs",
                    remedy="Choose --quantize int4 or int8",
                )

    def _refuse(self) -> None:
        """Refuse parts that have no form for the neural engine."""
        kinds = {state.name[0] for layer in self.layers for state in layer.states}
        reasons = {
            "attention of its own, which calls no attention function": self.ordered,
            "recurrences": RECURRENCE in kinds,
            "a mixture of experts": any(isinstance(part, Experts) for part in self.model.modules()),
        }
        for reason, applies in reasons.items():
            if applies:
                raise LoweringError(
                    f"{type(self.model).__name__} has no form for the neural engine",
                    got=reason,
                    remedy=_REMEDY,
                )

    def _record_masks(self) -> tuple[Mask, ...]:
        length, position = self.probe_logits.shape[1], torch.tensor([0])
        rotations = rotations_of(self.rotaries, position, length, self.context)
        call = _FirstCall(length, self.context, rotations, torch.zeros(1, 1, 1, length))
        empty = [cache for layer in self.layers for cache in layer.empty(self.context, 0).values()]
        embeddings = self.embedding(self.probe_tokens)[:, None]
        self.compute(embeddings, call, self.end_matrices(position, length), empty)
        return tuple(call.asked)

    def _check_form(self) -> None:
        """Compare the logits of a text with the unchanged model's: padded chunks, then a token."""
        text = self.probe_tokens
        chunk = min(_PROBE_CHUNK, *(layer.window or _PROBE_CHUNK for layer in self.layers))
        layout = Layout(self.vocabulary, self.context, chunk, CacheKind.BUFFER, standard=True)
        forward = NeuralEngineForward(self, layout)
        start = 0
        for count in (chunk - 1 or 1, chunk - 1 or 1, text.shape[1]):
            tokens = text[:, start : start + min(count, chunk)]
            logits = forward(tokens, torch.tensor([start]))
            start += tokens.shape[1]
            require_equal(self.model, logits, self.probe_logits[:, start - 1])


def _with_channels_last(layer: LayerCache) -> LayerCache:
    states = tuple(
        State(state.name, (state.shape[0], state.shape[2], state.shape[1]))
        for state in layer.states
    )
    return replace(layer, states=states)


def rotations_of(
    rotaries: Iterable[Any], position: torch.Tensor, length: int, context: int
) -> dict[Rotation, list[torch.Tensor]]:
    """Return the cosines and sines [1, 1, L, R] of a call.

    Args:
        rotaries: The rotary embeddings of a model.
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens.
        context: Number of tokens of the longest text.
    """
    # Padding after the end of the context has no position of its own.
    positions = (position + torch.arange(length)).clamp(max=context - 1)[None]
    return {
        (number, kind): [rows[None] for rows in tables(None, positions, kind)]
        for number, tables in enumerate(rotaries)
        for kind in tables.kinds
    }


class Chunk(nn.Module):
    """A chunk of tokens, as Core ML computes it: from floats to floats."""

    def __init__(self, decoder: NeuralEngineDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        embeddings: torch.Tensor,
        masks: Sequence[torch.Tensor],
        rotations: Mapping[Rotation, Sequence[torch.Tensor]],
        last: torch.Tensor,
        ends: Mapping[int, torch.Tensor],
        caches: Sequence[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the logits in parts, and new cache tensors, in the dtype of the caches.

        Args:
            embeddings: [1, 1, L, width].
            masks: [1, 1, L, S] each.
            rotations: Cosines and sines, [1, 1, L, R].
            last: [1, 1, 1, L], 1 for the last token.
            ends: See ``end_matrix``; by count.
            caches: Cache tensors.
        """
        dtype = embeddings.dtype
        masks = as_computed(masks)
        rotations = {key: as_computed(pair) for key, pair in rotations.items()}
        embeddings, last = as_computed((embeddings, last))
        ends = dict(zip(ends, as_computed(tuple(ends.values())), strict=True))
        inputs = Inputs(iter(masks), rotations, last)
        parts, new = self.decoder.compute(embeddings, inputs, ends, as_computed(caches))
        return as_stored(parts, dtype), as_stored(new, dtype)


class NeuralEngineForward(StandardForward):
    """Method ``forward`` of the standard layout, in the form for the neural engine.

    Args:
        decoder: The model.
        layout: Chunk and context.
        suffix: End of the caches' names.
        cache_dtype: Of the caches, and of all inputs of Core ML.

    Raises:
        OptionError: See ``StandardForward``; or the caches are Core ML states.
    """

    def __init__(
        self,
        decoder: NeuralEngineDecoder,
        layout: Layout,
        *,
        suffix: str = "",
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(decoder, layout, suffix=suffix, cache_dtype=cache_dtype)
        self._masks, self._dtype = decoder.masks, cache_dtype
        self._vocabulary = decoder.vocabulary
        self._end_matrices = decoder.end_matrices
        weight = decoder.embedding.weight
        table = nn.Parameter(in_memory(weight).to(cache_dtype), requires_grad=False)
        self.embedding = copy.deepcopy(decoder.embedding, {id(weight): table}).to(cache_dtype)
        self.rotaries = copy.deepcopy(decoder.rotaries).to(cache_dtype)

    @staticmethod
    def _core_ml_module(decoder: Any, *, has_states: bool) -> nn.Module:
        if has_states:
            raise OptionError(
                "the form for the neural engine only reads its caches",
                got="--cache state",
                expected="--cache buffer",
            )
        return Chunk(decoder)

    def _compute(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V], fp32, and new cache tensors."""
        length, dtype = self.chunk, self._dtype
        is_continued = (position > 0).to(dtype)
        parts, new = self.core_ml(
            self.embedding(tokens)[:, None],
            [mask.compute(position, length, self.context).to(dtype) for mask in self._masks],
            rotations_of(self.rotaries, position, length, self.context),
            (torch.arange(length) == last).to(dtype)[None, None, None],
            {n: matrix.to(dtype) for n, matrix in self._end_matrices(last, length).items()},
            [
                cache * is_continued if number in self._replaced else cache
                for number, cache in enumerate(caches)
            ],
        )
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return logits[:, : self._vocabulary].to(torch.float32), *new
