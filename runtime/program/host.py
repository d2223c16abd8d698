"""The ``python`` host: an executor of ``.pte`` programs in Python.

Delegates run by their loader's callables, other operators by torch's kernels. An instruction takes
microseconds, and a fraction of one on the stock runtime, but torch's kernels are optimised: fully
undelegated networks run tens of times faster here than on the stock runtime's portable kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Final, NoReturn

import torch

from coreml_delegate.errors import (
    CoreMLDelegateError,
    EngineUnavailableError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime.op_errors import OpExecutionError, blame, first_line
from coreml_delegate.runtime.program import stock
from coreml_delegate.runtime.program.delegate_interface import (
    COREML_BACKEND_ID,
    NO_REJECTED_HOSTS,
    DelegateCallable,
    DelegateLoader,
    DelegatePayload,
    RejectedHosts,
)
from coreml_delegate.runtime.program.event_trace import (
    DELEGATE,
    EXECUTE,
    LOAD,
    EventTrace,
    ObservedDelegate,
)
from coreml_delegate.runtime.program.host_program import HostProgram, states_of
from coreml_delegate.runtime.program.inputs import Value, check_inputs, in_dim_order
from coreml_delegate.runtime.program.instructions import (
    Step,
    bind_method,
    find_delegate_only_values,
)
from coreml_delegate.runtime.program.kernels import find_kernel
from coreml_delegate.runtime.program.memory import BufferState, ProgramMemory, fill
from coreml_delegate.runtime.program.plan import (
    DelegateCall,
    DelegateInfo,
    IndexList,
    Instruction,
    KernelCall,
    MethodInfo,
    TensorSpec,
    describe,
)
from coreml_delegate.runtime.program.ptd import Sources, open_program
from coreml_delegate.runtime.program.pte import PteProgram, Source
from coreml_delegate.runtime.program.signature import mutable_buffers
from coreml_delegate.runtime.snapshots import State
from coreml_delegate.runtime.threads import cpu_count, one_torch_thread

_logger = logging.getLogger(__name__)


def check_support(method: MethodInfo, backend_id: str = COREML_BACKEND_ID) -> None:
    """Check that this host supports all delegates and operators of a method, before loading it.

    Raises:
        ProgramError: The method has a delegate of another backend than ``backend_id``.
        UnsupportedOpError: An operator has no kernel.
    """
    for info in method.delegates:
        if info.backend_id != backend_id:
            raise ProgramError(
                f"method {method.name!r} has a delegate of another backend",
                got=info.backend_id,
                expected=backend_id,
                remedy=_remedy_for_other_backends(method, backend_id),
            )
    for operator in sorted(method.operators):
        find_kernel(operator)


def _remedy_for_other_backends(method: MethodInfo, backend_id: str) -> str:
    reason = stock.unavailable_reason()
    if reason is None:
        try:
            stock.check_support(method, backend_id)
        except (EngineUnavailableError, ProgramError, UnsupportedOpError) as error:
            reason = f"{error.what}: {error.got}"
    if reason is None:
        return "Run the program on the stock runtime, or lower it for one backend only."
    return f"Lower it for one backend only: the stock host does not run it either ({reason})."


class PythonProgram(HostProgram):
    """A ``.pte`` loaded for execution in Python.

    Calls from several threads run at the same time, as many as there are CPUs, each with its own
    memory for computed values. Calls of a method with states or shared memory run one at a time.

    Mutable buffers and the states of delegates belong to the loaded program: they start at their
    exported values and persist between calls.

    Args:
        pte: Path of a ``.pte`` (mapped, not read), its bytes, or an opened program.
        loader: Prepares delegates.
        backend_id: The backend whose delegates ``loader`` prepares.
        data: Files of external data of the program; an opened program has it.
        rejected_hosts: Value of the attribute.
        trace: Receives the events of calls, unless it is None.

    Raises:
        BlobFormatError: Not a ``.pte``, or a truncated or corrupt one.
        ProgramError: A file cannot be read, or ``data`` lacks tensors of the program.
    """

    host_name = "python"

    def __init__(
        self,
        pte: Source | PteProgram,
        loader: DelegateLoader,
        *,
        backend_id: str = COREML_BACKEND_ID,
        data: Sources | None = None,
        rejected_hosts: RejectedHosts = NO_REJECTED_HOSTS,
        trace: EventTrace | None = None,
    ) -> None:
        program = pte if isinstance(pte, PteProgram) else open_program(pte, data)
        super().__init__(program, rejected_hosts, threading.RLock())
        self._trace = trace
        self._loader = loader
        self._backend_id = backend_id
        self._memory = ProgramMemory(program, program.named_data)
        self._methods: dict[str, _LoadedMethod] = {}
        self._copies: dict[str, _Copies] = {}

    def delegates(self, method: str) -> tuple[DelegateCallable, ...]:
        """Return the loaded delegates of a method; see ``HostProgram``."""
        with self._lock:
            return self._loaded(method).delegates

    def run(self, method: str, inputs: Sequence[Value]) -> list[Value]:
        """Run a method once; see ``HostProgram``."""
        copies = self._copies.get(method)
        if copies is None:
            with self._lock:
                loaded = self._loaded(method)
                copies = self._copies.get(method)
                if copies is None:
                    return loaded.run(inputs)
        return copies.run(inputs)

    def _states(self, *, loaded: bool = False) -> dict[str, State]:
        methods = list(self._methods) if loaded else self.method_names
        return dict(state for name in methods for state in self._loaded(name).states())

    def _logged_events(self) -> tuple[bytes, bytes] | None:
        with self._lock:
            return None if self._trace is None else self._trace.write()

    def _loaded(self, name: str) -> _LoadedMethod:
        loaded = self._methods.get(name)
        if loaded is None:
            method = self.program.method(name)
            check_support(method, self._backend_id)
            if self._trace is None:
                loaded = self._load_method(method)
            else:
                loaded = self._trace.run(LOAD, lambda: self._load_method(method))
            self._methods[name] = loaded
            if not loaded.keeps_state and self._trace is None:
                self._copies[name] = _Copies(loaded)
            _logger.debug("loaded method %s: %d delegates", name, len(loaded.delegates))
        return loaded

    def _load_method(self, method: MethodInfo) -> _LoadedMethod:
        delegates = [self._load_delegate(method, info) for info in method.delegates]
        return _LoadedMethod(method, self._memory, delegates, self._trace)

    def _load_delegate(self, method: MethodInfo, info: DelegateInfo) -> DelegateCallable:
        return self._loader(
            DelegatePayload(
                backend_id=info.backend_id,
                processed=info.processed,
                compile_specs=info.compile_specs,
                method_name=method.name,
                named_data=self.program.named_data,
                is_observed=self._trace is not None,
            )
        )


class _Copies:
    """Copies of a loaded method that keeps no state between calls, for concurrent calls."""

    def __init__(self, first: _LoadedMethod) -> None:
        self._first = first
        self._idle = [first]
        self._slots = threading.Semaphore(cpu_count())

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Run the method once, when fewer calls are running than there are CPUs."""
        with self._slots:
            try:
                copy = self._idle.pop()  # atomic, so no lock
            except IndexError:
                copy = self._first.copy()
            try:
                return copy.run(inputs)
            finally:
                self._idle.append(copy)


_NO_CONTEXT: Final = nullcontext()


class _LoadedMethod:
    """One method with its memory and its steps."""

    def __init__(
        self,
        method: MethodInfo,
        memory: ProgramMemory,
        delegates: Sequence[DelegateCallable],
        trace: EventTrace | None = None,
    ) -> None:
        self._trace = trace
        self._method = method
        self._memory = memory
        self.delegates = tuple(delegates)
        values = self._values = memory.materialise(method)
        for index in method.outputs:
            if isinstance(method.values[index], IndexList):
                raise ProgramError(f"method {method.name!r} returns a list as a single output")
        delegate_only = find_delegate_only_values(method, delegates)
        self._replaced = self._replaced_inputs(delegate_only.inputs)
        # These outputs are new in each run and need no copy, unless they are returned twice.
        self._new = {i for i in delegate_only.outputs if method.outputs.count(i) == 1}
        if trace is not None:
            delegates = [ObservedDelegate(delegate, trace) for delegate in delegates]
        chains, replaced = bind_method(method, values, delegates, self._replaced, delegate_only)
        self._chains = chains if trace is None else self._traced(chains, trace)
        has_kernels = any(isinstance(call, KernelCall) for c in method.chains for call in c)
        self._shares_cores = bool(delegates) and has_kernels
        # Values to reset before each run: a failed run must not leave its loop counters behind.
        self._initial = [(index, values[index]) for index in sorted(replaced)]

    def copy(self) -> _LoadedMethod:
        """Return a copy of the method with the same delegates and its own memory."""
        return _LoadedMethod(self._method, self._memory, self.delegates)

    @property
    def keeps_state(self) -> bool:
        """Whether a call changes the state of later calls, of this or another method."""
        return any(True for _ in self.states()) or self._memory.is_shared(self._method)

    def states(self) -> Iterator[tuple[str, State]]:
        """Yield the states of the method, with their names."""
        yield from states_of(self._method.name, self.delegates).items()
        buffers = mutable_buffers(self._method)
        if buffers:
            tensors = {str(index): self._values[index] for index in buffers}
            initial = {str(i): self._memory.initial_value(spec) for i, spec in buffers.items()}
            yield f"{self._method.name}.buffer", BufferState(tensors, initial)

    def _replaced_inputs(self, delegate_only: Collection[int]) -> frozenset[int]:
        """Return the tensor inputs that the caller's tensor replaces, without a copy.

        These are inputs without planned memory, and inputs that only delegates read.
        """
        specs = self._method.values
        return frozenset(
            index
            for index in self._method.inputs
            if isinstance(spec := specs[index], TensorSpec)
            and (spec.allocation is None or index in delegate_only)
        )

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        trace = self._trace
        if trace is None:
            return self._run(inputs)
        outputs: list[Value] = trace.run(EXECUTE, lambda: self._run(inputs))
        trace.values(outputs, are_outputs=True)
        return outputs

    def _traced(
        self, chains: tuple[tuple[Step, ...], ...], trace: EventTrace
    ) -> tuple[tuple[Step, ...], ...]:
        """Return the steps with logging of every call of a kernel or delegate."""

        def traced(step: Step, chain: int, position: int) -> Step:
            instruction = self._method.chains[chain][position]
            match instruction:
                case KernelCall():
                    name = instruction.operator.rpartition("::")[2]
                    outputs = find_kernel(instruction.operator).outputs
                    results = [instruction.args[output] for output in outputs]
                case DelegateCall():
                    name, results = DELEGATE, list[int]()
                case _:
                    return step

            def logged() -> int | None:
                target: int | None = trace.step(
                    name, chain, position, step, has_values=bool(results)
                )
                trace.values(self._values_of(results))
                return target

            return logged

        return tuple(
            tuple(traced(step, number, position) for position, step in enumerate(steps))
            for number, steps in enumerate(chains)
        )

    def _values_of(self, indices: Sequence[int]) -> Iterator[Value]:
        """Yield values, with lists flattened."""
        for index in indices:
            spec = self._method.values[index]
            members = spec.items if isinstance(spec, IndexList) else (index,)
            yield from (self._values[member] for member in members if member >= 0)

    def _run(self, inputs: Sequence[Value]) -> list[Value]:
        check_inputs(self._method, inputs)
        with torch.no_grad(), one_torch_thread() if self._shares_cores else _NO_CONTEXT:
            for index, value in self._initial:
                self._values[index] = value
            for index, value in zip(self._method.inputs, inputs, strict=True):
                self._set_input(index, value)
            for number in range(len(self._chains)):
                self._run_chain(number)
            return [
                value if index in self._new else _copy(value)
                for index in self._method.outputs
                for value in (self._values[index],)
            ]

    def _set_input(self, index: int, value: Value) -> None:
        spec = self._method.values[index]
        if not isinstance(spec, TensorSpec) or not isinstance(value, torch.Tensor):
            return  # ``check_inputs`` has checked that it equals the exported value
        if index in self._replaced:
            self._values[index] = in_dim_order(value, spec)
        else:
            target: torch.Tensor = self._values[index]
            if target.shape != value.shape:
                shape = tuple(value.shape)
                target.as_strided_(shape, spec.strides_for(shape))
            fill(target, value)

    def _run_chain(self, number: int) -> None:
        steps = self._chains[number]
        count = len(steps)
        position = 0
        try:
            while position < count:
                target = steps[position]()
                position = position + 1 if target is None else target
        except CoreMLDelegateError as error:
            error.add_note(f"in {self._where(number, position)}")
            raise
        except Exception as error:  # noqa: BLE001 - kernels raise anything
            self._blame(error, number, position)

    def _where(self, number: int, position: int) -> str:
        instruction = self._method.chains[number][position]
        chain = f" of chain {number}" if len(self._chains) > 1 else ""
        return (
            f"{_describe_call(instruction)} (instruction {position}{chain} of method "
            f"{self._method.name!r})"
        )

    def _blame(self, error: Exception, number: int, position: int) -> NoReturn:
        instruction = self._method.chains[number][position]
        args = instruction.args if isinstance(instruction, KernelCall | DelegateCall) else ()
        shapes = ", ".join(self._describe_value(index) for index in args)
        what = f"{self._where(number, position)} failed: {first_line(error)}"
        blame(error, OpExecutionError, what, got=f"arguments ({shapes})" if shapes else None)

    def _describe_value(self, index: int) -> str:
        value = self._values[index]
        if isinstance(value, torch.Tensor):
            return describe(value.dtype, value.shape)
        if isinstance(value, IndexList):
            return (
                f"[{', '.join('None' if i < 0 else self._describe_value(i) for i in value.items)}]"
            )
        return repr(value)


def _describe_call(instruction: Instruction) -> str:
    if isinstance(instruction, KernelCall):
        return instruction.operator
    if isinstance(instruction, DelegateCall):
        return f"delegate {instruction.delegate}"
    return type(instruction).__name__


def _copy(value: Value) -> Value:
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_like(value)
    fill(copy, value)
    return copy
