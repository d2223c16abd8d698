"""Recurrent layers, computed step by step.

Source: coremltools' MIL op reference, ``recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "linear": lambda x: x,
    "relu": torch.relu,
    "scaled_tanh": torch.tanh,  # with its default scales of 1
    "sigmoid": torch.sigmoid,
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "tanh": torch.tanh,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name.lower() not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}, not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name.lower()]


def _steps(x: Tensor, direction: str) -> Iterator[Tensor]:
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction is {direction!r}, not forward or reverse")
    return iter(x.flip(0) if direction == "reverse" else x)


def _sequence(hidden: list[Tensor], output_sequence: bool) -> Tensor:
    """Return [s, b, H] in order of computation, or only the last step."""
    return torch.stack(hidden if output_sequence else hidden[-1:])


@kernel("rnn", widen=True)
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """Elman layer, ``h <- act(W_ih x + W_hh h + b)``; ``x``: [s, b, I], ``initial_h``: [b, H]."""
    act = _activation(activation)
    h, hidden = initial_h, list[Tensor]()
    for step in _steps(x, direction):
        h = act(F.linear(step, weight_ih, bias) + F.linear(h, weight_hh))
        hidden.append(h)
    return _sequence(hidden, output_sequence), h


@kernel("gru", widen=True)
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GRU, ``h <- (1 - z) o + z h``; gates in the order reset r, output o, update z.

    The reset gate scales the state, ``W_hh (r h)``, or its product if ``reset_after``, ``r (W_hh
    h)``. ``bias`` is added to the product with the state, ``input_bias`` to the product with the
    input. ``x``: [s, b, I], ``initial_h``: [b, H].
    """
    gate, act = _activation(recurrent_activation), _activation(activation)
    size = initial_h.shape[-1]
    split_r, split_o, split_z = weight_hh.split(size)
    bias_r, bias_o, bias_z = (None,) * 3 if bias is None else bias.split(size)
    h, hidden = initial_h, list[Tensor]()
    for step in _steps(x, direction):
        input_r, input_o, input_z = F.linear(step, weight_ih, input_bias).split(size, dim=-1)
        r = gate(input_r + F.linear(h, split_r, bias_r))
        z = gate(input_z + F.linear(h, split_z, bias_z))
        if reset_after:
            o = act(input_o + r * F.linear(h, split_o, bias_o))
        else:
            o = act(input_o + F.linear(r * h, split_o, bias_o))
        h = (1 - z) * o + z * h
        hidden.append(h)
    return _sequence(hidden, output_sequence), h


@kernel("lstm", widen=True)
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LSTM, gates in the order input, forget, output, cell; ``x``: [s, b, I].

    With ``bidirectional`` the states are [b, 2 * H], forward half first, and the outputs of the
    reverse pass are in the order of the inputs.
    """
    names = (recurrent_activation, cell_activation, activation)
    activations = tuple(_activation(name) for name in names)
    passes = [(direction, (weight_ih, weight_hh, bias, peephole))]
    if direction == "bidirectional":
        if weight_ih_back is None or weight_hh_back is None:
            raise ValueError("a bidirectional lstm needs weight_ih_back and weight_hh_back")
        passes = [
            ("forward", (weight_ih, weight_hh, bias, peephole)),
            ("reverse", (weight_ih_back, weight_hh_back, bias_back, peephole_back)),
        ]
    count = len(passes)
    states = zip(initial_h.chunk(count, dim=-1), initial_c.chunk(count, dim=-1), strict=True)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for (order, weights), state in zip(passes, states, strict=True):
        hidden, h, c = _lstm_pass(_steps(x, order), state, weights, activations, clip)
        results.append((torch.stack(hidden[::-1] if results else hidden), h, c))
    sequence, h, c = (torch.cat(values, dim=-1) for values in zip(*results, strict=True))
    return sequence if output_sequence else h.unsqueeze(0), h, c


def _lstm_pass(
    steps: Iterator[Tensor],
    state: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    activations: tuple[Callable[[Tensor], Tensor], ...],
    clip: float | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    h, c = state
    weight_ih, weight_hh, bias, peephole = weights
    gate, cell, out = activations
    size = h.shape[-1]

    def open_gate(inputs: Tensor, c: Tensor, index: int) -> Tensor:
        # Without a peephole no zeros are added: zero times infinity would be NaN.
        return gate(inputs if peephole is None else inputs + peephole.split(size)[index] * c)

    hidden: list[Tensor] = []
    for step in steps:
        gates = F.linear(step, weight_ih, bias) + F.linear(h, weight_hh)
        i, f, o, z = gates.split(size, dim=-1)
        c_new = open_gate(f, c, 1) * c + open_gate(i, c, 0) * cell(z)
        c = c_new if clip is None else c_new.clamp(-clip, clip)
        h = open_gate(o, c, 2) * out(c)
        hidden.append(h)
    return hidden, h, c
