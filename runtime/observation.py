"""Observe the calls of a delegate: the time of each op, and the values that ops compute.

ExecuTorch's developer tools know an operation by its debug symbol, which the blob's debug info maps
to the calls of the original program.
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

# The first of these that a kernel computes takes its time; what is fused with it comes for free.
_LEADING = frozenset(
    {
        *("conv", "conv_transpose", "linear", "matmul", "einsum", "scaled_dot_product_attention"),
        *("lstm", "gru", "rnn", "while_loop", "cond"),
    }
)


class Observer:
    """Runs a model and tells what its ops did.

    Args:
        model: Compiled with ``profiling``.
        info: Debug info of its blob, if there is any.
    """

    def __init__(self, model: Model, info: DebugInfo | None) -> None:
        self._model = model
        self._ops = model.function.block.ops
        self._symbols = debug_symbols(model.function, info)
        self._handles = {} if info is None else info.handles
        wanted = {} if info is None else info.with_value
        # Number of results of the call whose value an op has, by the op's position.
        self._with_value = {
            place: wanted[symbol] for place, symbol in self._symbols.items() if symbol in wanted
        }
        self._watched: Model | None = None
        self._work = Work(model.function)
        self._work_of: dict[tuple[tuple[int, ...], ...], dict[int, dict[str, int]]] = {}

    def run(
        self, inputs: Mapping[str, Array], state: State | None, *, with_values: bool
    ) -> tuple[dict[str, Array], tuple[OpEvent, ...]]:
        """Run once.

        Args:
            inputs: By feature name, checked.
            state: Of the model; the values are computed first, and leave it as it is.
            with_values: Whether the values of ops are wanted: the call is then computed twice.

        Returns:
            The outputs, and the ops in order of execution. Those with values come first: of several
            events for one call of the program, ExecuTorch's Inspector takes the first.

        Raises:
            ExecutionError: An op failed.
        """
        values = self._values(inputs, state) if with_values else {}
        start = time.perf_counter_ns()
        outputs, kernels = self._model.run_profiled(inputs, state)
        events = self._events(kernels, start, values)
        if not with_values:
            return outputs, tuple(events)
        compared = {handle for event in events if event.values for handle in self._of(event)}
        # Inspector fails at a call that has an event and no value: such an op is logged by a name
        # that is no symbol, and has no call.
        told = [
            event
            if event.values or not compared.isdisjoint(self._of(event))
            else replace(event, symbol=" ".join(reversed(event.symbol.rsplit(":", 1))))
            for event in events
        ]
        return outputs, tuple(sorted(told, key=lambda event: not event.values))

    def _of(self, event: OpEvent) -> Sequence[int]:
        return self._handles.get(event.symbol, ())

    def _events(
        self, kernels: Sequence[KernelTime], start: int, values: Mapping[int, tuple[Array, ...]]
    ) -> list[OpEvent]:
        events: dict[int, OpEvent] = {}
        for kernel in kernels:
            places = [place for place in kernel.ops if place in self._symbols]
            leading = next((p for p in places if self._ops[p].type in _LEADING), None)
            owner = places[0] if leading is None and places else leading
            described: dict[str, object] = {
                "kernel": kernel.kernel,
                "ops": [self._symbols[p] for p in places],
            }
            if kernel.is_mean:
                described["mean"] = True
            for place in places:
                spent = kernel.nanoseconds if place == owner else 0
                known = events.get(place)
                if known is not None:  # a layout is changed for it, say
                    longer = described if spent > known.nanoseconds else known.kernel
                    spent += known.nanoseconds
                    events[place] = replace(known, nanoseconds=spent, kernel=longer)
                    continue
                events[place] = OpEvent(
                    self._symbols[place], start, spent, described, values.get(place, ())
                )
            start += kernel.nanoseconds
        for place, work in self._work_in(kernels).items():
            events[place] = replace(events[place], kernel={**events[place].kernel, **work})
        # What the engine has left out, a cast in fp32 say, has a value still.
        for place, computed in values.items():
            if place not in events:
                events[place] = OpEvent(self._symbols[place], start, 0, {"kernel": ""}, computed)
        return list(events.values())

    def _work_in(self, kernels: Sequence[KernelTime]) -> dict[int, dict[str, int]]:
        """Return the known work of each op that kernels compute, by its position."""
        key = tuple(kernel.ops for kernel in kernels)
        if key not in self._work_of:
            fused: dict[int, set[int]] = {}
            for kernel in kernels:
                for place in kernel.ops:
                    fused.setdefault(place, set()).update(kernel.ops)
            self._work_of[key] = {
                place: {
                    name: number
                    for name, number in (
                        ("flops", self._work.flops(place)),
                        ("bytes", self._work.bytes_moved(place, together)),
                    )
                    if number is not None
                }
                for place, together in fused.items()
                if place in self._symbols
            }
        return self._work_of[key]

    def _values(
        self, inputs: Mapping[str, Array], state: State | None
    ) -> dict[int, tuple[Array, ...]]:
        if self._watched is None:
            outputs = [out for place in self._with_value for out in self._ops[place].outputs]
            self._watched = self._model.with_outputs(_features(outputs))
        own = self._watched.make_state()
        if own is not None and state is not None:
            own.restore(state.snapshot())
        computed = self._watched.run_unchecked(inputs, own)
        return {
            place: _padded([computed[out.name] for out in self._ops[place].outputs], count)
            for place, count in self._with_value.items()
            if all(out.name in computed for out in self._ops[place].outputs)
        }


def debug_symbols(function: Function, info: DebugInfo | None) -> dict[int, str]:
    """Return the debug symbol of each op, by its position among those of the function.

    Args:
        function: Function of a delegate's program.
        info: Debug info of the delegate's blob, if there is any.
    """
    known: dict[tuple[str, str], str] = {}
    for symbol, path in () if info is None else info.paths.items():
        names = {step.get("Name") for step in path if step.get("Type") == "Function"}
        if names == {function.name} and path and "Output" in path[-1]:
            known[path[-1]["Output"], path[-1].get("Operator", "")] = symbol
    return {
        place: known.get((op.outputs[0].name, op.type), debug_symbol(op.outputs[0].name, op.type))
        for place, op in enumerate(function.block.ops)
        if op.outputs and not op.type.startswith("const")
    }


def _padded(values: list[Array], count: int) -> tuple[Array, ...]:
    """Return ``count`` values; those that are missing are empty."""
    return (*values, *(np.empty(0, np.float32) for _ in range(count - len(values))))


def _features(outputs: Sequence[NamedType]) -> tuple[Feature, ...]:
    unique = {out.name: out.type for out in outputs}
    return tuple(
        Feature(name, type_)
        for name, type_ in unique.items()
        if isinstance(type_, TensorType) and type_.dtype.numpy is not np.dtype(object)
    )
