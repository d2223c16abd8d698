"""Execute a compiled function: blocks of steps over a frame of slots.

Names are resolved when a function is compiled: every value has a slot, nested blocks share the
frame of their function, and a slot is emptied after its last use.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.reference import memory_guard
from coreml_delegate.runtime.engines.reference.kernels import Kernel
from coreml_delegate.runtime.engines.reference.values import (
    Value,
    cast_to_declared,
    describe,
    describe_operand,
    value_to_array,
)
from coreml_delegate.runtime.mil.location import Location, describe_op
from coreml_delegate.runtime.mil.program import Constant, Function, NamedType, Op, ValueType
from coreml_delegate.runtime.op_errors import OpError, OpExecutionError, blame, summary


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that an op of the program has just computed.

    Attributes:
        op: The op that computed the value.
        output: The output of the op.
        location: Location of the op.
        turns: Index of the iteration of every loop around the op, outermost first, from 0.
        value: Shared with the interpreter: never modified afterwards, and not to be modified.
        operands: The op's operands by parameter name.
    """

    op: Op
    output: NamedType
    location: Location
    turns: tuple[int, ...]
    value: Value
    operands: Operands

    @property
    def name(self) -> str:
        """The output's name in the program."""
        return self.output.name

    @property
    def op_type(self) -> str:
        """MIL op type."""
        return self.op.type

    @property
    def declared(self) -> ValueType:
        """The type that the program declares."""
        return self.output.type

    @property
    def array(self) -> NDArray[Any]:
        """The value as a new array; lists and strings are boxed, with dtype object."""
        return value_to_array(self.value, self.declared)

    @property
    def tensor(self) -> Tensor | None:
        """The value without a copy, which must not be modified; None if it is no tensor."""
        return self.value if isinstance(self.value, Tensor) else None

    @property
    def inputs(self) -> dict[str, str]:
        """Dtype and shape of every operand by parameter name; the value of short operands."""
        return {name: describe_operand(values) for name, values in self.operands.items()}


Listener: TypeAlias = Callable[[TracedValue], None]
"""Receives every value in order of execution, including nested blocks and every iteration.

Constants are not passed. Values may be kept, because they are never modified.
"""


@dataclass(slots=True)
class Frame:
    """One call of a function.

    Attributes:
        slots: Values by slot, None in empty slots.
        states: State tensors by slot; replaced, never modified.
        admitted: Signature of the arguments with which each step last passed the memory guard;
            shared by the calls of a function.
        decide: Maps the value of a condition to its outcome, so that a comparison of two runs can
            make one follow the path of the other.
        turns: Index of the current iteration of every loop that is running, outermost first.
        remaining: Iterations left before the loops count as endless.
    """

    function: Function
    slots: list[Value | None]
    states: dict[int, Tensor]
    admitted: dict[KernelStep, tuple[Any, ...]]
    listener: Listener | None = None
    locations: Mapping[Op, Location] = field(default_factory=dict[Op, Location])
    decide: Callable[[bool], bool] = bool
    turns: list[int] = field(default_factory=list[int])
    remaining: int = field(default_factory=lambda: limits.MAX_TURNS)

    def read(self, slot: int) -> Value:
        """Return the value in a slot that is known to be filled."""
        value = self.slots[slot]
        if value is None:
            raise LookupError(f"slot {slot} is read while empty")
        return value


Fetch: TypeAlias = Callable[[Frame], Any]
"""Reads one argument of a kernel or one output of a block."""

Source: TypeAlias = "int | Constant | Tensor"
"""Location of a value: a slot of the frame, or a constant."""

Operands: TypeAlias = "Mapping[str, tuple[Value | Constant | None, ...]]"
"""Operands of an op by parameter name: several if variadic, None for an empty slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Step(abc.ABC):
    """One op with its names resolved.

    Attributes:
        sources: Locations of the operands, by parameter name.
    """

    op: Op
    sources: Mapping[str, tuple[Source, ...]]

    @abc.abstractmethod
    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Return the op's results, in the order of its outputs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A step with slot and declaration of each output, and the slots that it uses last."""

    step: Step
    outputs: tuple[tuple[int, NamedType], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """A block with its names resolved.

    Attributes:
        inputs: Slots of the block's inputs.
        entries: The steps in execution order.
        outputs: Functions that read each output.
        frees: Slots to empty once the outputs are read.
    """

    inputs: tuple[int, ...]
    entries: tuple[Entry, ...]
    outputs: tuple[Fetch, ...]
    frees: tuple[int, ...]

    def run(self, frame: Frame, arguments: tuple[Value, ...] = ()) -> tuple[Value, ...]:
        """Execute with ``arguments`` as the block's inputs; return its outputs."""
        for slot, argument in zip(self.inputs, arguments, strict=True):
            frame.slots[slot] = argument
        for entry in self.entries:
            _run_entry(entry, frame)
        results = tuple(fetch(frame) for fetch in self.outputs)
        for slot in self.frees:
            frame.slots[slot] = None
        return results


def _run_entry(entry: Entry, frame: Frame) -> None:
    step = entry.step
    try:
        results = step.run(frame)
        if len(results) != len(entry.outputs):
            raise TypeError(  # noqa: TRY301 - every failure of an op is reported in one place
                f"{len(results)} results where the program declares {len(entry.outputs)}"
            )
        values = [
            cast_to_declared(r, o.type) for r, (_, o) in zip(results, entry.outputs, strict=True)
        ]
    except Exception as error:  # noqa: BLE001 - kernels raise anything
        blame_op(error, frame.function, step.op, _read_operands(step, frame))
    for value, (slot, _) in zip(values, entry.outputs, strict=True):
        frame.slots[slot] = value
    if frame.listener is not None:
        _notify(frame.listener, entry, frame, values)
    for slot in entry.frees:
        frame.slots[slot] = None


def _notify(listener: Listener, entry: Entry, frame: Frame, values: list[Value]) -> None:
    operands, turns, op = _read_operands(entry.step, frame), tuple(frame.turns), entry.step.op
    for value, (_, output) in zip(values, entry.outputs, strict=True):
        listener(TracedValue(op, output, frame.locations[op], turns, value, operands))


def _read_operands(step: Step, frame: Frame) -> Operands:
    return {
        name: tuple(frame.slots[s] if isinstance(s, int) else s for s in sources)
        for name, sources in step.sources.items()
    }


def blame_op(error: Exception, function: Function, op: Op, operands: Operands) -> NoReturn:
    """Raise the error of an op that could not be computed, with its operands.

    Raises:
        OpExecutionError: Caused by ``error``; ``error`` itself if it comes from a nested op.
    """
    if isinstance(error, OpError):
        raise error
    operand_list = (f"{name}: {describe_operand(values)}" for name, values in operands.items())
    what = f"cannot compute {describe_op(function, op)} ({summary(error)})"
    blame(error, OpExecutionError, what, got=", ".join(operand_list) or None)


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep(Step):
    """An op that a kernel computes.

    Attributes:
        fixed: Arguments known at compile time.
        fetched: Functions that read the other arguments at every call.
    """

    kernel: Kernel
    fixed: Mapping[str, Any]
    fetched: tuple[tuple[str, Fetch], ...]

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Call the kernel, under the memory guard unless the last call had the same shapes."""
        arguments = {name: fetch(frame) for name, fetch in self.fetched}
        signature = memory_guard.memory_signature(arguments)
        if frame.admitted.get(self) == signature:
            return as_tuple(self.kernel.function(**self.fixed, **arguments))
        with memory_guard.MemoryGuard():
            results = as_tuple(self.kernel.function(**self.fixed, **arguments))
        frame.admitted[self] = signature
        return results


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the result of a kernel as a tuple; a ``TensorList`` counts as a single value."""
    return result if type(result) is tuple else (result,)


@dataclass(frozen=True, slots=True, eq=False)
class CondStep(Step):
    """``cond``: the first block if the predicate is true, else the second."""

    predicate: Fetch
    branches: tuple[CompiledBlock, CompiledBlock]

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Execute one branch."""
        return self.branches[0 if _decide(self.predicate(frame), frame) else 1].run(frame)


@dataclass(frozen=True, slots=True, eq=False)
class LoopStep(Step):
    """``while_loop``: runs the second block while the first is true, on the loop variables."""

    initial: tuple[Fetch, ...]
    condition: CompiledBlock
    body: CompiledBlock

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Execute until the condition is false."""
        variables = tuple(fetch(frame) for fetch in self.initial)
        frame.turns.append(0)
        while _decide(self.condition.run(frame, variables)[0], frame):
            if not frame.remaining:
                raise RuntimeError(f"loops do not end within {limits.MAX_TURNS} turns")
            frame.remaining -= 1
            variables = self.body.run(frame, variables)
            frame.turns[-1] += 1
        frame.turns.pop()
        return variables


def _decide(condition: Any, frame: Frame) -> bool:
    return frame.decide(bool(condition))


@dataclass(frozen=True, slots=True, eq=False)
class ReadStateStep(Step):
    """``read_state``: returns the current tensor of a state."""

    state: int

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Read the state."""
        return (frame.states[self.state],)


@dataclass(frozen=True, slots=True, eq=False)
class WriteStateStep(Step):
    """``write_state``, and ``coreml_update_state``, which also returns the new tensor."""

    state: int
    data: Fetch

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Replace the state's tensor by a copy of the data, so that earlier reads do not change."""
        current = frame.states[self.state]
        data: Tensor = self.data(frame)
        if data.shape != current.shape or data.dtype != current.dtype:
            raise TypeError(f"state holds {describe(current)} and cannot take {describe(data)}")
        copied = data.clone()
        frame.states[self.state] = copied
        return (copied,) if self.op.outputs else ()
