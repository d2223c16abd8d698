"""Run a compiled model: infer requests, the arrays at their ports, states.

The overhead of a call was measured on a three-layer perceptron: binding an array to a port takes
about 10 us, copying a few kilobytes less than 1 us, and OpenVINO's public ``infer`` 4 us more than
the extension method that it wraps. So small arrays are copied through views made once, and large
arrays are bound without a copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from coreml_delegate.errors import ExecutionError, InputError
from coreml_delegate.patches.openvino import infer_method
from coreml_delegate.runtime.engines.base import Array, KernelTime, State
from coreml_delegate.runtime.engines.openvino.graph import FAILURE
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.engines.openvino.session.native_calls import (
    describe_function,
    describe_model,
    load_natively,
    native_obstacle,
)
from coreml_delegate.runtime.engines.openvino.session.state_tensors import (
    Interface,
    OpenVinoState,
    Writes,
    native_state,
)
from coreml_delegate.runtime.engines.openvino.translate import labelled_ops
from coreml_delegate.runtime.native import (
    ArrayCall,
    NativeCall,
    NativeInterface,
    NativeModel,
    NativeProgram,
)
from coreml_delegate.runtime.op_errors import last_line

# Arrays of at least this size are bound instead of copied, in bytes.
_BIND_BYTES = 1 << 16

_infer: Any = infer_method()


def _infer_on_one_thread(request: Any) -> None:
    """Run a request of a single-threaded model.

    OpenVINO 2026.4's ``infer`` loses errors of such models and leaves the outputs unchanged;
    ``start_async`` and ``wait`` raise the errors.
    """
    request.start_async()
    request.wait()


@dataclass(frozen=True, slots=True)
class _Port:
    """An input or output: its feature name, its index, and its fixed shape or None.

    An output may return an input unchanged, which is then passed on.
    """

    name: str
    index: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...] | None
    is_input_passed_on: bool

    @property
    def copied(self) -> bool:
        """Whether arrays are copied through a view rather than bound to the port."""
        if self.shape is None:
            return False
        is_small = self.dtype.itemsize * math.prod(self.shape) < _BIND_BYTES
        return is_small or self.is_input_passed_on


def _inputs_passed_on(compiled: Any) -> frozenset[int]:
    """Return the indices of outputs that return an input unchanged.

    OpenVINO 2026.4's CPU plugin gives such an input the memory that is bound to the output, and so
    computes everything with the content of that memory. No issue is known. States are not affected:
    they are fp16 at the boundary and fp32 inside, so that a conversion is always in between.
    """
    results = compiled.get_runtime_model().get_results()
    names = {
        result.get_friendly_name()
        for result in results
        if result.input_value(0).get_node().get_type_name() == "Parameter"
    }
    return frozenset(
        index
        for index, port in enumerate(compiled.outputs)
        if port.get_node().get_friendly_name() in names
    )


def _ports(
    names: tuple[str, ...], ports: list[Any], passed_on: Collection[int] = ()
) -> list[_Port]:
    return [
        _Port(
            name,
            index,
            np.dtype(port.get_element_type().to_dtype()),
            tuple(port.get_shape()) if port.get_partial_shape().is_static else None,
            index in passed_on,
        )
        for index, (name, port) in enumerate(zip(names, ports, strict=False))
    ]


class _Request:
    """An infer request with the views and arrays at its ports, for one call at a time."""

    def __init__(
        self, compiled: Any, inputs: list[_Port], outputs: list[_Port], writes: tuple[Writes, ...]
    ) -> None:
        self._request = compiled.create_infer_request()
        self._has_one_thread = int(compiled.get_property("INFERENCE_NUM_THREADS")) == 1
        self._copied = [
            (port.name, self._request.get_input_tensor(port.index).data)
            for port in inputs
            if port.copied
        ]
        self._bound = [port for port in inputs if not port.copied]
        self._bound_arrays: dict[str, Array] = {}
        self._outputs = [
            (port, self._request.get_output_tensor(port.index).data if port.copied else None)
            for port in outputs
        ]
        self._first_state = len(inputs)
        # (state, output) of each state that is replaced; for each state, views of the indices and
        # rows of its row writes.
        self._replaced: list[tuple[int, int]] = []
        self._rows: list[list[tuple[NDArray[np.int32], Array]]] = []
        port = len(outputs)
        for number, axes in enumerate(writes):
            if axes is None:
                self._replaced.append((number, port))
            count = len(axes or ())
            starts = range(port, port + 2 * count, 2)
            self._rows.append([(self._view(start), self._view(start + 1)) for start in starts])
            port += 1 if axes is None else 2 * count

    def run(self, inputs: Mapping[str, Array], state: OpenVinoState | None) -> dict[str, Array]:
        """Run once."""
        for name, view in self._copied:
            np.copyto(view, inputs[name], casting="no")
        for port in self._bound:
            self._bind_input(port, inputs[port.name])
        if state is not None:
            self._bind_state(state)
        results = {port.name: self._result(port, view) for port, view in self._outputs}
        if self._has_one_thread:
            _infer_on_one_thread(self._request)
        else:
            _infer(self._request, {}, True, False)
        for port, view in self._outputs:
            if view is not None:
                results[port.name] = view.copy()
            elif port.shape is None:
                results[port.name] = self._request.get_output_tensor(port.index).data.copy()
        if state is not None:
            state.advance(self._rows)
        return results

    def counters(self) -> list[Any]:
        """Return OpenVINO's counters of all kernels; empty without profiling."""
        return list(self._request.get_profiling_info())

    def _view(self, port: int) -> NDArray[Any]:
        return self._request.get_output_tensor(port).data

    def _bind_input(self, port: _Port, array: Array) -> None:
        bound = self._bound_arrays.get(port.name)
        if bound is array or (bound is not None and _is_same_memory(bound, array)):
            return
        # OpenVINO takes only contiguous writable arrays, although it does not write to them.
        data = np.require(array, requirements=("C", "W"))
        self._request.set_input_tensor(port.index, ov.Tensor(data, shared_memory=True))
        self._bound_arrays[port.name] = data

    def _result(self, port: _Port, view: Array | None) -> Array:
        """Return a new array bound to a large output; a placeholder for any other output."""
        if view is not None or port.shape is None:
            return _PENDING
        array = np.empty(port.shape, dtype=port.dtype)
        self._request.set_output_tensor(port.index, ov.Tensor(array, shared_memory=True))
        return array

    def _bind_state(self, state: OpenVinoState) -> None:
        current, spare = state.tensors()
        for number, source in enumerate(current):
            self._request.set_input_tensor(self._first_state + number, source)
        for number, port in self._replaced:
            self._request.set_output_tensor(port, spare[number])


_PENDING: Array = np.empty(0)

PROFILING = "PERF_COUNT"
"""The property that makes OpenVINO time kernels."""


class _Profiler:
    """Reads the times of the kernels of a labelled model, compiled with ``PROFILING``.

    OpenVINO 2026.4 counts in whole microseconds and reports the mean over all runs of the model.
    The first run takes longer, so the time of a later run is the mean without the first. OpenVINO
    reports a kernel as not run if its mean is below half a microsecond.
    """

    def __init__(self, compiled: Any) -> None:
        self._ops_of = _ops_of_kernels(compiled)
        self._lock = threading.Lock()
        self._runs = 0
        self._first: dict[str, float] = {}
        self._executed: set[str] = set()

    def times(self, counters: Sequence[Any]) -> tuple[KernelTime, ...]:
        """Return the times of all kernels that have run so far, from the counters after a run."""
        means = {c.node_name: c.real_time.total_seconds() * 1e9 for c in counters}
        executed = {c.node_name for c in counters if c.status == ov.ProfilingInfo.Status.EXECUTED}
        with self._lock:
            self._runs += 1
            runs = self._runs
            first = self._first = self._first or means
            executed |= self._executed
            self._executed = executed
        if runs > 1:
            means = {
                name: max(0.0, (mean * runs - first.get(name, 0.0)) / (runs - 1))
                for name, mean in means.items()
            }
        return tuple(
            KernelTime(
                self._ops_of.get(counter.node_name, ()),
                round(means[counter.node_name]),
                f"{counter.node_type} {counter.exec_type}",
                is_mean=True,
            )
            for counter in counters
            if counter.node_name in executed
        )


_ORIGIN = "originalLayersNames"


def _ops_of_kernels(compiled: Any) -> dict[str, tuple[int, ...]]:
    """Return the indices of the ops that each kernel of a labelled model computes, by kernel name.

    A kernel that OpenVINO has added, such as a reorder of an operand, belongs to the op that reads
    it.
    """
    nodes = compiled.get_runtime_model().get_ordered_ops()
    ops_of: dict[str, tuple[int, ...]] = {}
    for node in reversed(nodes):
        info = node.get_rt_info()
        ops = labelled_ops(info[_ORIGIN].astype(str)) if _ORIGIN in info else ()
        if not ops:
            users = (port.get_node() for out in node.outputs() for port in out.get_target_inputs())
            ops = next((o for user in users if (o := ops_of.get(user.get_friendly_name()))), ())
        ops_of[node.get_friendly_name()] = ops
    for node in nodes:
        if not ops_of[node.get_friendly_name()]:
            sources = (value.get_node().get_friendly_name() for value in node.input_values())
            ops_of[node.get_friendly_name()] = next((o for s in sources if (o := ops_of[s])), ())
    return ops_of


def _is_same_memory(bound: Array, array: Array) -> bool:
    """Whether ``array`` is a view of the same memory as ``bound``, which is contiguous."""
    return (
        array.flags.c_contiguous
        and bound.ctypes.data == array.ctypes.data
        and bound.shape == array.shape
        and bound.dtype == array.dtype
    )


def _execution_error(message: str) -> ExecutionError:
    _, purpose, reason = message.partition(FAILURE)
    if purpose:
        return ExecutionError("the program exceeds a limit", got=reason.partition("'")[0])
    return ExecutionError("OpenVINO failed to run the function", got=message)


class OpenVinoFunction:
    """A compiled function; see ``CompiledFunction``.

    Calls from several threads run at the same time, each with its own infer request; requests are
    reused.

    Args:
        keep: An object that must live as long as the model.
        content: The bytes that the model was imported from; None if it was compiled. They live as
            long, too.

    Raises:
        ValueError: The number of ports does not agree with ``interface``.
    """

    def __init__(
        self,
        interface: Interface,
        compiled: Any,
        config: Mapping[str, object],
        *,
        core: Any,
        keep: object = None,
        content: NDArray[np.uint8] | None = None,
    ) -> None:
        expected = interface.port_counts
        if (len(compiled.inputs), len(compiled.outputs)) != expected:
            raise ValueError(
                f"the model has {len(compiled.inputs)} inputs and {len(compiled.outputs)} outputs, "
                f"not {expected[0]} and {expected[1]}"
            )
        self.interface = interface
        self.compiled = compiled
        self.config = config
        self._core = core
        self._keep = keep
        self._content = content
        self._states = interface.states
        self._passed_on = _inputs_passed_on(compiled)
        self._inputs = _ports(interface.inputs, compiled.inputs)
        self._outputs = _ports(interface.outputs, compiled.outputs, self._passed_on)
        self._native: ArrayCall | None = None
        self._profiler: _Profiler | None = None
        self._making_profiler = threading.Lock()
        self._has_open_inputs = any(port.shape is None for port in self._inputs)
        self._renewing = threading.Lock()
        self._idle = [self._request()]

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Raises:
            InputError: The function has states and ``state`` is not a state of this engine, or the
                reverse.
            ExecutionError: OpenVINO failed.
        """
        if self._native is not None and state is None:
            results = self._native(inputs)
            if results is not None:
                return results
        return self._run(inputs, state, None)[0]

    def profile(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and return the time of every kernel too; see ``CompiledFunction``."""
        with self._making_profiler:
            profiler = self._profiler = self._profiler or _Profiler(self.compiled)
        return self._run(inputs, state, profiler)

    def _run(
        self, inputs: Mapping[str, Array], state: State | None, profiler: _Profiler | None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        if isinstance(state, OpenVinoState) is not bool(self._states):
            raise InputError(
                "wrong state",
                got=type(state).__name__,
                expected="a state from make_state" if self._states else "None",
            )
        if isinstance(state, OpenVinoState):
            state.arrange(self.interface.writes)
        own_state = state if isinstance(state, OpenVinoState) else None
        idle = self._idle
        try:
            request = idle.pop()  # atomic, so no lock
        except IndexError:
            request = self._request()
        try:
            outputs = request.run(inputs, own_state)
            return outputs, () if profiler is None else profiler.times(request.counters())
        except (RuntimeError, MemoryError) as error:
            # A node that fails on purpose does not change the model.
            if not self._has_open_inputs or FAILURE in str(error):
                raise _execution_error(last_line(error)) from error
        finally:
            idle.append(request)
        return self._run_again(inputs, own_state, idle), ()

    def _run_again(
        self, inputs: Mapping[str, Array], state: OpenVinoState | None, failed: list[_Request]
    ) -> dict[str, Array]:
        """Import the model again and run once, after the requests in ``failed`` have failed.

        After a call that failed, OpenVINO 2026.4 may refuse sizes that it took before: a reshape
        keeps the sizes that it failed with. No issue is known. So the failure may come from an
        earlier call, or from another thread.
        """
        with self._renewing:
            try:
                compiled = self._import_again()
                request = _Request(compiled, self._inputs, self._outputs, self.interface.writes)
                outputs = request.run(inputs, state)
            except (RuntimeError, MemoryError) as error:
                raise _execution_error(last_line(error)) from error
            if self._idle is failed:
                self.compiled, self._profiler, self._idle = compiled, None, [request]
            return outputs

    def _import_again(self) -> Any:
        """Import the model again.

        Always from the first content: OpenVINO cannot import an export of an imported model.
        """
        if self._content is None:
            self._content = np.frombuffer(self.compiled.export_model().getbuffer(), np.uint8)
        tensor = ov.Tensor(self._content, shared_memory=True)
        return self._core.import_model(tensor, DEVICE, dict(self.config))

    @property
    def native(self) -> Self:
        """The function itself, which may be called without Python."""
        return self

    def make_state(self) -> OpenVinoState | None:
        """Return a state of zeros; None for a function without state."""
        if not self._states:
            return None
        return OpenVinoState(self._states, self.interface.writes)

    def native_call(self, interface: NativeInterface, state: State | None) -> NativeCall | None:
        """Return a call that runs without Python; see ``OpenVinoNativeFunction``."""
        program = self.native_program(interface, ())
        function = None if program is None else load_natively(program)
        return None if function is None else function.bind(native_state(state))

    def native_program(
        self,
        interface: NativeInterface,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],  # noqa: ARG002
    ) -> NativeProgram | None:
        """Return the native form of the function; see ``OpenVinoNativeFunction``."""
        if self.native_obstacle() is not None:
            return None
        return describe_function(self.config, interface, [self.native_model(interface)])

    def native_model(self, interface: NativeInterface) -> NativeModel:
        """Return the native form of the model; ``native_obstacle`` must have returned None."""
        own = self.interface
        return describe_model(
            self.compiled,
            [own.inputs.index(name) for name in interface.inputs],
            [own.outputs.index(name) for name in interface.outputs],
            self._passed_on,
            range(len(own.inputs), len(own.inputs) + len(own.states)),
            own.writes,
        )

    def native_obstacle(self) -> str | None:
        """Return the reason why native calls are impossible, or None if they are possible."""
        ports = iter(range(len(self.interface.outputs), len(self.compiled.outputs)))
        for index, axes in enumerate(self.interface.writes, len(self.interface.inputs)):
            state_type = self._type_name(self.compiled.inputs[index])
            for _ in range(1 if axes is None else len(axes)):
                # A row write has two ports: indices, then rows.
                port = next(ports) if axes is None else (next(ports), next(ports))[1]
                update_type = self._type_name(self.compiled.outputs[port])
                # In other types, an update may be an input passed on, or alias the state.
                if update_type != "f16" or state_type != ("f16" if axes is None else "f32"):
                    return f"its states are kept in {state_type} and written in {update_type}"
        return native_obstacle(self.compiled)

    @staticmethod
    def _type_name(port: Any) -> str:
        return port.get_element_type().get_type_name()

    def prepare_native_calls(self) -> None:
        """Make later calls without Python, if possible."""
        ports = self._inputs, self._outputs
        if self._native is not None or self._states:
            return
        if any(port.shape is None for side in ports for port in side):
            return
        names = self.interface.inputs, self.interface.outputs
        call = self.native_call(NativeInterface(*names, (None,) * len(names[0])), None)
        if call is not None:
            types = [[(port.name, port.dtype, port.shape or ()) for port in side] for side in ports]
            self._native = ArrayCall(call, *types)

    def prepare_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: one model runs every shape."""

    def _request(self) -> _Request:
        return _Request(self.compiled, self._inputs, self._outputs, self.interface.writes)
