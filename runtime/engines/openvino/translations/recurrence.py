"""A recurrent layer over the steps of its sequence, by a kernel for all steps or by a loop.

Both forms read the weights in the order of OpenVINO's kernels, for D directions, G gates, H units
and I features. On an LSTM of 64 steps and 256 units the loop takes 1.3 times as long as the kernel,
and nearly twice as long when its sizes are known only at run time.

Source: OpenVINO's operation specifications ``LSTMSequence-5``, ``GRUSequence-5``, ``RNNSequence-5``
and ``Loop-5``.
"""

from __future__ import annotations

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
    output,
    reshape,
)
from coreml_delegate.runtime.engines.openvino.registry import Result, Tensor
from coreml_delegate.runtime.engines.openvino.translations.slicing import reverse

Weights: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Direction:
    """The parameters of one pass over time.

    Attributes:
        input_weights: [G * H, I].
        state_weights: [G * H, H].
        bias: [G * H], or longer where a kernel wants more.
        peephole: [3 * H], for the input, forget and output gate, or None.
    """

    input_weights: Weights
    state_weights: Weights
    bias: Weights
    peephole: Weights | None = None

    @property
    def units(self) -> int:
        """H."""
        return self.state_weights.shape[1]


Step: TypeAlias = Callable[[Direction, Any, tuple[Any, ...]], tuple[Any, ...]]
"""One step: the input's products [b, G * H], biases included, and the states to the new states.

States are [b, H]; the first is the hidden one, which the layer gives out.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and what it is applied to.

    Attributes:
        x: [s, b, I].
        states: The initial states, [b, D * H] each.
        directions: One, or two: the second runs from the last step to the first.
        output_sequence: Whether to give out the hidden state of every step or of the last alone.
    """

    x: Tensor
    states: tuple[Tensor, ...]
    directions: Sequence[Direction]
    output_sequence: bool

    def by_kernel(self, make: Callable[..., Any], **options: Any) -> Result:
        """Hidden states [s or 1, b, D * H] and last states by the sequence op that ``make`` adds.

        Args:
            make: Function of the opset that adds it.
            options: More of its arguments.
        """
        count, units = len(self.directions), self.directions[0].units
        by_batch = ops.transpose(self.x, ints((1, 0, 2)))
        node = make(
            by_batch,
            *(reshape(state, [-1, count, units]) for state in self.states),
            # From the shape of the very input: so the plugin sees that no sequence ends early.
            ops.broadcast(dim_of(by_batch, 1), ops.unsqueeze(dim_of(by_batch, 0), ints(0))),
            _stacked([direction.input_weights for direction in self.directions]),
            _stacked([direction.state_weights for direction in self.directions]),
            _stacked([direction.bias for direction in self.directions]),
            units,
            "forward" if count == 1 else "bidirectional",
            **options,
        )
        hidden, *last = node.outputs()  # [b, D, s, H] and [b, D, H] each
        last = [reshape(state, [-1, count * units]) for state in last]
        by_step = ops.transpose(hidden, ints((2, 0, 1, 3)))
        joined = ops.reshape(by_step, ints((0, 0, count * units)), special_zero=True)
        return self._results(joined, last)

    def by_loop(self, step: Step) -> Result:
        """Hidden states [s or 1, b, D * H] and last states by a loop over ``step``."""
        count, units = len(self.directions), self.directions[0].units
        states = [
            ops.split(reshape(state, [-1, count * units]), ints(1), count).outputs()
            for state in self.states
        ]
        passes: list[tuple[Any, ...]] = []
        for index, direction in enumerate(self.directions):
            x = reverse(self.x, (0,)) if index else self.x
            hidden, *last = _pass(x, [state[index] for state in states], direction, step)
            passes.append((reverse(hidden, (0,)) if index else hidden, *last))
        hidden, *last = (ops.concat(list(values), -1) for values in zip(*passes, strict=True))
        return self._results(hidden, last)

    def _results(self, hidden: Any, last: list[Any]) -> Result:
        return (hidden if self.output_sequence else ops.unsqueeze(last[0], ints(0))), *last


def _stacked(arrays: Sequence[Weights]) -> Any:
    return array_constant(np.stack(arrays))


def product(x: Tensor, weights: Weights) -> Any:
    """``x`` [*, K] by weights [N, K]."""
    return ops.matmul(x, array_constant(weights), False, True)


def _pass(x: Tensor, states: list[Tensor], direction: Direction, step: Step) -> tuple[Any, ...]:
    """Hidden states [s, b, H] and last states [b, H] of one direction."""
    # No step waits for the products of the inputs: all are computed at once.
    bias = array_constant(direction.bias[: len(direction.input_weights)])
    products = output(ops.add(product(x, direction.input_weights), bias))
    at, inputs, *before = (
        ov.op.Parameter(element_type(value), output(value).get_partial_shape())
        for value in (ints(0), products, *states)
    )
    # The loop could hand out slices of the products, but the plugin may then let a result share
    # memory with its slice, which the next one overwrites before the result has become the state.
    after = step(direction, ops.gather(inputs, at, ints(0)), tuple(before))
    going_on, hidden, *results = (
        ops.result(value) for value in (_true(), ops.unsqueeze(after[0], ints(0)), *after)
    )
    # The stub binds the constructor to the base class.
    make_model: Any = ov.Model
    loop = ops.loop(dim_of(x, 0), _true())
    loop.set_function(make_model([going_on, hidden, *results], [at, inputs, *before], "step"))
    loop.set_special_body_ports([0, 0])  # the step's index among inputs, its condition in outputs
    loop.set_invariant_input(inputs, products)
    for parameter, state, result in zip(before, states, results, strict=True):
        loop.set_merged_input(parameter, output(state), output(result))
    return (
        loop.get_concatenated_slices(output(hidden), 0, 1, 1, -1, 0),
        *(loop.get_iter_value(output(result), -1) for result in results),
    )


def _true() -> Any:
    return ops.constant(np.asarray(True))
