"""Trace a run: pass every value that a program computes to a listener.

Tracing always uses the reference engine, which computes op by op in the program's dtypes.
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
from coreml_delegate.runtime.mil.program import Op, ValueType


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that an op of the program has just computed.

    Attributes:
        name: The output's name in the program.
        op_type: MIL op type.
        location: Location of the op.
        turns: Index of the iteration of every loop around the op, outermost first, from 0.
        declared: The type that the program declares.
        computed: The interpreter's record, from which ``array`` and ``inputs`` are computed.
    """

    name: str
    op_type: str
    location: Location
    turns: tuple[int, ...]
    declared: ValueType
    computed: Computed

    @property
    def array(self) -> Array:
        """The value as a new array; lists and strings are boxed, with dtype object."""
        return value_to_array(self.computed.value, self.declared)

    @property
    def tensor(self) -> Tensor | None:
        """The value without a copy, which must not be modified; None if it is no tensor."""
        value = self.computed.value
        return value if isinstance(value, Tensor) else None

    @property
    def inputs(self) -> dict[str, str]:
        """Dtype and shape of every operand by parameter name; the value of short operands."""
        return {name: describe_operand(values) for name, values in self.computed.operands.items()}


Listener: TypeAlias = Callable[[TracedValue], None]
"""Receives every value in order of execution, including nested blocks and every iteration.

Constants are not passed. Values may be kept, because they are never modified.
"""


def trace(
    compiled: ReferenceFunction,
    inputs: Mapping[str, Array],
    listener: Listener,
    *,
    state: State | None = None,
    decide: Callable[[bool], bool] = bool,
) -> dict[str, Array]:
    """Run a function on the reference engine and pass every value to ``listener``.

    Args:
        compiled: The function, compiled.
        inputs: Arrays by feature name, in the dtypes of the MIL parameters.
        listener: Receives every value.
        state: State of any engine; it is not changed.
        decide: Maps the value of every condition of the program to its outcome.

    Returns:
        Outputs by feature name.

    Raises:
        InputError: The state does not belong to this function.
        ExecutionError: An op failed.
    """
    locations: dict[Op, Location] = {
        op: location for location, op in located_ops(compiled.function)
    }

    def tell(computed: Computed) -> None:
        listener(
            TracedValue(
                name=computed.output.name,
                op_type=computed.op.type,
                location=locations[computed.op],
                turns=computed.turns,
                declared=computed.output.type,
                computed=computed,
            )
        )

    return compiled.run(inputs, copy_state(compiled, state), listener=tell, decide=decide)


def copy_state(compiled: ReferenceFunction, state: State | None) -> ReferenceState | None:
    """Return a state of ``compiled`` with the content of ``state``, a state of any engine."""
    copy = compiled.make_state()
    if state is None or copy is None:
        # A state is missing or superfluous, which the engine refuses.
        return copy if state is not None else None
    fresh = copy.snapshot()
    for name, value in state.snapshot().items():
        current = fresh.get(name)
        copy.write(name, value if current is None else np.asarray(value, current.dtype))
    return copy
