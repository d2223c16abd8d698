"""The inputs and outputs of a method: their names, and which outputs are new values of inputs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from coreml_delegate.runtime.program.plan import MethodInfo
from coreml_delegate.runtime.program.states import written_in_place
from coreml_delegate.value_names import OUTPUT, read_inputs, read_outputs

_MUTATED = "mutated_input"


def mutated_inputs(method: MethodInfo) -> dict[int, int]:
    """Find the outputs of a method that are the new value of one of its inputs.

    Returns:
        Position of the input by position of the output. Exporters put these outputs first.
    """
    written = written_in_place(method)
    return {
        position: method.inputs.index(index)
        for position, index in enumerate(method.outputs)
        if index in written and index in method.inputs
    }


def input_names(method: MethodInfo) -> tuple[str, ...]:
    """Return the names of the inputs, in order: their paths, or positions if there are no paths."""
    count = len(method.inputs)
    return tuple(read_inputs(method.input_nesting, count) or map(str, range(count)))


def output_names(method: MethodInfo) -> tuple[str, ...]:
    """Return the names of the outputs, in order.

    Returns:
        What the model returns by its path, or as ``output_0``, ``output_1`` and so on if there are
        no paths; the new value of an input as ``mutated_input_NAME``.
    """
    mutated = mutated_inputs(method)
    count = len(method.outputs) - len(mutated)
    taken = input_names(method)
    returned = read_outputs(method.output_nesting, count)
    names = _in_place(method, mutated, taken, returned)
    return names if len(names) == len(set(names)) else _in_place(method, mutated, taken, None)


def _in_place(
    method: MethodInfo,
    mutated: dict[int, int],
    inputs: Sequence[str],
    returned: Sequence[str] | None,
) -> tuple[str, ...]:
    names = iter(returned or (f"{OUTPUT}_{n}" for n in itertools.count()))
    return tuple(
        f"{_MUTATED}_{inputs[mutated[position]]}" if position in mutated else next(names)
        for position in range(len(method.outputs))
    )
