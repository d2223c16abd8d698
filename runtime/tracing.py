"""Every value a program computes, told to a listener while it runs.

Tracing takes the reference engine whatever engine a model runs on: it computes op by op, at the
program's own dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from coreml_delegate.runtime.engines.base import Array, State
from coreml_delegate.runtime.engines.reference import ReferenceFunction, ReferenceState
from coreml_delegate.runtime.engines.reference.interpreter import Computed
from coreml_delegate.runtime.engines.reference.values import describe_operand, value_to_array
from coreml_delegate.runtime.mil.location import Location, located_ops
from coreml_delegate.runtime.mil.program import Function, Op, ValueType


@dataclass(frozen=True, slots=True)
class TracedValue:
    """One value, as an op of the program has just computed it.

    Attributes:
        name: The output's name in the program.
        op_type: MIL op type.
        location: Where the op stands.
        turns: Number of the turn in every loop around the op, outermost first, from 0.
        declared: Type the program declares.
        computed: The interpreter's own record; ``array`` and ``inputs`` read it.
    """

    name: str
    op_type: str
    location: Location
    turns: tuple[int, ...]
    declared: ValueType
    computed: Computed

    @property
    def array(self) -> Array:
        """The value, as an array of its own; lists and strings are boxed, of dtype object."""
        return value_to_array(self.computed.value, self.declared)

    @property
    def tensor(self) -> Tensor | None:
        """The value without a copy, not to be modified; None for what is no tensor."""
        value = self.computed.value
        return value if isinstance(value, Tensor) else None

    @property
    def inputs(self) -> dict[str, str]:
        """Dtype and shape of every operand by parameter name; the value itself if it is short."""
        return {name: describe_operand(values) for name, values in self.computed.operands.items()}


Listener: TypeAlias = Callable[[TracedValue], None]
"""Told about every value in the order of execution, nested blocks and each turn of a loop included.

Constants are not computed, and not among the values. Values may be kept: nothing modifies them.
"""


def trace(
    function: Function,
    compiled: ReferenceFunction,
    inputs: Mapping[str, Array],
    listener: Listener,
    *,
    state: State | None = None,
    decide: Callable[[bool], bool] = bool,
) -> dict[str, Array]:
    """Run a function on the reference engine and tell ``listener`` every value.

    Args:
        function: The function.
        compiled: The same, compiled.
        inputs: By feature name, of the dtypes of the MIL parameters.
        listener: Told about every value.
        state: Of any engine; read, and left as it is.
        decide: Has the last word on every condition of the program, given its value.

    Returns:
        Outputs by feature name.

    Raises:
        InputError: The state is not one of this function.
        ExecutionError: An op failed.
    """
    places: dict[Op, Location] = {op: location for location, op in located_ops(function)}

    def tell(computed: Computed) -> None:
        listener(
            TracedValue(
                name=computed.output.name,
                op_type=computed.op.type,
                location=places[computed.op],
                turns=computed.turns,
                declared=computed.output.type,
                computed=computed,
            )
        )

    return compiled.run(inputs, copy_state(compiled, state), listener=tell, decide=decide)


def copy_state(compiled: ReferenceFunction, state: State | None) -> ReferenceState | None:
    """A state of ``compiled`` with the content of ``state``, which is of any engine."""
    copy = compiled.make_state()
    if state is None or copy is None:
        # One of the two: a state that is missing, or one too many. Left to the engine to refuse.
        return copy if state is not None else None
    fresh = copy.snapshot()
    for name, value in state.snapshot().items():
        held = fresh.get(name)
        copy.write(name, value if held is None else np.asarray(value, held.dtype))
    return copy
