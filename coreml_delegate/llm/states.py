"""States of convolutions and recurrences with the interface of ``transformers``.

The state of a causal convolution is its last inputs, the state of a recurrence is h_t. Unlike keys
and values, a state has no row per token: every call replaces it. It is the state after the call's
last token, without padding, and before the first token of a text it is zero, whatever a caller
passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from coreml_delegate.patches.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin
else:  # its error names the package to install
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
        shape: [1, channels, inputs] for a convolution, [1, ...] for a recurrence.
    """

    name: Name
    shape: tuple[int, ...]


def read_states(layer: Any) -> tuple[State, ...]:
    """Return the states of a cache layer of ``transformers`` that has processed a token.

    The cache holds as many inputs as the convolution's kernel size; the oldest is not needed.
    """
    states: list[State] = []
    for kind, tensors, unused in (
        (CONVOLUTION, getattr(layer, "conv_states", {}), 1),
        (RECURRENCE, getattr(layer, "recurrent_states", {}), 0),
    ):
        for number, tensor in tensors.items():
            if tensor is not None:
                *sizes, last = tensor.shape
                states.append(State((kind, number), (*sizes, last - unused)))
    return tuple(states)


class Span:
    """The tokens of a call: their position, and which of them are padding.

    Args:
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens, padding included.
        last: Index of the last token that is not padding, [1], int64; None without padding.
    """

    def __init__(self, position: torch.Tensor, length: int, last: torch.Tensor | None) -> None:
        self._position = position
        self._length = length
        self._last = last

    @cached_property
    def is_continued(self) -> torch.Tensor:
        """Whether the call follows earlier tokens, [1], bool."""
        return self._position > 0

    @cached_property
    def real(self) -> torch.Tensor | None:
        """1 for a token and 0 for padding, [L], fp32; None without padding."""
        if self._last is None:
            return None
        return (torch.arange(self._length) <= self._last).to(torch.float32)

    def ending(self, inputs: torch.Tensor, count: int) -> torch.Tensor:
        """Return the inputs [1, C, count] that end with the last token.

        Args:
            inputs: Inputs of earlier tokens, then of the call's tokens, [1, C, count + L].
            count: Number of inputs.
        """
        if self._last is None:
            return inputs[:, :, inputs.shape[2] - count :]
        # A product with zeros and ones: coremltools cannot write the result of a gather to a state.
        indices = torch.arange(inputs.shape[2])[:, None]
        chosen = indices == self._last + torch.arange(1, count + 1)
        return inputs @ chosen.to(inputs.dtype)


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer during one call; inputs of the call, or buffers of a module.

    To ``transformers`` the layer has no earlier state: a module then runs its prefill code, which
    is right for one token too, and gets earlier states from ``update_conv_state`` and ``past``.

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
        """The new states, in the order of the earlier states."""
        return [self._replaced[name] for name in self._states]

    def past(self, name: Name) -> torch.Tensor:
        """Return a state before the call; zero at the beginning of a text."""
        return torch.where(self.span.is_continued, self._states[name], 0.0)

    def replace(self, name: Name, state: torch.Tensor) -> None:
        """Set a state after the call's last token."""
        self._replaced[name] = state
        if self._write:
            self._states[name].copy_(state)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the layer has no storage of its own."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Prepend earlier inputs to the inputs [1, C, L] of a convolution, and set its state."""
        del kwargs
        name = (CONVOLUTION, state_idx)
        past = self.past(name)
        inputs = torch.cat((past, conv_states), dim=2)
        self.replace(name, self.span.ending(inputs, past.shape[2]))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Set the state of a recurrence after the last token; return it."""
        del kwargs
        self.replace((RECURRENCE, state_idx), recurrent_states)
        return recurrent_states


def take_states(
    states: Sequence[State], tensors: Iterator[torch.Tensor]
) -> dict[Name, torch.Tensor]:
    """Take the next tensors of an iterator, one for each state."""
    return {state.name: next(tensors) for state in states}
