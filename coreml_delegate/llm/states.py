"""States that a layer keeps whole, behind the interface of ``transformers``.

A convolution keeps the inputs before the next token, a recurrence what it has made of all earlier
tokens. Unlike keys and values such a state has no row for each token: every call replaces it. It
is that of the last token of a call, whatever the padding behind it is, and before the first token
of a text it counts as zero, whatever a caller passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from coreml_delegate.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin
else:  # which says what to install if it is missing
    LinearAttentionCacheLayerMixin = transformers().cache_utils.LinearAttentionCacheLayerMixin

Name = tuple[str, int]
"""Kind of a state and its number in its layer."""

CONVOLUTION = "convolution"
RECURRENCE = "recurrence"


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that each call replaces.

    Attributes:
        name: Kind and number.
        shape: [1, channels, inputs] of a convolution, [1, ...] of a recurrence.
    """

    name: Name
    shape: tuple[int, ...]


def read_states(layer: Any) -> tuple[State, ...]:
    """Return the states of a layer of a cache of ``transformers`` that has seen a token.

    Such a cache keeps as many inputs as the convolution is wide; the oldest is not needed.
    """
    made: list[State] = []
    for kind, tensors, unused in (
        (CONVOLUTION, getattr(layer, "conv_states", {}), 1),
        (RECURRENCE, getattr(layer, "recurrent_states", {}), 0),
    ):
        for number, tensor in tensors.items():
            if tensor is not None:
                *others, last = tensor.shape
                made.append(State((kind, number), (*others, last - unused)))
    return tuple(made)


class Span:
    """The tokens of a call: whether any came before, and which are padding.

    Args:
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens, padding included.
        last: Index of the last token that is no padding, [1], int64; None if there is no padding.
    """

    def __init__(self, position: torch.Tensor, length: int, last: torch.Tensor | None) -> None:
        self._position = position
        self._length = length
        self._last = last

    @cached_property
    def begun(self) -> torch.Tensor:
        """Whether a token came before, [1], bool."""
        return self._position > 0

    @cached_property
    def real(self) -> torch.Tensor | None:
        """1 for a token and 0 for padding, [L], fp32; None if there is no padding."""
        if self._last is None:
            return None
        return (torch.arange(self._length) <= self._last).to(torch.float32)

    def ending(self, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """Return the inputs [1, C, count] that end with the last token.

        Args:
            inputs: Of earlier tokens, then of the call's tokens, [1, C, count + L].
            count: Number of inputs.
        """
        if self._last is None:
            return inputs[:, :, inputs.shape[2] - count :]
        # A product with zeros and ones: coremltools cannot write what a gather returns to a state.
        places = torch.arange(inputs.shape[2])[:, None]
        chosen = places == self._last + torch.arange(1, count + 1)
        return inputs @ chosen.to(inputs.dtype)


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer during one call; inputs of the call, or buffers of a module.

    ``transformers`` is told that there is no earlier state: a module then takes the way of whole
    texts, which is right for one token too, and gets what is earlier from ``update_conv_state`` and
    ``past``.

    Args:
        states: Tensors of earlier calls, by name.
        span: The tokens of the call.
        write: Whether to write new states into the tensors.
    """

    def __init__(self, states: Mapping[Name, torch.Tensor], span: Span, *, write: bool) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, len(states) or 1)
        self.span = span
        self._states = states
        self._write = write
        self._replaced: dict[Name, torch.Tensor] = {}

    @property
    def replaced(self) -> list[torch.Tensor]:
        """The new states, in the order of the earlier ones."""
        return [self._replaced[name] for name in self._states]

    def past(self, name: Name) -> torch.Tensor:
        """Return a state before the call; zero at the beginning of a text."""
        return torch.where(self.span.begun, self._states[name], 0.0)

    def replace(self, name: Name, state: torch.Tensor) -> None:
        """Take a state as it is behind the call's last token."""
        self._replaced[name] = state
        if self._write:
            self._states[name].copy_(state)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no storage of its own."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take the inputs [1, C, L] of a convolution; return those it needs, earlier ones first."""
        del kwargs
        name = (CONVOLUTION, state_idx)
        past = self.past(name)
        inputs = torch.cat((past, conv_states), dim=2)
        self.replace(name, self.span.ending(inputs, past.shape[2]))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take the state of a recurrence behind the last token; return it."""
        del kwargs
        self.replace((RECURRENCE, state_idx), recurrent_states)
        return recurrent_states


def take_states(
    states: Sequence[State], tensors: Iterator[torch.Tensor]
) -> dict[Name, torch.Tensor]:
    """Take the next tensors, one for each state."""
    return {state.name: next(tensors) for state in states}
