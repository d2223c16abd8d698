"""Stacks of recurrent layers, as PyTorch has them, made of MIL's single layers.

PyTorch's gates stand in the order input, forget, cell, output (LSTM) and reset, update, new (GRU).
States are [layers * directions, batch, units], parameters a list: for each layer and direction the
weights of the input [gates * units, width], those of the state [gates * units, units], a bias
[gates * units] for each if there are biases, and the projection [width of the hidden state, units]
if there is one: the hidden state of an LSTM is then narrower than its cell state.

Source: PyTorch's documentation of ``torch.nn.LSTM``, ``GRU`` and ``RNN``; coremltools' MIL op
reference, ``recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]
Var: TypeAlias = Any
"""A value of a MIL program under construction."""

_LSTM_GATES = (0, 1, 3, 2)
"""Where PyTorch has MIL's gates, which are in the order input, forget, output, cell."""


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
        """Both biases, zeros if there are none."""
        if self.bias_ih is None or self.bias_hh is None:
            zeros = np.zeros(len(self.weight_hh), np.float32)
            return zeros, zeros
        return self.bias_ih, self.bias_hh

    def keywords(self, gates: Sequence[int] = (0,), suffix: str = "") -> dict[str, Array]:
        """Return the arguments of a MIL op, whose two biases are one.

        Args:
            gates: The place here of each gate of the op.
            suffix: Ends their names.
        """
        given = {"weight_ih": self.weight_ih, "weight_hh": self.weight_hh}
        if self.bias_ih is not None and self.bias_hh is not None:
            given["bias"] = self.bias_ih + self.bias_hh
        parts = {name: np.split(array, len(gates)) for name, array in given.items()}
        return {
            f"{name}{suffix}": np.concatenate([part[gate] for gate in gates])
            for name, part in parts.items()
        }


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers above each other.

    Attributes:
        cells: For each layer the cell that runs forward, and perhaps one that runs backward.
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
        """Sort the parameters of PyTorch's ops."""
        directions = 2 if is_bidirectional else 1
        size, rest = divmod(len(parameters), layers * directions)
        names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_biases else ())]
        if rest or size not in (len(names), len(names) + 1):
            raise ValueError(f"{len(parameters)} parameters for {layers} layers of {directions}")
        if size > len(names):
            names.append("weight_hr")
        parts = [parameters[n : n + size] for n in range(0, len(parameters), size)]
        cells = [Cell(**dict(zip(names, part, strict=True))) for part in parts]
        rows = [cells[n : n + directions] for n in range(0, len(cells), directions)]
        return cls(rows, batch_first)


_Pass: TypeAlias = Callable[[Var, Sequence[Var], Cell], Sequence[Var]]
"""A sequence [steps, batch, width], states [batch, units] and a cell to the hidden states of all
steps, and the last of each state."""


def lstm(mb: Any, x: Var, states: Sequence[Var], stack: Stack) -> tuple[Var, Var, Var]:
    """Emit one ``lstm`` per layer; with a projection, which MIL's op lacks, see ``gru``.

    Args:
        mb: coremltools' builder.
        x: The sequence.
        states: The first hidden and the first cell state.
        stack: The layers.

    Returns:
        The hidden states of all steps, the last hidden and the last cell states.
    """
    if stack.cells[0][0].weight_hr is not None:
        steps, last_h, last_c = _by_pass(mb, x, states, stack, partial(_projected_lstm_loop, mb))
        return steps, last_h, last_c
    hidden: list[Var] = []
    cell: list[Var] = []
    x = _steps_first(mb, x, stack)
    for layer, cells in enumerate(stack.cells):
        initial_h, initial_c = (_joined(mb, state, layer, len(cells)) for state in states)
        both = len(cells) > 1
        weights = cells[0].keywords(_LSTM_GATES)
        weights |= cells[1].keywords(_LSTM_GATES, "_back") if both else {}
        x, last_h, last_c = mb.lstm(
            x=x,
            initial_h=initial_h,
            initial_c=initial_c,
            direction="bidirectional" if both else "forward",
            output_sequence=True,
            **weights,
        )
        hidden += mb.split(x=last_h, num_splits=2, axis=-1) if both else [last_h]
        cell += mb.split(x=last_c, num_splits=2, axis=-1) if both else [last_c]
    return (
        _steps_first(mb, x, stack),
        mb.stack(values=hidden, axis=0),
        mb.stack(values=cell, axis=0),
    )


def rnn(mb: Any, x: Var, state: Var, stack: Stack, activation: str) -> tuple[Var, Var]:
    """Emit one ``rnn`` per layer and direction; see ``gru``."""

    def run(x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
        return mb.rnn(
            x=x,
            initial_h=states[0],
            output_sequence=True,
            activation=activation,
            **cell.keywords(),
        )

    steps, last = _by_pass(mb, x, [state], stack, run)
    return steps, last


def gru(mb: Any, x: Var, state: Var, stack: Stack) -> tuple[Var, Var]:
    """Emit one ``while_loop`` over the steps per layer and direction.

    MIL's ``gru`` has another formula: PyTorch's reset gate scales the product of the state, with
    its bias. From iOS18 on the op has it as an option, with which coremltools' own test fails.

    Args:
        mb: coremltools' builder.
        x: The sequence.
        state: The first hidden state.
        stack: The layers.

    Returns:
        The hidden states of all steps, and the last ones.
    """
    steps, last = _by_pass(mb, x, [state], stack, partial(_gru_loop, mb))
    return steps, last


def _gru_loop(mb: Any, x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
    sizes = [2 * cell.width, cell.width]  # reset and update together; new
    bias_ih, bias_hh = _gru_biases(cell)

    def step(inputs: Var, states: Sequence[Var]) -> Sequence[Var]:
        (h,) = states
        given = mb.split(x=inputs, split_sizes=sizes, axis=-1)
        own = mb.linear(x=h, weight=cell.weight_hh, bias=bias_hh)
        own = mb.split(x=own, split_sizes=sizes, axis=-1)
        gates = mb.sigmoid(x=mb.add(x=given[0], y=own[0]))
        reset, update = mb.split(x=gates, num_splits=2, axis=-1)
        new = mb.tanh(x=mb.add(x=given[1], y=mb.mul(x=reset, y=own[1])))
        return [mb.add(x=new, y=mb.mul(x=update, y=mb.sub(x=h, y=new)))]

    return _loop(mb, mb.linear(x=x, weight=cell.weight_ih, bias=bias_ih), states, step)


def _projected_lstm_loop(mb: Any, x: Var, states: Sequence[Var], cell: Cell) -> Sequence[Var]:
    bias_ih, bias_hh = cell.biases

    def step(inputs: Var, states: Sequence[Var]) -> Sequence[Var]:
        h, c = states
        gates = mb.add(x=inputs, y=mb.linear(x=h, weight=cell.weight_hh))
        taken, kept, new, shown = mb.split(x=gates, num_splits=4, axis=-1)
        taken = mb.mul(x=mb.sigmoid(x=taken), y=mb.tanh(x=new))
        c = mb.add(x=mb.mul(x=mb.sigmoid(x=kept), y=c), y=taken)
        h = mb.mul(x=mb.sigmoid(x=shown), y=mb.tanh(x=c))
        return [mb.linear(x=h, weight=cell.weight_hr), c]

    products = mb.linear(x=x, weight=cell.weight_ih, bias=bias_ih + bias_hh)
    return _loop(mb, products, states, step)


def _loop(
    mb: Any,
    products: Var,
    states: Sequence[Var],
    step: Callable[[Var, Sequence[Var]], Sequence[Var]],
) -> Sequence[Var]:
    """Emit a ``while_loop`` over the steps of a sequence.

    Args:
        mb: coremltools' builder.
        products: Those of the inputs [steps, batch, gates * units]. No step waits for them, so all
            are computed at once.
        states: The first ones [batch, units]; the first of them is the hidden state.
        step: Emits one step: from its products and the states to the next states.

    Returns:
        The hidden states of all steps, and the last of each state.
    """
    count = mb.gather(x=mb.shape(x=products), indices=0, axis=0)
    # Every row is written before it is read: any tensor of the shape will do.
    width, every = states[0].shape[-1], [True, True, False]
    rows = mb.slice_by_index(
        x=products, begin=[0, 0, 0], end=[0, 0, width], begin_mask=every, end_mask=every
    )

    def is_left(index: Var, *_: Var) -> Var:
        return mb.less(x=index, y=count)

    def turn(index: Var, rows: Var, *states: Var) -> tuple[Var, ...]:
        following = step(mb.gather(x=products, indices=index, axis=0), states)
        place, row = mb.expand_dims(x=index, axes=[0]), mb.expand_dims(x=following[0], axes=[0])
        rows = mb.scatter(data=rows, indices=place, updates=row, axis=0, mode="update")
        return (mb.add(x=index, y=1), rows, *following)

    _, rows, *last = mb.while_loop(_cond=is_left, _body=turn, loop_vars=(0, rows, *states))
    return rows, *last


def _gru_biases(cell: Cell) -> tuple[Array, Array]:
    """Return the bias of the inputs' products and that of the state's.

    The reset gate scales the state's of the new value; the others are terms of one sum.
    """
    bias_ih, bias_hh = cell.biases
    scaled = np.zeros_like(bias_hh)
    scaled[2 * cell.width :] = bias_hh[2 * cell.width :]
    return bias_ih + bias_hh - scaled, scaled


def _by_pass(mb: Any, x: Var, states: Sequence[Var], stack: Stack, run: _Pass) -> tuple[Var, ...]:
    """Run every layer in every direction by itself."""
    last: list[Sequence[Var]] = []
    x = _steps_first(mb, x, stack)
    for layer, cells in enumerate(stack.cells):
        hidden: list[Var] = []
        for direction, cell in enumerate(cells):
            sequence = mb.reverse(x=x, axes=[0]) if direction else x
            initial = [_row(mb, state, layer * len(cells) + direction) for state in states]
            steps, *ends = run(sequence, initial, cell)
            hidden.append(mb.reverse(x=steps, axes=[0]) if direction else steps)
            last.append(ends)
        x = mb.concat(values=hidden, axis=-1) if len(hidden) > 1 else hidden[0]
    return _steps_first(mb, x, stack), *(
        mb.stack(values=each, axis=0) for each in zip(*last, strict=True)
    )


def _steps_first(mb: Any, x: Var, stack: Stack) -> Var:
    """Exchange steps and batch if the batch is first in PyTorch; this works both ways."""
    return mb.transpose(x=x, perm=[1, 0, 2]) if stack.batch_first else x


def _row(mb: Any, state: Var, row: int) -> Var:
    """Return [batch, units] of one layer in one direction."""
    return mb.slice_by_index(
        x=state,
        begin=[row, 0, 0],
        end=[row + 1, 0, 0],
        begin_mask=[False, True, True],
        end_mask=[False, True, True],
        squeeze_mask=[True, False, False],
    )


def _joined(mb: Any, state: Var, layer: int, directions: int) -> Var:
    """Return [batch, directions * units] of one layer."""
    rows = [_row(mb, state, layer * directions + direction) for direction in range(directions)]
    return mb.concat(values=rows, axis=-1) if directions > 1 else rows[0]
