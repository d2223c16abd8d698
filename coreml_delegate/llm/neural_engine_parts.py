"""Parts of a language model in the form for the neural engine: inputs, attention, head, caches.

``neural_engine.py`` has the model. Tensors have the channels first (``channels_first.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import Call, Segment, check_arguments, current_call, mask
from coreml_delegate.llm.caches import UnlimitedLayer, as_computed, past_positions
from coreml_delegate.llm.channels_first import ChannelsFirst, Operand, Parts
from coreml_delegate.llm.states import Name, Span, StateLayer
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.quantization.configs import PALETTE_OUTPUTS
from coreml_delegate.targets import LARGEST_DIMENSION

NAME = "coreml_delegate_neural_engine"
"""Name of the functions in the interfaces of ``transformers``."""

_HEADS = (0, 1, 3, 2)  # [B, heads, L, width] of [B, heads, width, L]
REMEDY = "Export it without --for"
"""Remedy of the errors of models without this form."""

Rotation = tuple[int, str | None]
"""Number of a rotary embedding in the model, and a layer type."""


def as_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return an input in the dtype in which a model computes, fp32."""
    return as_computed((tensor,))[0]


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


class Rotated(list[ChannelsFirst]):
    """Cosines and sines [1, L, R] of a rotary embedding.

    Attributes:
        key: The rotary embedding.
    """

    def __init__(self, key: Rotation, rows: Iterable[ChannelsFirst]) -> None:
        super().__init__(rows)
        self.key = key


class Inputs(Call):
    """The inputs of one call, besides embeddings and caches.

    The parts of a model cast them where they use them: a shared cast would be a value in fp32
    between two delegates.

    Args:
        masks: [1, 1, L, S] each, in the order in which the model asks for masks.
        rotations: Cosines and sines, each [1, 1, L, R].
        last: 1 for the token whose logits are wanted, else 0: [1, 1, 1, L].
        ends: Matrices [1, 1, count + L, count] by count, see ``end_matrix``.
    """

    def __init__(
        self,
        masks: Iterable[torch.Tensor],
        rotations: Mapping[Rotation, Sequence[torch.Tensor]],
        last: torch.Tensor,
        ends: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__()
        self.last, self.ends = last, ends
        self._masks = iter(masks)
        self._rotations = rotations
        self._rotated: dict[Rotation, Rotated] = {}

    def begin_piece(self) -> None:
        """Begin another piece of the model, which shares no value with the pieces before."""
        self._rotated.clear()

    def next_mask(self, request: Mask) -> torch.Tensor:
        """Return the next mask."""
        del request
        return next(self._masks)

    def rotation(self, key: Rotation) -> Rotated:
        """Return the cosines and sines of a rotary embedding."""
        if key not in self._rotated:
            rows = (as_float(rows).transpose(2, 3) for rows in self._rotations[key])
            self._rotated[key] = Rotated(key, (ChannelsFirst(r, (0, 3, 2)) for r in rows))
        return self._rotated[key]


class FirstCall(Inputs):
    """A call at position 0, which records the masks that the model asks for."""

    def __init__(self, length: int, context: int, *args: Any) -> None:
        super().__init__((), *args)
        self.requests: list[Mask] = []
        self._size = length, context

    def next_mask(self, request: Mask) -> torch.Tensor:
        """Compute and record a mask."""
        self.requests.append(request)
        return request.compute(torch.tensor([0]), *self._size)


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
    visible = None if attention_mask is None else as_float(attention_mask)
    results: list[torch.Tensor] = []
    for head, own in enumerate(queries.split(1, dim=1)):
        scores = own.transpose(2, 3) @ keys[head // group].transpose(2, 3)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if visible is not None:
            scores = scores + visible
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


class RefusedPositions(Operand):
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
            remedy=REMEDY,
        )


# Pieces


class Boundary(nn.Module):
    """A copy of the activations between two pieces, by ExecuTorch's kernels."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, L, C] of [1, 1, L, C]."""
        return rows.squeeze(1)


class PieceHook:
    """Called before a layer of another piece than the first, with its arguments.

    Args:
        boundary: Passes the activations of the layer before; None inside of a piece.
    """

    def __init__(self, boundary: Boundary | None) -> None:
        self._boundary = boundary

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the layer, as values of its piece."""
        del layer
        call: Any = current_call()
        hidden, *further = args
        if self._boundary is not None:
            call.begin_piece()
            # A last dimension of a few tokens would be padded.
            rows = self._boundary(hidden.data.permute(0, 2, 3, 1).to(call.last.dtype))
            hidden = ChannelsFirst.of_channels(as_float(rows)[:, None].permute(0, 3, 1, 2))
        own = {
            name: call.rotation(value.key) if isinstance(value, Rotated) else value
            for name, value in kwargs.items()
        }
        return (hidden, *further), own


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

    def forward(self, x: Any, position_ids: torch.Tensor, layer_type: str | None = None) -> Rotated:
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

    def __init__(self, linear: Any) -> None:
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
        last = ChannelsFirst.of_channels((x.data * as_float(call.last)).sum(3, keepdim=True))
        return Parts([part(last).data.flatten(1) for part in self.parts])


# Caches


class Rows(UnlimitedLayer):
    """Keys and values of one layer during one call; the rows of earlier tokens are inputs."""

    def __init__(self, past: Sequence[torch.Tensor], window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self._past = past
        self.new: Segment | None = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of the scores, and no offset: masks are inputs."""
        return self._past[0].shape[2] + query_length, 0

    def get_seq_length(self) -> Any:
        """Return an operand that refuses its use."""
        return RefusedPositions()

    def update(
        self, key_states: ChannelsFirst, value_states: ChannelsFirst, *args: Any, **kwargs: Any
    ) -> Segment:
        """Store the call's rows; return all keys and values [1, kv_heads, S, width]."""
        del args, kwargs
        self.new = key_states.tensor(), value_states.tensor()
        keys, values = (torch.cat(pair, dim=2) for pair in zip(self._past, self.new, strict=True))
        return keys, values


class States(StateLayer):
    """States of one layer during one call, as [1, inputs, C]; zero at the beginning of a text."""

    def past(self, name: Name) -> Any:
        """Return the state [1, C, inputs] before the call."""
        return ChannelsFirst(self._states[name].transpose(1, 2).unsqueeze(2), (0, 1, 3))


class Ends(Span):
    """The end of a call's tokens, as matrices that select inputs of convolutions."""

    def __init__(self) -> None:
        """Take the matrices from the current call."""

    def ending(self, inputs: Any, count: int) -> torch.Tensor:
        """Return the inputs [1, count, C] that end with the last token; see ``Span``."""
        call: Any = current_call()
        return (inputs.data @ as_float(call.ends[count]))[:, :, 0].transpose(1, 2)


def end_matrix(last: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Return the matrix [1, 1, count + L, count] that selects the inputs up to a token.

    Args:
        last: Index of the token, [1], int64.
        length: Number L of tokens.
        count: Number of inputs.
    """
    chosen = torch.arange(count + length)[:, None] == last + torch.arange(1, count + 1)
    return chosen.to(torch.float32)[None, None]
