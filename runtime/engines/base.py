"""What an engine is: something that turns one function of a MIL program into a callable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.runtime.mil.program import Function

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to execute.

    Attributes:
        threads: CPU threads, or None for the engine's default.
    """

    threads: int | None = None


class State(Protocol):
    """Mutable tensors of one model instance, zero at start; opaque outside its engine."""

    def read(self) -> dict[str, Array]:
        """Copies of every state tensor, by feature name."""
        ...

    def write(self, name: str, value: Array) -> None:
        """Replace the content of one state tensor.

        Args:
            name: Feature name.
            value: Of the tensor's shape; a dtype of the same kind is cast.

        Raises:
            InputError: No such state tensor, or another shape or kind of dtype.
        """
        ...


class CompiledFunction(Protocol):
    """One function, ready to run. Safe to call from several threads, one call at a time each."""

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: By feature name, already checked: dtype of the MIL parameter, any strides.
            state: Made by ``make_state`` of the same object; None for stateless functions.

        Returns:
            Outputs by feature name, in declaration order, C-contiguous and owned by the caller, in
            the dtype the MIL program computes them in.

        Raises:
            ExecutionError: An op failed.
        """
        ...

    def make_state(self) -> State | None:
        """Fresh state, all zeros; None when the function has none."""
        ...


class Engine(Protocol):
    """An engine is a module-level singleton; it holds no per-model state."""

    name: str

    def unavailable_reason(self) -> str | None:
        """Why this engine cannot be used on this machine, or None if it can."""
        ...

    def unsupported(self, function: Function) -> list[str]:
        """What in ``function`` this engine cannot take, one reason each; empty if nothing."""
        ...

    def compile(self, function: Function, options: EngineOptions) -> CompiledFunction:
        """Prepare ``function`` for execution.

        Raises:
            EngineUnavailableError: See ``unavailable_reason``.
            UnsupportedOpError: See ``unsupported``.
        """
        ...
