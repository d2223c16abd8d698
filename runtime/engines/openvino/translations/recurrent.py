"""Recurrent layers.

A layer of the usual activations is one kernel wherever that is faster; any other is a loop over its
steps, which are written here with gates in the order of the kernels.

Source: coremltools' MIL op reference, ``recurrent``, and Core ML's ``NeuralNetwork.proto`` for what
a peephole sees and what ``clip`` bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import array_constant, ints
from coreml_delegate.runtime.engines.openvino.plugin import nan
from coreml_delegate.runtime.engines.openvino.registry import (
    Array,
    Result,
    Tensor,
    refuse,
    translation,
)
from coreml_delegate.runtime.engines.openvino.translations.activation import sigmoid_hard
from coreml_delegate.runtime.engines.openvino.translations.recurrence import (
    Direction,
    Layer,
    Weights,
    product,
)
from coreml_delegate.runtime.engines.openvino.translations.slicing import reverse
from coreml_delegate.runtime.mil.opset import Opset

# MIL's order of gates -> that of OpenVINO's kernels.
_GRU_GATES = (2, 0, 1)  # reset, output, update -> update, reset, output
_LSTM_GATES = (1, 0, 3, 2)  # input, forget, output, cell -> forget, input, cell, output

# At batch 1 the GRU kernel takes twice as long as the loop with 256 units; its form whose reset
# gate scales the state takes 1.7 times as long with 64 already, and is not used.
_GRU_KERNEL_UNITS = 192


@dataclass(frozen=True, slots=True)
class _Activation:
    """What an activation is in a graph, and its name in the kernels that have it."""

    apply: Callable[[Any], Any]
    kernel: str | None = None


_TANH = _Activation(ops.tanh, "tanh")
_HARD_SIGMOID = _Activation(lambda x: sigmoid_hard(x, 0.2, 0.5))

_ACTIVATIONS = {
    "hard_sigmoid": _HARD_SIGMOID,
    "linear": _Activation(lambda x: x),
    "relu": _Activation(ops.relu, "relu"),
    "scaled_tanh": _TANH,  # with its default scales of 1
    "sigmoid": _Activation(ops.sigmoid, "sigmoid"),
    "sigmoid_hard": _HARD_SIGMOID,
    "tanh": _TANH,
}


# No kernel keeps it.
_EXACT_RELU = _Activation(lambda x: nan.kept(x, ops.relu(x)))


def _activation(name: str, exact_nan: bool = False) -> _Activation:
    if name.lower() not in _ACTIVATIONS:
        raise refuse("activation of a recurrent layer", name, ", ".join(_ACTIVATIONS))
    if exact_nan and name.lower() == "relu":
        return _EXACT_RELU
    return _ACTIVATIONS[name.lower()]


def _in_order(x: Tensor, direction: str, *more: str) -> Any:
    """``x`` [s, b, I] in the order of computation, in which a reversed layer also gives out."""
    allowed = ("forward", "reverse", *more)
    if direction not in allowed:
        raise refuse("direction of a recurrent layer", direction, ", ".join(allowed))
    return reverse(x, (0,)) if direction == "reverse" else x


def _reordered(array: Array, order: Sequence[int]) -> Weights:
    gates = np.split(np.asarray(array, np.float32), len(order))
    return np.concatenate([gates[gate] for gate in order])


def _bias(array: Array | None, order: Sequence[int], weights: Array) -> Weights:
    """A bias of the rows of ``weights`` with its gates reordered, zeros if there is none."""
    return _reordered(np.zeros(len(weights), np.float32) if array is None else array, order)


@translation("rnn")
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
    *,
    exact_nan: bool = False,
) -> Result:
    """Elman layer; ``x``: [s, b, I], ``initial_h``: [b, H]."""
    act = _activation(activation, exact_nan)
    only = (0,)
    weights = Direction(
        _reordered(weight_ih, only), _reordered(weight_hh, only), _bias(bias, only, weight_hh)
    )
    layer = Layer(_in_order(x, direction), (initial_h,), (weights,), output_sequence)
    if act.kernel is not None:
        return layer.by_kernel(ops.rnn_sequence, activations=[act.kernel])
    return layer.by_loop(functools.partial(_rnn_step, act))


def _rnn_step(
    act: _Activation, weights: Direction, inputs: Any, states: tuple[Any, ...]
) -> tuple[Any, ...]:
    (h,) = states
    return (act.apply(ops.add(inputs, product(h, weights.state_weights))),)


@translation("gru")
def gru_ios15(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    *,
    exact_nan: bool = False,
) -> Result:
    """Gated recurrent unit whose reset gate scales the state."""
    return gru(
        x,
        initial_h,
        weight_ih,
        weight_hh,
        bias,
        direction,
        output_sequence,
        recurrent_activation,
        activation,
        exact_nan=exact_nan,
    )


@translation("gru", since=Opset.iOS18)
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Array | None = None,
    *,
    exact_nan: bool = False,
) -> Result:
    """Gated recurrent unit whose reset gate scales the state, or its product if ``reset_after``.

    Gates are in the order reset, output, update. ``bias`` belongs to the recurrent product,
    ``input_bias`` to the input's. ``x``: [s, b, I], ``initial_h``: [b, H].
    """
    gate, act = (_activation(name, exact_nan) for name in (recurrent_activation, activation))
    biases = _gru_biases(
        _bias(input_bias, _GRU_GATES, weight_ih), _bias(bias, _GRU_GATES, weight_hh), reset_after
    )
    weights = Direction(
        _reordered(weight_ih, _GRU_GATES), _reordered(weight_hh, _GRU_GATES), biases
    )
    layer = Layer(_in_order(x, direction), (initial_h,), (weights,), output_sequence)
    usual = (gate.kernel, act.kernel) == ("sigmoid", "tanh")
    if usual and reset_after and weights.units <= _GRU_KERNEL_UNITS:
        return layer.by_kernel(ops.gru_sequence, linear_before_reset=True)
    return layer.by_loop(functools.partial(_gru_step, gate, act, reset_after))


def _gru_biases(of_input: Weights, of_state: Weights, reset_after: bool) -> Weights:
    """[3 * H], the sum; with ``reset_after`` [4 * H]: the gate scales the output's second bias."""
    if not reset_after:
        return of_input + of_state
    gates = 2 * len(of_state) // 3
    return np.concatenate([of_input[:gates] + of_state[:gates], of_input[gates:], of_state[gates:]])


def _gru_step(
    gate: _Activation,
    act: _Activation,
    reset_after: bool,
    weights: Direction,
    inputs: Any,
    states: tuple[Any, ...],
) -> tuple[Any, ...]:
    (h,) = states
    units = weights.units
    of_gates, of_output = np.split(weights.state_weights, [2 * units])
    sizes = ints([2 * units, units])
    to_gates, to_output = ops.variadic_split(inputs, ints(1), sizes).outputs()
    gates = gate.apply(ops.add(to_gates, product(h, of_gates)))
    update, reset = ops.split(gates, ints(1), 2).outputs()
    if reset_after:
        bias = array_constant(weights.bias[3 * units :])
        past = ops.multiply(reset, ops.add(product(h, of_output), bias))
    else:
        past = product(ops.multiply(reset, h), of_output)
    new = act.apply(ops.add(to_output, past))
    return (ops.add(new, ops.multiply(update, ops.subtract(h, new))),)


@translation("lstm")
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None = None,
    peephole: Array | None = None,
    weight_ih_back: Array | None = None,
    weight_hh_back: Array | None = None,
    bias_back: Array | None = None,
    peephole_back: Array | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
    *,
    exact_nan: bool = False,
) -> Result:
    """LSTM, gates in the order input, forget, output, cell; ``x``: [s, b, I].

    With ``bidirectional`` the states are [b, 2 * H], forward half first, and the outputs of the
    reverse pass stand at the time steps they belong to. ``clip`` bounds the cell state.
    """
    names = (recurrent_activation, cell_activation, activation)
    activations = tuple(_activation(name, exact_nan) for name in names)
    x = _in_order(x, direction, "bidirectional")
    directions = [_lstm_direction(weight_ih, weight_hh, bias, peephole)]
    if direction == "bidirectional":
        if weight_ih_back is None or weight_hh_back is None:
            raise refuse("weights of the reverse pass", "none", "weight_ih_back, weight_hh_back")
        directions.append(_lstm_direction(weight_ih_back, weight_hh_back, bias_back, peephole_back))
    layer = Layer(x, (initial_h, initial_c), directions, output_sequence)
    usual = [act.kernel for act in activations] == ["sigmoid", "tanh", "tanh"]
    # What the kernel would clip is the gates.
    if usual and clip is None and all(weights.peephole is None for weights in directions):
        return layer.by_kernel(ops.lstm_sequence)
    return layer.by_loop(functools.partial(_lstm_step, activations, clip))


def _lstm_direction(
    weight_ih: Array, weight_hh: Array, bias: Array | None, peephole: Array | None
) -> Direction:
    return Direction(
        _reordered(weight_ih, _LSTM_GATES),
        _reordered(weight_hh, _LSTM_GATES),
        _bias(bias, _LSTM_GATES, weight_hh),
        None if peephole is None else np.asarray(peephole, np.float32),
    )


def _lstm_step(
    activations: tuple[_Activation, ...],
    clip: float | None,
    weights: Direction,
    inputs: Any,
    states: tuple[Any, ...],
) -> tuple[Any, ...]:
    gate, cell, out = activations
    h, c = states
    peepholes = None if weights.peephole is None else np.split(weights.peephole, 3)

    def opened(inputs: Any, c: Any, index: int) -> Any:
        if peepholes is not None:
            inputs = ops.add(inputs, ops.multiply(c, array_constant(peepholes[index])))
        return gate.apply(inputs)

    gates = ops.add(inputs, product(h, weights.state_weights))
    to_forget, to_input, to_cell, to_output = ops.split(gates, ints(1), 4).outputs()
    kept = ops.multiply(opened(to_forget, c, 1), c)
    c = ops.add(kept, ops.multiply(opened(to_input, c, 0), cell.apply(to_cell)))
    if clip is not None:
        c = nan.kept(c, ops.clamp(c, -clip, clip))
    return ops.multiply(opened(to_output, c, 2), out.apply(c)), c
