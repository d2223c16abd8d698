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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import active_call
from coreml_delegate.llm.caches import LayerCache, as_computed, as_stored, new_tensors
from coreml_delegate.llm.channels_first import ChannelsFirst
from coreml_delegate.llm.decoder import Decoder, require_equal, use_our_attention
from coreml_delegate.llm.decoder_methods import StandardForward
from coreml_delegate.llm.experts import Experts
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.neural_engine_parts import (
    NAME,
    REMEDY,
    Boundary,
    Ends,
    FirstCall,
    GivenRotation,
    Inputs,
    Mask,
    PartialHead,
    PieceHook,
    RefusedPositions,
    Rotation,
    Rows,
    States,
    as_float,
    end_matrix,
)
from coreml_delegate.llm.positions import RotaryTables
from coreml_delegate.llm.states import RECURRENCE, State, take_states
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.patches.third_party import transformers, wrap_errors
from coreml_delegate.quantization import QuantizationMode
from coreml_delegate.quantization.apply import obstacle

_PROBE_CHUNK = 3  # tokens


class NeuralEngineDecoder(Decoder):
    """Language model from token embeddings to logits, in a form for the neural engine.

    Args:
        model: A causal language model of ``transformers`` in fp32 and eval mode; changed.
        context: Number of tokens of the longest text.
        pieces: Number of pieces of about as many parameters, each a delegate of its own.

    Attributes:
        masks: The masks that a call asks for, in order.
        rotaries: The rotary embeddings.

    Raises:
        LoweringError: See ``Decoder``; or the model has a part without such a form.
        OptionError: See ``Decoder``.
    """

    def __init__(self, model: Any, *, context: int, pieces: int = 1) -> None:
        super().__init__(model, context=context)
        self._refuse()
        self._parameter_count = super().parameter_count
        self.layers = tuple(map(_with_channels_last, self.layers))
        self.rotaries = nn.ModuleList()
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, RotaryTables):
                    rotation = GivenRotation(len(self.rotaries), module.config)
                    self.rotaries.append(module)
                    setattr(parent, name, rotation)
        model.set_output_embeddings(PartialHead(self.head))
        use_our_attention(model, NAME)
        self.boundary = Boundary()
        self._cut(pieces)
        refusal = f"{type(model).__name__} has no form for the neural engine"
        with wrap_errors(refusal, lambda _: REMEDY, kind=LoweringError), torch.no_grad():
            try:
                self.masks = self._record_masks()
            except LoweringError as error:
                raise error.prefixed(f"{type(model).__name__}: ") from error
            self._check_form()

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the model; the parts of a tied head do not count."""
        return self._parameter_count

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
        caches: Sequence[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Return the logits of one token in parts [1, V_i], and the new cache tensors.

        Args:
            embeddings: [1, 1, L, width] of the call's tokens.
            inputs: Further inputs.
            caches: Keys and values [1, kv_heads, S, width], and states [1, inputs, C].
        """
        tensors, layers = iter(caches), list[Any]()
        for layer in self.layers:
            if layer.keys:
                layers.append(Rows((next(tensors), next(tensors)), layer.window))
            else:
                states = take_states(layer.states, tensors)
                layers.append(States(states, Ends(), write=False))
        hidden = ChannelsFirst.of_channels(embeddings.permute(0, 3, 1, 2))
        cache = transformers().Cache(layers=layers)
        with active_call(inputs, self.model):
            outputs = self.model(
                inputs_embeds=hidden,
                position_ids=RefusedPositions(),
                cache=cache,
                use_cache=True,
            )
        return outputs.logits.parts, new_tensors(cache)

    def check_mode(self, mode: QuantizationMode) -> None:
        """Check that a mode divides the layers; coremltools would leave others in float.

        Raises:
            OptionError: It does not divide a layer.
        """
        for name, module in self.named_modules():
            reason = obstacle(module, mode) if isinstance(module, nn.Linear) else None
            if reason is not None:
                raise OptionError(
                    f"groups of weights do not divide {name}",
                    got=reason,
                    remedy="Choose --quantize int4 or int8",
                )

    def _cut(self, pieces: int) -> None:
        """Cut the layers into pieces; the last piece has the head.

        Raises:
            OptionError: There are more pieces than layers.
        """
        if not 1 <= pieces <= len(self.layers):
            raise OptionError(
                "a piece has at least one layer",
                got=f"{pieces} pieces",
                expected=f"1 to {len(self.layers)}",
            )
        if pieces == 1:
            return
        lists = (part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        (layers,) = [part for part in lists if len(part) == len(self.layers)]
        sizes = [_parameters(part) for part in (*layers, self.head)]
        before = 0
        for layer, piece in zip(layers, pieces_of_layers(sizes, pieces), strict=True):
            if piece:
                hook = PieceHook(self.boundary if piece != before else None)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
            before = piece

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
                    remedy=REMEDY,
                )

    def _record_masks(self) -> tuple[Mask, ...]:
        length, position = self.probe_logits.shape[1], torch.tensor([0])
        rotations = rotations_of(self.rotaries, position, length, self.context)
        ends, last = self.end_matrices(position, length), torch.zeros(1, 1, 1, length)
        call = FirstCall(length, self.context, rotations, last, ends)
        empty = [cache for layer in self.layers for cache in layer.empty(self.context, 0).values()]
        embeddings = self.embedding(self.probe_tokens)[:, None]
        self.compute(embeddings, call, empty)
        return tuple(call.requests)

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


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def pieces_of_layers(sizes: Sequence[int], pieces: int) -> list[int]:
    """Return the piece of each layer: about equal sums of sizes, and no piece without a layer.

    Args:
        sizes: Of the layers, and of the head, which belongs to the last layer's piece.
        pieces: Number of pieces.
    """
    count, total, before = len(sizes) - 1, sum(sizes), 0
    result: list[int] = []
    for index, size in enumerate(sizes[:count]):
        balanced = min(pieces * (2 * before + size) // (2 * total), pieces - 1)
        last = result[-1] if result else -1
        # As many layers are left as there are pieces to begin, and each begins after the last.
        least = pieces - (count - index)
        result.append(max(least, 0 if last < 0 else min(balanced, last + 1)))
        before += size
    return result


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
        inputs = Inputs(masks, rotations, last, ends)
        parts, new = self.decoder.compute(as_float(embeddings), inputs, as_computed(caches))
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
        weight: Any = decoder.embedding.weight
        table = nn.Parameter(in_memory(weight).to(cache_dtype), requires_grad=False)
        self.embedding = copy.deepcopy(decoder.embedding, {id(weight): table}).to(cache_dtype)
        self.rotaries = copy.deepcopy(decoder.rotaries).to(cache_dtype)

    def _core_ml_module(self, decoder: Any, *, has_states: bool) -> nn.Module:
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
        parts, new = self.core_ml(
            self.embedding(tokens)[:, None],
            [mask.compute(position, length, self.context).to(dtype) for mask in self._masks],
            rotations_of(self.rotaries, position, length, self.context),
            (torch.arange(length) == last).to(dtype)[None, None, None],
            {n: matrix.to(dtype) for n, matrix in self._end_matrices(last, length).items()},
            [
                torch.where(position > 0, cache, 0.0) if number in self._replaced else cache
                for number, cache in enumerate(caches)
            ],
        )
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return logits[:, : self._vocabulary].to(torch.float32), *new
