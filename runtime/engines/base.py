"""The interface of engines: an engine compiles one function of a MIL program to a callable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coreml_delegate.options.engine_options import EngineOptions
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.native import NativeCall, NativeInterface, NativeProgram
from coreml_delegate.runtime.snapshots import Array, State


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of one kernel in a run.

    Attributes:
        ops: Indices, in the function's block, of the ops that the kernel computes: several if they
            are fused, empty for work of the engine that belongs to no op.
        nanoseconds: Duration.
        kernel: The engine's name of the kernel.
        is_mean: Whether the time is the mean of the runs so far.
    """

    ops: tuple[int, ...]
    nanoseconds: int
    kernel: str
    is_mean: bool = False


class NativeFunction(Protocol):
    """A compiled function that may run without Python."""

    def native_call(self, interface: NativeInterface, state: State | None) -> NativeCall | None:
        """Return a call that runs without Python; None if that is impossible.

        Calls read and write ``state``, from ``make_state``.
        """
        ...

    def native_program(
        self, interface: NativeInterface, shapes: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> NativeProgram | None:
        """Return the form of the function that runs without Python; None if that is impossible.

        ``shapes`` are all combinations of enumerated shapes, by input; there may be none.
        """
        ...

    def native_obstacle(self) -> str | None:
        """Return the reason why native calls are impossible, or None if they are possible."""
        ...

    def prepare_native_calls(self) -> None:
        """Make later calls of the function without Python, if possible."""
        ...

    def prepare_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compile for enumerated shapes now, rather than at the first call with them.

        ``shapes`` has the shape of each input with enumerated shapes.
        """
        ...


class CompiledFunction(Protocol):
    """One function, ready to run. It may be called from several threads at the same time."""

    @property
    def native(self) -> NativeFunction | None:
        """The function as it runs without Python; None if every call needs Python."""
        ...

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: Arrays by feature name, already checked: dtype of the MIL parameter, any
                strides.
            state: From ``make_state`` of the same object; None for stateless functions.

        Returns:
            Outputs by feature name, in declaration order, C-contiguous and owned by the caller, in
            the dtype the MIL program computes them in.

        Raises:
            ExecutionError: An op failed.
        """
        ...

    def profile(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and return the outputs and the time of every kernel, in order of execution.

        The function must have been compiled with ``profiling``. Raises as a call does.
        """
        ...

    def make_state(self) -> State | None:
        """Return a new state, all zeros; None if the function has no state."""
        ...


class Engine(Protocol):
    """An engine is a module-level singleton without state per model."""

    name: str

    @property
    def python_reason(self) -> str | None:
        """Text that says why every call needs Python; None if no call does."""
        ...

    def unavailable_reason(self) -> str | None:
        """Return why this engine cannot be used on this machine, or None if it can."""
        ...

    def unsupported(self, function: Function) -> list[str]:
        """Return the reasons why this engine cannot run ``function``; empty if it can."""
        ...

    def compile(
        self, function: Function, options: EngineOptions, source: ProgramSource | None = None
    ) -> CompiledFunction:
        """Prepare ``function`` for execution.

        Without ``source``, the bytes that ``function`` was read from, no cache is used.

        Raises:
            OptionError: The engine does not support the precision of ``options``.
            EngineUnavailableError: See ``unavailable_reason``.
            UnsupportedOpError: See ``unsupported``.
        """
        ...
