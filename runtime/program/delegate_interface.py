"""The interface between hosts of ``.pte`` programs and delegates.

Hosts do not depend on MIL, engines or blobs: they pass the bytes of each delegate to a loader once,
and call the callable that it returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.native import NativeCall
from coreml_delegate.runtime.program.plan import describe

COREML_BACKEND_ID: Final = "CoreMLBackend"
"""The backend name of Core ML delegates in a ``.pte``."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op in one call.

    Attributes:
        symbol: The op's debug symbol.
        start: Start of the op, in nanoseconds of a steady clock. Engines measure durations, not
            starts, so ops are placed one after another from the start of the call.
        nanoseconds: Duration; 0 if the op is fused with another op, which has the time.
        kernel: The engine's kernel, and the symbols of all ops that it computes.
        values: Results of the op; empty if not requested, or if no op of the exported program
            computes them.
    """

    symbol: str
    start: int
    nanoseconds: int
    kernel: Mapping[str, object]
    values: tuple[np.ndarray[Any, Any], ...] = ()

    @property
    def metadata(self) -> bytes:
        """The kernel as JSON."""
        return json.dumps(self.kernel).encode()


class DelegateCallable(Protocol):
    """A loaded delegate. Called by one thread at a time."""

    @property
    def input_count(self) -> int:
        """Number of tensors that the delegate takes.

        A program lists a delegate's inputs and outputs in one sequence without the number of
        inputs, which only the delegate has.
        """
        ...

    @property
    def native(self) -> NativeCall | None:
        """A call with addresses of tensors, without Python; None if that is impossible.

        Arguments that it declines have to be passed to ``__call__``, which raises errors.
        """
        ...

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run once.

        Args:
            inputs: Tensors in the delegate's own order, of any strides. The host reuses their
                memory, so they must not be kept beyond the call.

        Returns:
            Outputs in order. The host copies them before anything else runs, cast to the dtype that
            the program declares, so they may alias inputs or buffers of the delegate. A tensor of
            shape ``[1]`` is accepted for a scalar.
        """
        ...


@runtime_checkable
class ObservableDelegate(Protocol):
    """A delegate that reports the times and values of its ops, if its payload requested them."""

    def observe(
        self, inputs: Sequence[torch.Tensor], *, with_values: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[OpEvent]]:
        """Run once, as a call does, and report the values that ops compute if ``with_values``.

        Returns:
            The outputs, and the events of the ops, in the order to be logged.
        """
        ...


NamedData: TypeAlias = Callable[[str], memoryview | None]
"""Returns the named data of a program by key; None for an unknown key."""


@dataclass(frozen=True, slots=True)
class DelegatePayload:
    """All data of one delegate in a program.

    Views are read-only and valid as long as the host has the callable that was loaded from them. A
    cache across programs must copy them.

    Attributes:
        is_observed: Whether the host requests events of ops; see ``ObservableDelegate``.
        named_data: Finds data of the program by key. Must be called only while loading.
    """

    backend_id: str
    processed: memoryview
    compile_specs: tuple[tuple[str, bytes], ...]
    method_name: str
    named_data: NamedData
    is_observed: bool = False


DelegateLoader: TypeAlias = Callable[[DelegatePayload], DelegateCallable]
"""Prepares a delegate for execution, or raises an error of this package."""


RejectedHosts: TypeAlias = Mapping[str, tuple[str, ...]]
"""Host name -> reasons why the host cannot run all methods of a program."""

NO_REJECTED_HOSTS: Final[RejectedHosts] = MappingProxyType({})


def fit_output(
    result: torch.Tensor, shape: Sequence[int], *, dynamic: bool, position: int
) -> torch.Tensor:
    """Check output ``position`` of a delegate against the shape of the tensor that receives it.

    A ``dynamic`` tensor takes the result's shape; its rank is fixed.

    Returns:
        ``result``, reshaped to ``()`` if the receiving tensor is a scalar.

    Raises:
        ExecutionError: The shapes differ.
    """
    if not shape and result.shape == (1,):
        return result.reshape(())
    if tuple(result.shape) != tuple(shape) and not (dynamic and result.dim() == len(shape)):
        raise ExecutionError(
            f"delegate output {position} has the wrong shape",
            got=describe(result.dtype, result.shape),
            expected=f"shape {list(shape)}" if not dynamic else f"rank {len(shape)}",
        )
    return result


def check_output_count(got: int, expected: int) -> None:
    """Refuse a delegate that returned a different number of outputs than the program declares.

    Raises:
        ExecutionError: The counts differ.
    """
    if got != expected:
        raise ExecutionError(
            "a delegate returned the wrong number of outputs", got=str(got), expected=str(expected)
        )
