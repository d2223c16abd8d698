"""Recurrent layers: one kernel for all steps where that is faster, else a loop over the steps.

Kernels support only the usual activations; a loop supports all. Both have the weights in the gate
order of OpenVINO's kernels, for D directions, G gates, H units and I features. On an LSTM of 64
steps and 256 units the loop takes 1.3 times as long as the kernel, and nearly twice as long when
its sizes are known only at run time.

Source: coremltools' MIL op reference, ``recurrent``; Core ML's ``NeuralNetwork.proto`` for the
inputs of peepholes and the meaning of ``clip``; OpenVINO's operation specifications
``LSTMSequence-5``, ``GRUSequence-5``, ``RNNSequence-5`` and ``Loop-5``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    array_constant,
    dim_of,
    element_type,
    ints,
    make_model,
    output,
    reshape,
    with_equal_sizes,
    with_size,
)
from coreml_delegate.runtime.engines.openvino.plugin import nan
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.translations.activation import sigmoid_hard
from coreml_delegate.runtime.engines.openvino.translations.slicing import reverse
from coreml_delegate.runtime.engines.openvino.values import Array, Result, Tensor, refusal

# Indices of MIL's gates in the order of OpenVINO's kernels.
_GRU_GATES = (2, 0, 1)  # reset, output, update -> update, reset, output
_LSTM_GATES = (1, 0, 3, 2)  # input, forget, output, cell -> forget, input, cell, output

# At batch 1 and 256 units the GRU kernel takes twice as long as the loop. Without ``reset_after``
# it takes 1.7 times as long at 64 units already, and is not used.
_GRU_KERNEL_UNITS = 192


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation as a subgraph, and its name in OpenVINO's kernels, if they support it."""

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


# No kernel propagates NaN through ReLU, so this has no kernel name.
_EXACT_RELU = _Activation(lambda x: nan.keep_nan(x, ops.relu(x)))


def _activation(name: str, exact_nan: bool = False) -> _Activation:
    if name.lower() not in _ACTIVATIONS:
        raise refusal("activation of a recurrent layer", name, ", ".join(_ACTIVATIONS))
    if exact_nan and name.lower() == "relu":
        return _EXACT_RELU
    return _ACTIVATIONS[name.lower()]


def _order_steps(x: Tensor, direction: str, *more: str) -> Any:
    """Return ``x`` [s, b, I] in order of computation, which is also the order of the outputs."""
    allowed = ("forward", "reverse", *more)
    if direction not in allowed:
        raise refusal("direction of a recurrent layer", direction, ", ".join(allowed))
    return reverse(x, (0,)) if direction == "reverse" else x


def _reorder_gates(array: Array, order: Sequence[int]) -> _Weights:
    gates = np.split(np.asarray(array, np.float32), len(order))
    return np.concatenate([gates[gate] for gate in order])


def _reorder_bias(array: Array | None, order: Sequence[int], weights: Array) -> _Weights:
    """Return the bias with its gates reordered; zeros for the rows of ``weights`` if it is None."""
    return _reorder_gates(np.zeros(len(weights), np.float32) if array is None else array, order)


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
    """Elman layer, ``h <- act(W_ih x + W_hh h + b)``; ``x``: [s, b, I], ``initial_h``: [b, H]."""
    act = _activation(activation, exact_nan)
    only = (0,)
    weights = _Direction(
        _reorder_gates(weight_ih, only),
        _reorder_gates(weight_hh, only),
        _reorder_bias(bias, only, weight_hh),
    )
    layer = _Layer(_order_steps(x, direction), (initial_h,), (weights,), output_sequence)
    if act.kernel is not None:
        return layer.by_kernel(ops.rnn_sequence, activations=[act.kernel])
    return layer.by_loop(functools.partial(_rnn_step, act))


def _rnn_step(
    act: _Activation, weights: _Direction, inputs: Any, states: tuple[Any, ...]
) -> tuple[Any, ...]:
    (h,) = states
    return (act.apply(ops.add(inputs, _product(h, weights.state_weights))),)


@translation("gru")
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
    """GRU, ``h <- (1 - z) n + z h``; gates in the order reset r, output n, update z.

    The reset gate scales the state, ``W_hh (r h)``, or its product if ``reset_after``, ``r (W_hh
    h)``. ``bias`` is added to the product with the state, ``input_bias`` to the product with the
    input. ``x``: [s, b, I], ``initial_h``: [b, H].
    """
    gate, act = (_activation(name, exact_nan) for name in (recurrent_activation, activation))
    biases = _gru_biases(
        _reorder_bias(input_bias, _GRU_GATES, weight_ih),
        _reorder_bias(bias, _GRU_GATES, weight_hh),
        reset_after,
    )
    weights = _Direction(
        _reorder_gates(weight_ih, _GRU_GATES), _reorder_gates(weight_hh, _GRU_GATES), biases
    )
    layer = _Layer(_order_steps(x, direction), (initial_h,), (weights,), output_sequence)
    usual = (gate.kernel, act.kernel) == ("sigmoid", "tanh")
    if usual and reset_after and weights.units <= _GRU_KERNEL_UNITS:
        return layer.by_kernel(ops.gru_sequence, linear_before_reset=True)
    return layer.by_loop(functools.partial(_gru_step, gate, act, reset_after))


def _gru_biases(input_bias: _Weights, state_bias: _Weights, reset_after: bool) -> _Weights:
    """Return the sum [3 * H]; with ``reset_after`` [4 * H], as r scales the state bias of n."""
    if not reset_after:
        return input_bias + state_bias
    gates = 2 * len(state_bias) // 3
    return np.concatenate(
        [input_bias[:gates] + state_bias[:gates], input_bias[gates:], state_bias[gates:]]
    )


def _gru_step(
    gate: _Activation,
    act: _Activation,
    reset_after: bool,
    weights: _Direction,
    inputs: Any,
    states: tuple[Any, ...],
) -> tuple[Any, ...]:
    (h,) = states
    units = weights.units
    gate_weights, output_weights = np.split(weights.state_weights, [2 * units])
    sizes = ints([2 * units, units])
    gate_inputs, output_inputs = ops.variadic_split(inputs, ints(1), sizes).outputs()
    gates = gate.apply(ops.add(gate_inputs, _product(h, gate_weights)))
    update, reset = ops.split(gates, ints(1), 2).outputs()
    if reset_after:
        bias = array_constant(weights.bias[3 * units :])
        recurrent = ops.multiply(reset, ops.add(_product(h, output_weights), bias))
    else:
        recurrent = _product(ops.multiply(reset, h), output_weights)
    new = act.apply(ops.add(output_inputs, recurrent))
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
    reverse pass are in the order of the inputs. ``clip`` bounds the cell state.
    """
    names = (recurrent_activation, cell_activation, activation)
    activations = tuple(_activation(name, exact_nan) for name in names)
    x = _order_steps(x, direction, "bidirectional")
    directions = [_lstm_direction(weight_ih, weight_hh, bias, peephole)]
    if direction == "bidirectional":
        if weight_ih_back is None or weight_hh_back is None:
            raise refusal("weights of the reverse pass", "none", "weight_ih_back, weight_hh_back")
        directions.append(_lstm_direction(weight_ih_back, weight_hh_back, bias_back, peephole_back))
    layer = _Layer(x, (initial_h, initial_c), directions, output_sequence)
    usual = [act.kernel for act in activations] == ["sigmoid", "tanh", "tanh"]
    # The kernel would clip the gates, not the cell state.
    if usual and clip is None and all(weights.peephole is None for weights in directions):
        return layer.by_kernel(ops.lstm_sequence)
    return layer.by_loop(functools.partial(_lstm_step, activations, clip))


def _lstm_direction(
    weight_ih: Array, weight_hh: Array, bias: Array | None, peephole: Array | None
) -> _Direction:
    return _Direction(
        _reorder_gates(weight_ih, _LSTM_GATES),
        _reorder_gates(weight_hh, _LSTM_GATES),
        _reorder_bias(bias, _LSTM_GATES, weight_hh),
        None if peephole is None else np.asarray(peephole, np.float32),
    )


def _lstm_step(
    activations: tuple[_Activation, ...],
    clip: float | None,
    weights: _Direction,
    inputs: Any,
    states: tuple[Any, ...],
) -> tuple[Any, ...]:
    gate, cell, out = activations
    h, c = states
    peepholes = None if weights.peephole is None else np.split(weights.peephole, 3)

    def open_gate(inputs: Any, c: Any, index: int) -> Any:
        if peepholes is not None:
            inputs = ops.add(inputs, ops.multiply(c, array_constant(peepholes[index])))
        return gate.apply(inputs)

    gates = ops.add(inputs, _product(h, weights.state_weights))
    to_forget, to_input, to_cell, to_output = ops.split(gates, ints(1), 4).outputs()
    old_part = ops.multiply(open_gate(to_forget, c, 1), c)
    c = ops.add(old_part, ops.multiply(open_gate(to_input, c, 0), cell.apply(to_cell)))
    if clip is not None:
        c = nan.keep_nan(c, ops.clamp(c, -clip, clip))
    return ops.multiply(open_gate(to_output, c, 2), out.apply(c)), c


# --- a layer over the steps of its sequence ------------------------------------------------------

_Weights: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Direction:
    """The parameters of one pass over time.

    Attributes:
        input_weights: [G * H, I].
        state_weights: [G * H, H].
        bias: [G * H], or longer where a kernel needs more.
        peephole: [3 * H], for the input, forget and output gate, or None.
    """

    input_weights: _Weights
    state_weights: _Weights
    bias: _Weights
    peephole: _Weights | None = None

    @property
    def units(self) -> int:
        """Number of units, H."""
        return self.state_weights.shape[1]


_Step: TypeAlias = Callable[[_Direction, Any, tuple[Any, ...]], tuple[Any, ...]]
"""One step: takes weights, ``W_ih x + bias`` [b, G * H] and states [b, H]; returns the new states.

The first state is the hidden state, which the layer returns.
"""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer and its inputs.

    Attributes:
        x: [s, b, I].
        states: The initial states, [b, D * H] each.
        directions: One or two; the second runs from the last step to the first.
        output_sequence: Whether to return the hidden state of every step or only of the last.
    """

    x: Tensor
    states: tuple[Tensor, ...]
    directions: Sequence[_Direction]
    output_sequence: bool

    def by_kernel(self, make: Callable[..., Any], **options: Any) -> Result:
        """Return hidden states [s or 1, b, D * H] and last states by a sequence op of OpenVINO."""
        count, units = len(self.directions), self.directions[0].units
        x, states = self._checked_inputs()
        by_batch = ops.transpose(x, ints((1, 0, 2)))
        node = make(
            by_batch,
            *(reshape(state, [-1, count, units]) for state in states),
            # The lengths come from this input's shape, so the plugin sees that they are all full.
            ops.broadcast(dim_of(by_batch, 1), ops.unsqueeze(dim_of(by_batch, 0), ints(0))),
            array_constant(np.stack([side.input_weights for side in self.directions])),
            array_constant(np.stack([side.state_weights for side in self.directions])),
            array_constant(np.stack([side.bias for side in self.directions])),
            units,
            "forward" if count == 1 else "bidirectional",
            **options,
        )
        hidden, *last = node.outputs()  # [b, D, s, H] and [b, D, H] each
        last = [reshape(state, [-1, count * units]) for state in last]
        by_step = ops.transpose(hidden, ints((2, 0, 1, 3)))
        joined = ops.reshape(by_step, ints((0, 0, count * units)), special_zero=True)
        return self._results(joined, last)

    def by_loop(self, step: _Step) -> Result:
        """Return hidden states [s or 1, b, D * H] and last states by a loop over ``step``."""
        count, units = len(self.directions), self.directions[0].units
        x, initial = self._checked_inputs()
        states = [
            ops.split(reshape(state, [-1, count * units]), ints(1), count).outputs()
            for state in initial
        ]
        passes: list[tuple[Any, ...]] = []
        for index, direction in enumerate(self.directions):
            steps = reverse(x, (0,)) if index else x
            hidden, *last = _pass(steps, [state[index] for state in states], direction, step)
            passes.append((reverse(hidden, (0,)) if index else hidden, *last))
        hidden, *last = (ops.concat(list(values), -1) for values in zip(*passes, strict=True))
        return self._results(hidden, last)

    def _checked_inputs(self) -> tuple[Tensor, list[Tensor]]:
        """Return ``x`` and the initial states; computing them fails unless all sizes fit."""
        x = with_size(self.x, 2, self.directions[0].input_weights.shape[1])
        units = sum(direction.units for direction in self.directions)
        states: list[Tensor] = []
        for state in self.states:
            x, fitting = with_equal_sizes(x, 1, state, 0)
            states.append(with_size(fitting, 1, units))
        return x, states

    def _results(self, hidden: Any, last: list[Any]) -> Result:
        return (hidden if self.output_sequence else ops.unsqueeze(last[0], ints(0))), *last


def _product(x: Tensor, weights: _Weights) -> Any:
    """Return ``x @ weights.T`` for ``x`` [*, K] and ``weights`` [N, K]."""
    return ops.matmul(x, array_constant(weights), False, True)


def _pass(x: Tensor, states: list[Tensor], direction: _Direction, step: _Step) -> tuple[Any, ...]:
    """Return hidden states [s, b, H] and last states [b, H] of one direction."""
    # Products with the inputs do not depend on states: one product computes them for all steps.
    bias = array_constant(direction.bias[: len(direction.input_weights)])
    products = output(ops.add(_product(x, direction.input_weights), bias))
    number, inputs, *before = (
        ov.op.Parameter(element_type(value), output(value).get_partial_shape())
        for value in (ints(0), products, *states)
    )
    # A sliced input of the loop would do, but the plugin may then let a result share memory with
    # its slice, which the next slice overwrites before the result becomes the state.
    after = step(direction, ops.gather(inputs, number, ints(0)), tuple(before))
    goes_on, hidden, *results = (
        ops.result(value) for value in (_true(), ops.unsqueeze(after[0], ints(0)), *after)
    )
    loop = ops.loop(dim_of(x, 0), _true())
    loop.set_function(make_model([goes_on, hidden, *results], [number, inputs, *before], "step"))
    loop.set_special_body_ports([0, 0])  # input of the step number, output of the condition
    loop.set_invariant_input(inputs, products)
    for parameter, state, result in zip(before, states, results, strict=True):
        loop.set_merged_input(parameter, output(state), output(result))
    return (
        loop.get_concatenated_slices(output(hidden), 0, 1, 1, -1, 0),
        *(loop.get_iter_value(output(result), -1) for result in results),
    )


def _true() -> Any:
    return ops.constant(np.asarray(True))
