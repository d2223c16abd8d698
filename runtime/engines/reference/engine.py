"""The reference engine: torch computes op by op, in the dtypes of the program."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.engines.base import Array, EngineOptions, KernelTime, State
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.engines.reference import compiler
from coreml_delegate.runtime.engines.reference.compiler import CompiledProgram, SharedSteps
from coreml_delegate.runtime.engines.reference.interpreter import (
    Frame,
    Listener,
    TracedValue,
)
from coreml_delegate.runtime.engines.reference.values import (
    Value,
    array_to_tensor,
    storage_dtype,
    value_to_array,
)
from coreml_delegate.runtime.mil.location import Location, located_ops
from coreml_delegate.runtime.mil.program import Function, Op, StateType, TensorType
from coreml_delegate.runtime.snapshots import Snapshot


class ReferenceState(State):
    """State tensors of one model instance, by name; calls replace them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def reset(self) -> None:
        """Set every state tensor to zero."""
        self.tensors.update({n: torch.zeros_like(tensor) for n, tensor in self.tensors.items()})

    def _tensors_like(self) -> Snapshot:
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def _read(self, name: str) -> Array:
        return self.tensors[name].numpy().copy()

    def _write(self, name: str, value: Array) -> None:
        self.tensors[name] = torch.from_numpy(value)


class ReferenceFunction:
    """A function ready to be interpreted.

    Calls share only constants, so any number may run at the same time; a state belongs to one call
    at a time.

    Attributes:
        function: The function. If several models share this object, it is the function of the first
            model, whose ops a listener receives.
    """

    native = None

    def __init__(self, function: Function, shared: SharedSteps | None = None) -> None:
        self.function = function
        self._shared = SharedSteps() if shared is None else shared
        self._program: CompiledProgram = compiler.compile_function(function, self._shared)
        self._types = {param.name: param.type for param in function.params}
        self._outputs = function.output_types()

    def variant(self, function: Function) -> ReferenceFunction:
        """Compile a variant: a function with ops of this function, as the same objects.

        Equal names of both outermost blocks have equal values. The common ops are compiled once,
        and both functions use the same constants in memory.

        Raises:
            CoreMLDelegateError: See ``ReferenceEngine.compile``.
        """
        return ReferenceFunction(function, self._shared)

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once; see ``CompiledFunction``."""
        return self.run(inputs, state)

    def run(
        self,
        inputs: Mapping[str, Array],
        state: State | None = None,
        *,
        listener: Listener | None = None,
        decide: Callable[[bool], bool] = bool,
    ) -> dict[str, Array]:
        """Run once, and pass every value that an op computes to ``listener``, in execution order.

        ``decide`` maps the value of every condition of the program to its outcome. The inputs are
        in the dtype of the MIL parameter.

        Returns:
            Outputs by feature name, in declaration order, owned by the caller.

        Raises:
            InputError: An input or the state is missing.
            ExecutionError: An op failed.
        """
        states = self._state_tensors(state)
        frame = Frame(
            function=self.function,
            slots=[None] * self._program.slots,
            states={},
            admitted=self._shared.admitted,
            listener=listener,
            locations={} if listener is None else self._locations,
            decide=decide,
        )
        with torch.inference_mode():
            for name, declared in self._types.items():
                slot = self._program.params[name]
                if isinstance(declared, StateType):
                    frame.states[slot] = states[name]
                elif isinstance(declared, TensorType):
                    frame.slots[slot] = self._input(inputs, name, declared)
            results = self._program.block.run(frame)
            for name in states:
                states[name] = frame.states[self._program.params[name]]
        by_name: dict[str, Value] = dict(zip(self.function.block.outputs, results, strict=True))
        return {
            name: value_to_array(by_name[name], self._outputs[name])
            for name in (feature.name for feature in self.function.outputs)
        }

    @functools.cached_property
    def _locations(self) -> dict[Op, Location]:
        return {op: location for location, op in located_ops(self.function)}

    def profile(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and time every op; see ``CompiledFunction``.

        The time of an op with blocks includes the ops of its blocks.
        """
        indices = {op: index for index, op in enumerate(self.function.block.ops)}
        times: dict[int, int] = {}
        since = time.perf_counter_ns()

        def note(computed: TracedValue) -> None:
            nonlocal since
            index = indices.get(computed.op)
            if index is not None:
                times[index] = times.get(index, 0) + time.perf_counter_ns() - since
                since = time.perf_counter_ns()

        outputs = self.run(inputs, state, listener=note)
        kernels = (
            KernelTime((index,), elapsed, self.function.block.ops[index].type)
            for index, elapsed in times.items()
        )
        return outputs, tuple(kernels)

    def make_state(self) -> ReferenceState | None:
        """Return a state of zeros; None for a function without state."""
        tensors = {
            name: torch.zeros(
                [size or 0 for size in declared.wrapped.shape or ()],
                dtype=storage_dtype(declared.wrapped.dtype),
            )
            for name, declared in self._types.items()
            if isinstance(declared, StateType)
        }
        return ReferenceState(tensors) if tensors else None

    def copy_state(self, state: State | None) -> ReferenceState | None:
        """Return a new state with the content of ``state``, a state of any engine."""
        copy = self.make_state()
        if state is None or copy is None:
            # A state is missing or superfluous, which ``run`` refuses.
            return copy if state is not None else None
        fresh = copy.snapshot()
        for name, value in state.snapshot().items():
            current = fresh.get(name)
            copy.write(name, value if current is None else np.asarray(value, current.dtype))
        return copy

    def _state_tensors(self, state: State | None) -> dict[str, Tensor]:
        expected = [name for name, t in self._types.items() if isinstance(t, StateType)]
        if isinstance(state, ReferenceState) and set(state.tensors) == set(expected):
            return state.tensors
        if state is None and not expected:
            return {}
        raise InputError(
            "function and state do not fit",
            got=type(state).__name__ if state is not None else "no state",
            expected=f"a state of {', '.join(expected)}" if expected else "no state",
            remedy="Pass a state from make_state of the same function",
        )

    def _input(self, inputs: Mapping[str, Array], name: str, declared: TensorType) -> Tensor:
        if name not in inputs:
            raise InputError(
                f"input {name!r} is missing",
                got=", ".join(inputs) or "no input",
                expected=", ".join(feature.name for feature in self.function.inputs),
            )
        return array_to_tensor(np.asarray(inputs[name]), declared.dtype)


class ReferenceEngine:
    """Computes op by op with torch: for comparisons, for debugging, and as the fallback.

    ``EngineOptions.threads`` has no effect: torch has one thread count for the whole process, which
    an engine must not change under its caller. Use ``torch.set_num_threads``.
    """

    name = "reference"
    python_reason = "the reference engine is Python"

    def unavailable_reason(self) -> str | None:
        """Return None, because torch is a dependency."""
        return None

    def unsupported(self, function: Function) -> list[str]:
        """Return one reason per op type or parameter without a kernel."""
        return compiler.unsupported(function)

    def compile(
        self,
        function: Function,
        options: EngineOptions,
        source: ProgramSource | None = None,  # noqa: ARG002 - a cache would save no time
    ) -> ReferenceFunction:
        """Prepare ``function`` for execution.

        Raises:
            OptionError: See ``EngineOptions.refuse_numerics_option``.
            UnsupportedOpError: See ``unsupported``.
            ExecutionError: A compressed weight cannot be expanded.
        """
        options.refuse_numerics_option("the reference engine")
        return ReferenceFunction(function)


REFERENCE = ReferenceEngine()
