"""Execution of a compiled function: blocks of steps over a frame of slots.

Names are resolved when a function is compiled: every value has a slot, nested blocks share the
frame of their function, and a slot is emptied after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.engines.reference.registry import Kernel
from coreml_delegate.runtime.engines.reference.values import Value, describe, settle
from coreml_delegate.runtime.mil.program import NamedType, Op


class Listener(Protocol):
    """Told about every value an op computes, nested blocks and every turn of a loop included.

    Values are the interpreter's own: read them, copy what is to be kept, change nothing.
    """

    def __call__(self, name: str, value: Value) -> None:
        """Receive the value that ``name`` has just got."""
        ...


@dataclass(slots=True)
class Frame:
    """One call of a function.

    Attributes:
        slots: Values by slot, None where there is none (any more).
        states: State tensors by slot; replaced, never modified.
        listener: Who is told about values, if anyone.
    """

    slots: list[Value | None]
    states: dict[int, Tensor]
    listener: Listener | None = None

    def read(self, slot: int) -> Value:
        """The value in a slot that is known to be filled."""
        value = self.slots[slot]
        if value is None:
            raise LookupError(f"slot {slot} is read while empty")
        return value


Fetch: TypeAlias = Callable[[Frame], Any]
"""Reads one argument of a kernel or one output of a block."""


class Step(Protocol):
    """One op, resolved."""

    @property
    def op(self) -> Op:
        """The op."""
        ...

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """The op's results, in the order of its outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A step with what happens around it.

    Attributes:
        step: The op.
        outputs: Slot and declaration of each result.
        frees: Slots used for the last time.
    """

    step: Step
    outputs: tuple[tuple[int, NamedType], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """A block, resolved.

    Attributes:
        inputs: Slots of the block's inputs.
        entries: In execution order.
        outputs: How to read each output.
        frees: Slots to empty once the outputs are read.
    """

    inputs: tuple[int, ...]
    entries: tuple[Entry, ...]
    outputs: tuple[Fetch, ...]
    frees: tuple[int, ...]

    def run(self, frame: Frame, arguments: tuple[Value, ...] = ()) -> tuple[Value, ...]:
        """Execute with ``arguments`` for the block's inputs; return its outputs."""
        for slot, argument in zip(self.inputs, arguments, strict=True):
            frame.slots[slot] = argument
        for entry in self.entries:
            _run(entry, frame)
        results = tuple(fetch(frame) for fetch in self.outputs)
        for slot in self.frees:
            frame.slots[slot] = None
        return results


def _run(entry: Entry, frame: Frame) -> None:
    step = entry.step
    try:
        results = step.run(frame)
        if len(results) != len(entry.outputs):
            raise TypeError(  # noqa: TRY301 - every failure of an op is reported in one place
                f"{len(results)} results where the program declares {len(entry.outputs)}"
            )
        values = [settle(r, o.type) for r, (_, o) in zip(results, entry.outputs, strict=True)]
    except ExecutionError:
        raise
    except Exception as error:
        raise _failure(step, frame, error) from error
    for value, (slot, output) in zip(values, entry.outputs, strict=True):
        frame.slots[slot] = value
        if frame.listener is not None:
            frame.listener(output.name, value)
    for slot in entry.frees:
        frame.slots[slot] = None


def _failure(step: Step, frame: Frame, error: Exception) -> ExecutionError:
    got = _describe_arguments(step, frame) if isinstance(step, KernelStep) else None
    outputs = ", ".join(repr(output.name) for output in step.op.outputs) or repr(step.op.name)
    reason = str(error).strip().splitlines()
    return ExecutionError(
        f"{step.op.type} failed to compute {outputs} "
        f"({type(error).__name__}: {reason[0] if reason else 'no message'})",
        got=got or None,
    )


def _describe_arguments(step: KernelStep, frame: Frame) -> str:
    arguments = step.arguments(frame)
    ordered = [name for name in step.kernel.parameters if name in arguments]
    return ", ".join(f"{name}: {describe(arguments[name])}" for name in ordered)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """An op that a kernel computes.

    Attributes:
        op: The op.
        kernel: Its kernel.
        fixed: Arguments known when compiling.
        fetched: Arguments to read at every call.
    """

    op: Op
    kernel: Kernel
    fixed: Mapping[str, Any]
    fetched: tuple[tuple[str, Fetch], ...]

    def arguments(self, frame: Frame) -> dict[str, Any]:
        """The kernel's keyword arguments."""
        arguments = dict(self.fixed)
        for name, fetch in self.fetched:
            arguments[name] = fetch(frame)
        return arguments

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Call the kernel."""
        return as_results(self.kernel.function(**self.arguments(frame)))


def as_results(result: Any) -> tuple[Any, ...]:
    """What a kernel returned as a tuple: a plain tuple is one, everything else is one value."""
    return result if type(result) is tuple else (result,)


@dataclass(frozen=True, slots=True)
class CondStep:
    """``cond``: the first block if the predicate is true, else the second."""

    op: Op
    predicate: Fetch
    branches: tuple[CompiledBlock, CompiledBlock]

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Execute one branch."""
        return self.branches[0 if bool(self.predicate(frame)) else 1].run(frame)


@dataclass(frozen=True, slots=True)
class LoopStep:
    """``while_loop``: the second block as long as the first is true, on the same variables."""

    op: Op
    initial: tuple[Fetch, ...]
    condition: CompiledBlock
    body: CompiledBlock

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Execute until the condition fails."""
        variables = tuple(fetch(frame) for fetch in self.initial)
        while bool(self.condition.run(frame, variables)[0]):
            variables = self.body.run(frame, variables)
        return variables


@dataclass(frozen=True, slots=True)
class ReadStateStep:
    """``read_state``: the tensor a state holds now."""

    op: Op
    state: int

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Read the state."""
        return (frame.states[self.state],)


@dataclass(frozen=True, slots=True)
class WriteStateStep:
    """``write_state``, and ``coreml_update_state``, which also returns what it wrote."""

    op: Op
    state: int
    data: Fetch

    def run(self, frame: Frame) -> tuple[Any, ...]:
        """Replace the state's tensor by a copy: what was read before stays as it was."""
        held = frame.states[self.state]
        data: Tensor = self.data(frame)
        if data.shape != held.shape or data.dtype != held.dtype:
            raise TypeError(f"state holds {describe(held)} and cannot take {describe(data)}")
        copied = data.clone()
        frame.states[self.state] = copied
        return (copied,) if self.op.outputs else ()
