"""The events of calls on the Python host, in the format of ExecuTorch's runtime.

An ETDump is a FlatBuffer of runs, each with the times and values of its instructions and of the ops
inside its delegates; tensors are in a separate file, the debug buffer.

Source: ExecuTorch 1.5, ``devtools/etdump`` (schema and names of events).
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.program.decoder import DTYPES, SCALAR_TYPES
from coreml_delegate.runtime.program.delegate_interface import (
    DelegateCallable,
    ObservableDelegate,
    OpEvent,
)

LOGGED_AS: Final = {
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.bfloat16: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
}
"""dtype that ETDump lacks -> dtype in which its tensors are logged."""

ALIGNMENT: Final = 64
"""Bytes of padding that the runtime may insert before a value."""

EXECUTE: Final = "Method::execute"
LOAD: Final = "Program::load_method"
OPERATOR: Final = "OPERATOR_CALL"
DELEGATE: Final = "DELEGATE_CALL"
_NATIVE: Final = "native_call_"
# The runtime's chain and instruction numbers of events outside of instructions.
_OUTSIDE: Final = -1, 0


@dataclass(frozen=True, slots=True)
class _Logged:
    """One event: a time interval or a value."""

    name: str
    chain: int
    instruction: int
    symbol: str | None = None
    times: tuple[int, int] | None = None
    metadata: bytes = b""
    tensor: tuple[int, tuple[int, ...], int] | None = None
    is_output: bool = False


@dataclass(slots=True)
class _Run:
    """A run or a load of a method."""

    name: str
    events: list[_Logged] = field(default_factory=list[_Logged])


class EventTrace:
    """Collects events, and values of up to ``buffer_size`` bytes, and writes them as an ETDump."""

    def __init__(self, buffer_size: int) -> None:
        self._buffer_size = buffer_size
        self.wants_values = buffer_size > 0
        self._buffer = bytearray()
        self._runs: list[_Run] = []
        self._position = _OUTSIDE

    def run(self, name: str, action: Callable[[], Any]) -> Any:
        """Log an action as a separate run."""
        self._runs.append(_Run("Execute" if name == EXECUTE else "Default"))
        self._position = _OUTSIDE
        start, size = time.perf_counter_ns(), len(self._buffer)
        try:
            result = action()
        except BaseException:
            del self._runs[-1], self._buffer[size:]
            raise
        self._position = _OUTSIDE
        self._log(name, times=(start, time.perf_counter_ns()))
        return result

    def step(
        self,
        name: str,
        chain: int,
        instruction: int,
        action: Callable[[], Any],
        *,
        has_values: bool,
    ) -> Any:
        """Log a call of the operator ``name``, or of a ``DELEGATE``.

        ``has_values`` says whether the call computes tensors: Inspector cannot compare operators
        without tensors.
        """
        self._position = chain, instruction
        start = time.perf_counter_ns()
        result = action()
        end = time.perf_counter_ns()
        if name != DELEGATE and (has_values or not self.wants_values):
            self._log(f"{_NATIVE}{name}", times=(start, end))
        self._log(DELEGATE if name == DELEGATE else OPERATOR, times=(start, end))
        return result

    def values(self, values: Iterable[Any], *, are_outputs: bool = False) -> None:
        """Log tensors that the current instruction computed, or the outputs of the program."""
        if self.wants_values:
            for value in values:
                if isinstance(value, torch.Tensor):
                    self._log_tensor(value, is_output=are_outputs)

    def ops(self, events: Sequence[OpEvent]) -> None:
        """Log the ops of a delegate."""
        for event in events:
            end = event.start + event.nanoseconds
            self._log("", event.symbol, times=(event.start, end), metadata=event.metadata)
            for value in event.values:
                self._log_tensor(torch.from_numpy(np.ascontiguousarray(value)), event.symbol)

    def write(self) -> tuple[bytes, bytes]:
        """Return the ETDump and the debug buffer."""
        # Takes seconds to import.
        from executorch.devtools.etdump import schema_flatcc as schema
        from executorch.devtools.etdump.serialize import serialize_to_etdump_flatcc

        runs = [
            schema.RunData(run.name, -1, [], [_event(schema, event) for event in run.events])
            for run in self._runs
        ]
        content = serialize_to_etdump_flatcc(schema.ETDumpFlatCC(0, runs))
        return struct.pack("<I", len(content)) + content, bytes(self._buffer)

    def _log(
        self, name: str, symbol: str | None = None, *, times: tuple[int, int], metadata: bytes = b""
    ) -> None:
        self._runs[-1].events.append(
            _Logged(name, *self._position, symbol, times=times, metadata=metadata)
        )

    def _log_tensor(
        self, value: torch.Tensor, symbol: str | None = None, *, is_output: bool = False
    ) -> None:
        plain = value.detach().to(LOGGED_AS.get(value.dtype, value.dtype)).contiguous()
        if len(self._buffer) + plain.nbytes > self._buffer_size:
            raise debug_buffer_error(symbol or "an operator", plain.nbytes)
        reference = SCALAR_TYPES[plain.dtype], tuple(plain.shape), len(self._buffer)
        self._buffer += plain.numpy().tobytes()
        self._runs[-1].events.append(
            _Logged("", *self._position, symbol, tensor=reference, is_output=is_output)
        )


class ObservedDelegate:
    """A delegate whose ops are logged at each call."""

    native = None

    def __init__(self, delegate: DelegateCallable, trace: EventTrace) -> None:
        self.delegate = delegate
        self.input_count = delegate.input_count
        self._trace = trace

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run once; see ``DelegateCallable``."""
        if not isinstance(self.delegate, ObservableDelegate):
            return self.delegate(inputs)
        outputs, events = self.delegate.observe(inputs, with_values=self._trace.wants_values)
        self._trace.ops(events)
        self._trace.values(outputs)
        return outputs


def used_bytes(etdump: bytes) -> int:
    """Return the number of bytes that the values of an ETDump take in the debug buffer."""
    from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc

    events = (
        event.debug_event
        for run in deserialize_from_etdump_flatcc(etdump).run_data
        for event in run.events or ()
    )
    tensors = (event.debug_entry.tensor for event in events if event is not None)
    return max(
        (
            tensor.offset + math.prod(tensor.sizes) * DTYPES[int(tensor.scalar_type)].itemsize
            for tensor in tensors
            if tensor is not None and tensor.offset is not None
        ),
        default=0,
    )


def debug_buffer_error(what: str, nbytes: int) -> ExecutionError:
    """Return the error for values of a method or op that do not fit into the debug buffer."""
    return ExecutionError(
        "values do not fit into the debug buffer",
        got=f"{nbytes} bytes of {what}",
        remedy="Load the program with a larger debug_buffer_size",
    )


def _event(schema: Any, logged: _Logged) -> Any:
    identity = logged.instruction, -1, logged.symbol or ""
    if logged.times is not None:
        time_event = schema.ProfileEvent(
            logged.name, logged.chain, *identity, list(logged.metadata), *logged.times
        )
        return schema.Event(time_event, None, None)
    dtype, sizes, offset = logged.tensor or (0, (), 0)
    strides = [int(np.prod(sizes[axis + 1 :])) for axis in range(len(sizes))]
    tensor = schema.Tensor(schema.ScalarType(dtype), list(sizes), strides, offset)
    output = schema.Bool(logged.is_output)
    value = schema.Value("Tensor", tensor, None, None, None, None, None, output)
    # The chain is unsigned here.
    value_event = schema.DebugEvent(logged.name, logged.chain % 2**64, *identity, value)
    return schema.Event(None, None, value_event)
