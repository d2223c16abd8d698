"""The interface between hosts of ``.pte`` programs and delegates.

Hosts know nothing of MIL, engines or blobs: they pass the bytes of each delegate to a loader once,
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
"""The backend name that Core ML delegates carry in a ``.pte``."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op in one call.

    Attributes:
        symbol: Its debug symbol.
        start: When it began, in nanoseconds of a steady clock. Engines measure how long an op
            takes, not when it runs: ops are laid one after another from the start of the call.
        nanoseconds: Its time; 0 if it is fused with another, which has the time.
        kernel: The engine's kernel, and the symbols of all ops that it computes.
        values: What it computed; empty if nobody asked, or no call of the program has that value.
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

        A program lists a delegate's inputs and outputs in one row and does not say where the inputs
        end: only the delegate knows.
        """
        ...

    @property
    def native(self) -> NativeCall | None:
        """How to call it with addresses of tensors, without Python; None if there is no such way.

        What it declines has to be called as below, which also says what is wrong with a call.
        """
        ...

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run once.

        Args:
            inputs: In the delegate's own order, of any strides. The host reuses their memory:
                nothing may keep them beyond the call.

        Returns:
            Outputs in order. The host copies them before anything else runs, casting to the dtype
            the program declares, so they may alias inputs or buffers of the delegate. A tensor of
            shape ``[1]`` may stand for a scalar.
        """
        ...


@runtime_checkable
class ObservableDelegate(Protocol):
    """A delegate that tells what its ops do, if its payload asked for that."""

    def observe(
        self, inputs: Sequence[torch.Tensor], *, with_values: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[OpEvent]]:
        """Run once, as a call does.

        Args:
            inputs: As for a call.
            with_values: Whether the values that ops compute are wanted.

        Returns:
            The outputs, and what the ops did, in the order to be logged.
        """
        ...


NamedData: TypeAlias = Callable[[str], memoryview | None]
"""Named data of a program by key; None when it has none under that key."""


@dataclass(frozen=True, slots=True)
class DelegatePayload:
    """Everything a program holds about one delegate.

    Views are read-only and valid as long as the host holds the callable made from them. A cache
    across programs must copy them.

    Attributes:
        backend_id: Name of the backend that lowered the subgraph.
        processed: The bytes that its preprocess returned.
        compile_specs: Keys and values, in order.
        method_name: Method that the delegate belongs to.
        is_observed: Whether the host wants to know what the ops of a call do.
        named_data: Finds data of the program by key. To be called while loading, not later.
    """

    backend_id: str
    processed: memoryview
    compile_specs: tuple[tuple[str, bytes], ...]
    method_name: str
    named_data: NamedData
    is_observed: bool = False


DelegateLoader: TypeAlias = Callable[[DelegatePayload], DelegateCallable]
"""Prepares a delegate for execution; raises an error of this package when it cannot."""


RejectedHosts: TypeAlias = Mapping[str, tuple[str, ...]]
"""Why hosts cannot run all methods of a program, by name of the host."""

NO_REJECTED_HOSTS: Final[RejectedHosts] = MappingProxyType({})


def fit_output(
    result: torch.Tensor, shape: Sequence[int], *, dynamic: bool, position: int
) -> torch.Tensor:
    """Check one result of a delegate against the tensor that is to receive it.

    Args:
        result: What the delegate returned as output ``position``.
        shape: Sizes of the receiving tensor.
        dynamic: Whether that tensor takes the result's shape; its rank is fixed all the same.
        position: Number of the output, for the message.

    Returns:
        ``result``, without its one dimension if the receiver is a scalar.

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
    """Refuse a delegate that returned another number of outputs than the program has room for.

    Raises:
        ExecutionError: The counts differ.
    """
    if got != expected:
        raise ExecutionError(
            "a delegate returned the wrong number of outputs", got=str(got), expected=str(expected)
        )
