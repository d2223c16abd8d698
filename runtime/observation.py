"""Observe the calls of a delegate: the time of each op, and the values that ops compute.

ExecuTorch's developer tools identify an op by its debug symbol, which the blob's debug info maps to
calls of the original program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from coreml_delegate.formats.blob_layout import DebugInfo, debug_symbol
from coreml_delegate.runtime.engines.base import Array, KernelTime, State
from coreml_delegate.runtime.mil.costs import Work
from coreml_delegate.runtime.mil.program import Feature, Function, NamedType, TensorType
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.program.delegate_interface import OpEvent

# A kernel's time belongs to the first of these ops that it computes; fused ops have no time.
_LEADING = frozenset(
    {
        *("conv", "conv_transpose", "linear", "matmul", "einsum", "scaled_dot_product_attention"),
        *("lstm", "gru", "rnn", "while_loop", "cond"),
    }
)


class Observer:
    """Runs a model that was compiled with ``profiling``, and reports times and values of its ops.

    ``info`` is the debug info of the model's blob, or None.
    """

    def __init__(self, model: Model, info: DebugInfo | None) -> None:
        self._model = model
        self._ops = model.function.block.ops
        self._symbols = debug_symbols(model.function, info)
        self._handles = {} if info is None else info.handles
        result_counts = {} if info is None else info.with_value
        # Index of an op that computes the value of a call -> number of the call's results.
        self._with_value = {
            index: result_counts[symbol]
            for index, symbol in self._symbols.items()
            if symbol in result_counts
        }
        self._watched: Model | None = None
        self._work = Work(model.function)
        self._work_of: dict[tuple[tuple[int, ...], ...], dict[int, dict[str, int]]] = {}

    def run(
        self, inputs: Mapping[str, Array], state: State | None, *, with_values: bool
    ) -> tuple[dict[str, Array], tuple[OpEvent, ...]]:
        """Run once.

        With values, the call is computed twice: the values first, without changing ``state``.

        Returns:
            The outputs, and the events in order of execution. Events with values come first,
            because ExecuTorch's Inspector reads only the first event of a call.

        Raises:
            ExecutionError: An op failed.
        """
        values = self._values(inputs, state) if with_values else {}
        start = time.perf_counter_ns()
        outputs, kernels = self._model.compiled.profile(inputs, state)
        events = self._events(kernels, start, values)
        if not with_values:
            return outputs, tuple(events)
        compared = {handle for event in events if event.values for handle in self._calls(event)}
        # Inspector fails at a call that has an event and no value. So such an op is logged by a
        # name that is no symbol, and belongs to no call.
        reported = [
            event
            if event.values or not compared.isdisjoint(self._calls(event))
            else replace(event, symbol=" ".join(reversed(event.symbol.rsplit(":", 1))))
            for event in events
        ]
        return outputs, tuple(sorted(reported, key=lambda event: not event.values))

    def _calls(self, event: OpEvent) -> Sequence[int]:
        """Return the debug handles of the calls that an op computes."""
        return self._handles.get(event.symbol, ())

    def _events(
        self, kernels: Sequence[KernelTime], start: int, values: Mapping[int, tuple[Array, ...]]
    ) -> list[OpEvent]:
        events: dict[int, OpEvent] = {}
        for kernel in kernels:
            indices = [index for index in kernel.ops if index in self._symbols]
            leading = next(
                (op_index for op_index in indices if self._ops[op_index].type in _LEADING), None
            )
            owner = indices[0] if leading is None and indices else leading
            details: dict[str, object] = {
                "kernel": kernel.kernel,
                "ops": [self._symbols[op_index] for op_index in indices],
            }
            if kernel.is_mean:
                details["mean"] = True
            for index in indices:
                spent = kernel.nanoseconds if index == owner else 0
                previous = events.get(index)
                if previous is not None:  # the op has several kernels, such as a reorder
                    longer = details if spent > previous.nanoseconds else previous.kernel
                    spent += previous.nanoseconds
                    events[index] = replace(previous, nanoseconds=spent, kernel=longer)
                    continue
                events[index] = OpEvent(
                    self._symbols[index], start, spent, details, values.get(index, ())
                )
            start += kernel.nanoseconds
        for index, work in self._work_in(kernels).items():
            events[index] = replace(events[index], kernel={**events[index].kernel, **work})
        # Ops that the engine has removed, such as casts in fp32, still have values.
        for index, computed in values.items():
            if index not in events:
                events[index] = OpEvent(self._symbols[index], start, 0, {"kernel": ""}, computed)
        return list(events.values())

    def _work_in(self, kernels: Sequence[KernelTime]) -> dict[int, dict[str, int]]:
        """Return the known work of each op that kernels compute, by the op's index."""
        key = tuple(kernel.ops for kernel in kernels)
        if key not in self._work_of:
            fused: dict[int, set[int]] = {}
            for kernel in kernels:
                for index in kernel.ops:
                    fused.setdefault(index, set()).update(kernel.ops)
            self._work_of[key] = {
                index: {
                    name: number
                    for name, number in (
                        ("flops", self._work.flops(index)),
                        ("bytes", self._work.bytes_moved(index, fused_with)),
                    )
                    if number is not None
                }
                for index, fused_with in fused.items()
                if index in self._symbols
            }
        return self._work_of[key]

    def _values(
        self, inputs: Mapping[str, Array], state: State | None
    ) -> dict[int, tuple[Array, ...]]:
        if self._watched is None:
            outputs = [out for index in self._with_value for out in self._ops[index].outputs]
            self._watched = self._model.with_outputs(_features(outputs))
        own = self._watched.make_state()
        if own is not None and state is not None:
            own.restore(state.snapshot())
        computed = self._watched.compiled(inputs, own)
        return {
            index: _padded([computed[out.name] for out in self._ops[index].outputs], count)
            for index, count in self._with_value.items()
            if all(out.name in computed for out in self._ops[index].outputs)
        }


def debug_symbols(function: Function, info: DebugInfo | None) -> dict[int, str]:
    """Return the debug symbol of each op, by index in the function's block.

    ``info`` is the debug info of the delegate's blob, or None.
    """
    symbols: dict[tuple[str, str], str] = {}
    for symbol, path in () if info is None else info.paths.items():
        names = {step.get("Name") for step in path if step.get("Type") == "Function"}
        if names == {function.name} and path and "Output" in path[-1]:
            symbols[path[-1]["Output"], path[-1].get("Operator", "")] = symbol
    return {
        index: symbols.get((op.outputs[0].name, op.type), debug_symbol(op.outputs[0].name, op.type))
        for index, op in enumerate(function.block.ops)
        if op.outputs and not op.type.startswith("const")
    }


def _padded(values: list[Array], count: int) -> tuple[Array, ...]:
    """Return ``values``, padded with empty arrays to ``count``."""
    return (*values, *(np.empty(0, np.float32) for _ in range(count - len(values))))


def _features(outputs: Sequence[NamedType]) -> tuple[Feature, ...]:
    unique = {out.name: out.type for out in outputs}
    return tuple(
        Feature(name, type_)
        for name, type_ in unique.items()
        if isinstance(type_, TensorType) and type_.dtype.numpy is not np.dtype(object)
    )
