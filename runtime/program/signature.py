"""Names of a method's inputs and outputs; the inputs and buffers that it changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from coreml_delegate.exported.value_names import OUTPUT, read_inputs, read_outputs
from coreml_delegate.runtime.program.plan import KernelCall, MethodInfo, TensorSpec

_MUTATED = "mutated_input"


def mutated_inputs(method: MethodInfo) -> dict[int, int]:
    """Find the outputs of a method by which it returns new values of inputs.

    Returns:
        Position of the output -> position of the input. Exporters put these outputs first.
    """
    written_values = _written_in_place(method)
    return {
        position: method.inputs.index(index)
        for position, index in enumerate(method.outputs)
        if index in written_values and index in method.inputs
    }


def input_names(method: MethodInfo) -> tuple[str, ...]:
    """Return the names of the inputs, in order: their paths, or positions if paths are unknown."""
    count = len(method.inputs)
    return tuple(read_inputs(method.input_nesting, count) or map(str, range(count)))


def output_names(method: MethodInfo) -> tuple[str, ...]:
    """Return the names of the outputs, in order.

    Returns:
        The path of each output, or ``output_0``, ``output_1`` and so on if paths are unknown;
        ``mutated_input_NAME`` for the new value of an input.
    """
    mutated = mutated_inputs(method)
    count = len(method.outputs) - len(mutated)
    inputs = input_names(method)
    returned = read_outputs(method.output_nesting, count)
    names = _in_place(method, mutated, inputs, returned)
    return names if len(names) == len(set(names)) else _in_place(method, mutated, inputs, None)


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


def mutable_buffers(method: MethodInfo) -> dict[int, TensorSpec]:
    """Return the mutable buffers of a method, by index in the value table.

    Exporters update only mutable buffers in place, at the end of a run.
    """
    return {
        index: spec
        for index in sorted(_written_in_place(method))
        if isinstance(spec := method.values[index], TensorSpec)
        and spec.allocation is not None
        and index not in method.inputs
    }


def _written_in_place(method: MethodInfo) -> set[int]:
    """Return the indices of the values that operators of a method write in place."""
    return {
        call.args[0]
        for chain in method.chains
        for call in chain
        # Operators such as ``aten::copy_`` and ``aten::index_put_.out``.
        if isinstance(call, KernelCall) and call.operator.partition(".")[0].endswith("_")
    }
