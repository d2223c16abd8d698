"""PyTorch's stacks of recurrent layers, composed of MIL's single layers.

PyTorch's gate order is input, forget, cell, output (LSTM) and reset, update, new (GRU). States are
[layers * directions, batch, units]. Parameters are a list: for each layer and direction the weights
of the input [gates * units, width], the weights of the state [gates * units, units], two biases
[gates * units] if any, and the projection [width of the hidden state, units] if any: the hidden
state of an LSTM is then narrower than its cell state.

Source: PyTorch's documentation of ``torch.nn.LSTM``, ``GRU`` and ``RNN``; coremltools' MIL op
reference, ``recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.mil.compose import Var, mb

Array: TypeAlias = NDArray[np.float32]

_LSTM_GATE_ORDER = (0, 1, 3, 2)
"""PyTorch's indices of MIL's gates: input, forget, output, cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The parameters of one layer in one direction.

    Attributes:
        weight_ih: [gates * units, width].
        weight_hh: [gates * units, width of the hidden state].
        bias_ih: [gates * units], None if there are no biases.
        bias_hh: As ``bias_ih``.
        weight_hr: The projection [width of the hidden state, units], None if the stack has none.
    """

    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None = None
    bias_hh: Array | None = None
    weight_hr: Array | None = None

    @property
    def width(self) -> int:
        """The size of the hidden state."""
        return self.weight_hh.shape[1]

    @property
    def biases(self) -> tuple[Array, Array]:
        """Both biases; zeros for a cell without biases."""
        if self.bias_ih is None or self.bias_hh is None:
            zeros = np.zeros(len(self.weight_hh), np.float32)
            return zeros, zeros
        return self.bias_ih, self.bias_hh

    def keywords(self, gates: Sequence[int] = (0,), suffix: str = "") -> dict[str, Array]:
        """Return the arguments of a MIL op, which has the sum of both biases.

        Args:
            gates: PyTorch's index of each gate of the op.
            suffix: Suffix of the argument names.
        """
        arrays = {"weight_ih": self.weight_ih, "weight_hh": self.weight_hh}
        if self.bias_ih is not None and self.bias_hh is not None:
            arrays["bias"] = self.bias_ih + self.bias_hh
        parts = {name: np.split(array, len(gates)) for name, array in arrays.items()}
        return {
            f"{name}{suffix}": np.concatenate([part[gate] for gate in gates])
            for name, part in parts.items()
        }


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacked recurrent layers.

    Attributes:
        cells: For each layer the forward cell, and the backward cell if bidirectional.
        batch_first: Whether sequences are [batch, steps, width] rather than [steps, batch, width].
    """

    cells: Sequence[Sequence[Cell]]
    batch_first: bool

    @classmethod
    def of(
        cls,
        parameters: Sequence[Array],
        *,
        layers: int,
        has_biases: bool,
        is_bidirectional: bool,
        batch_first: bool,
    ) -> Stack:
        """Build a stack from the flat parameters of PyTorch's ops."""
        directions = 2 if is_bidirectional else 1
        size, remainder = divmod(len(parameters), layers * directions)
        names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_biases else ())]
        if remainder or size not in (len(names), len(names) + 1):
            raise ValueError(f"{len(parameters)} parameters for {layers} layers of {directions}")
        if size > len(names):
            names.append("weight_hr")
        parts = [parameters[n : n + size] for n in range(0, len(parameters), size)]
        cells = [Cell(**dict(zip(names, part, strict=True))) for part in parts]
        rows = [cells[n : n + directions] for n in range(0, len(cells), directions)]
        return cls(rows, batch_first)


_Pass: TypeAlias = Callable[[Var, Sequence[Var], Cell], Sequence[Var]]
"""Takes a sequence [steps, batch, width], states [batch, units] and a cell; returns the hidden
states of all steps, and the last value of each state."""


def lstm(x: Var, states: Sequence[Var], stack: Stack) -> tuple[Var, Var, Var]:
    """Emit one ``lstm`` per layer; with a projection, which MIL's op lacks, see ``gru``.

    Args:
        x: The sequence.
        states: The first hidden and the first cell state.
        stack: The layers.

    Returns:
        The hidden states of all steps, the last hidden and the last cell states.
    """
    if stack.cells[0][0].weight_hr is not None:
        steps, last_h, last_c = _run_passes(x, states, stack, _projected_lstm_loop)
        return steps, last_h, last_c
    hidden: list[Var] = []
    cell: list[Var] = []
    x = _steps_first(x, stack)
    for layer, cells in enumerate(stack.cells):
        initial_h, initial_c = (_concat_directions(state, layer, len(cells)) for state in states)
        is_bidirectional = len(cells) > 1
        weights = cells[0].keywords(_LSTM_GATE_ORDER)
        weights |= cells[1].keywords(_LSTM_GATE_ORDER, "_back") if is_bidirectional else {}
        x, last_h, last_c = mb.lstm(
            x=x,
            initial_h=initial_h,
            initial_c=initial_c,
            direction="bidirectional" if is_bidirectional else "forward",
            output_sequence=True,
            **weights,
        )
        hidden += mb.split(x=last_h, num_splits=2, axis=-1) if is_bidirectional else [last_h]
        cell += mb.split(x=last_c, num_splits=2, axis=-1) if is_bidirectional else [last_c]
    return (
        _steps_first(x, stack),
        mb.stack(values=hidden, axis=0),
        mb.stack(values=cell, axis=0),
    )


def rnn(x: Var, states: Sequence[Var], stack: Stack, activation: str) -> tuple[Var, Var]:
    """Emit one ``rnn`` per layer and direction; see ``gru``."""

    def run(x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
        return mb.rnn(
            x=x,
            initial_h=states[0],
            output_sequence=True,
            activation=activation,
            **cell.keywords(),
        )

    steps, last = _run_passes(x, states, stack, run)
    return steps, last


def gru(x: Var, states: Sequence[Var], stack: Stack) -> tuple[Var, Var]:
    """Emit one ``while_loop`` over the steps per layer and direction.

    PyTorch's formula is ``n = tanh(W x + b + r * (U h + c))``; MIL's ``gru`` resets ``h`` before
    the product. From iOS18 on it has PyTorch's as an option, but coremltools' own test of it fails.

    Args:
        x: The sequence.
        states: The first hidden state.
        stack: The layers.

    Returns:
        The hidden states of all steps, and the last hidden states.
    """
    steps, last = _run_passes(x, states, stack, _gru_loop)
    return steps, last


def _gru_loop(x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
    sizes = [2 * cell.width, cell.width]  # reset and update together; new
    bias_ih, bias_hh = _split_gru_biases(cell)

    def step(inputs: Var, states: Sequence[Var]) -> Sequence[Var]:
        (h,) = states
        from_input = mb.split(x=inputs, split_sizes=sizes, axis=-1)
        from_state = mb.linear(x=h, weight=cell.weight_hh, bias=bias_hh)
        from_state = mb.split(x=from_state, split_sizes=sizes, axis=-1)
        gates = mb.sigmoid(x=mb.add(x=from_input[0], y=from_state[0]))
        reset, update = mb.split(x=gates, num_splits=2, axis=-1)
        new = mb.tanh(x=mb.add(x=from_input[1], y=mb.mul(x=reset, y=from_state[1])))
        return [mb.add(x=new, y=mb.mul(x=update, y=mb.sub(x=h, y=new)))]

    return _loop(mb.linear(x=x, weight=cell.weight_ih, bias=bias_ih), states, step)


def _projected_lstm_loop(x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
    bias_ih, bias_hh = cell.biases

    def step(inputs: Var, states: Sequence[Var]) -> Sequence[Var]:
        h, c = states
        gates = mb.add(x=inputs, y=mb.linear(x=h, weight=cell.weight_hh))
        input_gate, forget_gate, new, output_gate = mb.split(x=gates, num_splits=4, axis=-1)
        input_gate = mb.mul(x=mb.sigmoid(x=input_gate), y=mb.tanh(x=new))
        c = mb.add(x=mb.mul(x=mb.sigmoid(x=forget_gate), y=c), y=input_gate)
        h = mb.mul(x=mb.sigmoid(x=output_gate), y=mb.tanh(x=c))
        return [mb.linear(x=h, weight=cell.weight_hr), c]

    products = mb.linear(x=x, weight=cell.weight_ih, bias=bias_ih + bias_hh)
    return _loop(products, states, step)


def _loop(
    products: Var,
    states: Sequence[Var],
    step: Callable[[Var, Sequence[Var]], Sequence[Var]],
) -> Sequence[Var]:
    """Emit a ``while_loop`` over the steps of a sequence.

    Args:
        products: Of inputs and weights [steps, batch, gates * units]; computed before the loop,
            because they do not depend on states.
        states: Initial states [batch, units]; the first is the hidden state.
        step: Emits one step: takes its products and the states, returns the next states.

    Returns:
        The hidden states of all steps, and the last value of each state.
    """
    # Initial values are arbitrary: every row is written before it is read.
    width, full_dims = states[0].shape[-1], [True, True, False]
    rows = mb.slice_by_index(
        x=products, begin=[0, 0, 0], end=[0, 0, width], begin_mask=full_dims, end_mask=full_dims
    )

    def step_with_row(*values: Var) -> Sequence[Var]:
        next_states = step(values[-1], values[:-1])
        return [*next_states, next_states[0]]

    *last, rows = loop_over_rows(states, [products], [rows], step_with_row)
    return rows, *last


def loop_over_rows(
    carry: Sequence[Var],
    sequences: Sequence[Var],
    stacks: Sequence[Var],
    step: Callable[..., Sequence[Var]],
) -> Sequence[Var]:
    """Emit a ``while_loop`` over the rows of sequences.

    Args:
        carry: First values of the loop variables.
        sequences: Tensors of one size along their first dimension.
        stacks: Tensors of that size, whose rows are overwritten.
        step: Takes the carry and a row of each sequence; returns the next carry and a row of each
            stack.

    Returns:
        The last carry, and the stacks.
    """
    count = mb.gather(x=mb.shape(x=sequences[0]), indices=0, axis=0)
    states = len(carry)

    def has_next(index: Var, *_: Var) -> Var:
        return mb.less(x=index, y=count)

    def iteration(index: Var, *values: Var) -> tuple[Var, ...]:
        rows = [mb.gather(x=sequence, indices=index, axis=0) for sequence in sequences]
        outputs = step(*values[:states], *rows)
        at = mb.expand_dims(x=index, axes=[0])
        updates = [mb.expand_dims(x=row, axes=[0]) for row in outputs[states:]]
        updated_stacks = [
            mb.scatter(data=stack, indices=at, updates=update, axis=0, mode="update")
            for stack, update in zip(values[states:], updates, strict=True)
        ]
        return (mb.add(x=index, y=1), *outputs[:states], *updated_stacks)

    loop_vars = (0, *carry, *stacks)
    _, *results = mb.while_loop(_cond=has_next, _body=iteration, loop_vars=loop_vars)
    return results


def _split_gru_biases(cell: Cell) -> tuple[Array, Array]:
    """Return a bias for the products of the inputs and a bias for the products of the state.

    Only the state's bias of the new value stays separate, because the reset gate scales it.
    """
    bias_ih, bias_hh = cell.biases
    new_bias = np.zeros_like(bias_hh)
    new_bias[2 * cell.width :] = bias_hh[2 * cell.width :]
    return bias_ih + bias_hh - new_bias, new_bias


def _run_passes(x: Var, states: Sequence[Var], stack: Stack, run: _Pass) -> tuple[Var, ...]:
    """Run every layer once per direction and concatenate the directions."""
    last_states: list[Sequence[Var]] = []
    x = _steps_first(x, stack)
    for layer, cells in enumerate(stack.cells):
        hidden: list[Var] = []
        for direction, cell in enumerate(cells):
            sequence = mb.reverse(x=x, axes=[0]) if direction else x
            initial = [_row(state, layer * len(cells) + direction) for state in states]
            steps, *ends = run(sequence, initial, cell)
            hidden.append(mb.reverse(x=steps, axes=[0]) if direction else steps)
            last_states.append(ends)
        x = mb.concat(values=hidden, axis=-1) if len(hidden) > 1 else hidden[0]
    return _steps_first(x, stack), *(
        mb.stack(values=states_of_kind, axis=0) for states_of_kind in zip(*last_states, strict=True)
    )


def _steps_first(x: Var, stack: Stack) -> Var:
    """Swap steps and batch if PyTorch's sequences are batch-first; its own inverse."""
    return mb.transpose(x=x, perm=[1, 0, 2]) if stack.batch_first else x


def _row(state: Var, row: int) -> Var:
    """Return [batch, units] of one layer in one direction."""
    return mb.slice_by_index(
        x=state,
        begin=[row, 0, 0],
        end=[row + 1, 0, 0],
        begin_mask=[False, True, True],
        end_mask=[False, True, True],
        squeeze_mask=[True, False, False],
    )


def _concat_directions(state: Var, layer: int, directions: int) -> Var:
    """Return [batch, directions * units] of one layer."""
    rows = [_row(state, layer * directions + direction) for direction in range(directions)]
    return mb.concat(values=rows, axis=-1) if directions > 1 else rows[0]
