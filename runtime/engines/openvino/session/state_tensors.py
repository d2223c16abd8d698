"""The ports of a compiled model, and its state tensors, which persist between calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.engines.base import Array, State
from coreml_delegate.runtime.engines.openvino.graph import GRAPH_TYPE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import TensorType
from coreml_delegate.runtime.native import NativeState
from coreml_delegate.runtime.snapshots import Snapshot

StateTypes: TypeAlias = tuple[tuple[str, TensorType], ...]
"""Name and type of every state tensor."""

Writes: TypeAlias = tuple[int, ...] | None
"""How a function updates a state: the axis of each row write; None if it replaces the tensor."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The meaning of a compiled model's ports: inputs then states, outputs then state updates.

    An update that replaces a state is one port. A row write is two ports: the indices of the rows,
    int32 [C], and the rows.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: StateTypes
    writes: tuple[Writes, ...]

    @property
    def port_counts(self) -> tuple[int, int]:
        """The number of inputs and of outputs of the model."""
        updates = sum(1 if axes is None else 2 * len(axes) for axes in self.writes)
        return len(self.inputs) + len(self.states), len(self.outputs) + updates

    def encode(self) -> dict[str, Any]:
        """Return the fields as plain data, ready for JSON."""
        return {
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "states": [[name, type_.dtype.label, type_.shape] for name, type_ in self.states],
            "writes": self.writes,
        }

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> Interface:
        """Return the interface from the result of ``encode``.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has the wrong type.
            ValueError: A field has the wrong length, or an unknown dtype.
        """
        states = tuple(
            (name, TensorType(DType.from_label(label), tuple(shape)))
            for name, label, shape in fields["states"]
        )
        writes = tuple(None if axes is None else tuple(axes) for axes in fields["writes"])
        return cls(tuple(fields["inputs"]), tuple(fields["outputs"]), states, writes)


class OpenVinoState(State):
    """State tensors of one model instance, zero at start.

    No call copies a state. A state that calls replace has two tensors in the program's dtype, which
    are swapped: a call reads the first and writes the second. A state that calls write rows to has
    one tensor, in the type that the graph computes in; the program's dtype can represent its
    values.

    Attributes:
        native: The tensors for native calls; the same object for the lifetime of the state.
    """

    def __init__(self, types: StateTypes, writes: tuple[Writes, ...]) -> None:
        self._types = types
        self._writes = writes
        self._arrays: tuple[list[Array], list[Array]] = ([], [])
        self._tensors: tuple[list[Any], list[Any]] = ([], [])
        self.native = NativeState()
        zeros = {name: np.zeros(state_shape(type_), type_.dtype.numpy) for name, type_ in types}
        self._allocate(zeros)

    def reset(self) -> None:
        """Set every state tensor to zero."""
        for array in self._arrays_by_name().values():
            array.fill(0)

    def arrange(self, writes: tuple[Writes, ...]) -> None:
        """Allocate the tensors that a function with these ``writes`` needs, with their content.

        Functions for other input shapes may write a state in another way.
        """
        if writes != self._writes:
            content = self.snapshot()
            self._writes = writes
            self._allocate(content)

    def tensors(self) -> tuple[list[Any], list[Any]]:
        """Return the tensors to read from and the tensors to write to."""
        side = self.native.side
        return self._tensors[side], self._tensors[1 - side]

    def advance(self, rows: Sequence[Sequence[tuple[NDArray[np.int32], Array]]]) -> None:
        """Swap the tensors after a call, and write the rows that it returned.

        ``rows`` has, for each state, the indices and rows of each row write.

        Raises:
            ExecutionError: An index is outside of its state; then no state has changed.
        """
        arrays = self._current()
        updates = [
            (name, array, axis, indices, values)
            for (name, _), array, axes, row_writes in zip(
                self._types, arrays, self._writes, rows, strict=True
            )
            for axis, (indices, values) in zip(axes or (), row_writes, strict=True)
        ]
        for name, array, axis, indices, _ in updates:
            if indices.size and not 0 <= indices.min() <= indices.max() < array.shape[axis]:
                raise ExecutionError(
                    f"row written to state {name!r} does not exist",
                    got=str(indices.tolist()),
                    expected=f"0 to {array.shape[axis] - 1}",
                )
        for _, array, axis, indices, values in updates:
            np.moveaxis(array, axis, 0)[indices] = np.moveaxis(values, axis, 0)
        self.native.side = 1 - self.native.side

    def _allocate(self, content: Snapshot) -> None:
        """Replace the arrays by new arrays with this content."""
        arrays: tuple[list[Array], list[Array]] = ([], [])
        for (name, type_), axes in zip(self._types, self._writes, strict=True):
            value = content[name]
            if axes is None:
                arrays[0].append(value)
                arrays[1].append(np.zeros_like(value))
            else:
                value = value.astype(GRAPH_TYPE[type_.dtype].to_dtype())
                arrays[0].append(value)
                arrays[1].append(value)
        first, second = (
            [ov.Tensor(array, shared_memory=True) for array in side] for side in arrays
        )
        self._arrays, self._tensors = arrays, (first, second)
        native, count = self.native, len(self._types)
        native.side = 0
        native.has_rows = (ctypes.c_int64 * count)(*(axes is not None for axes in self._writes))
        for number, side in enumerate(arrays):
            addresses = (array.ctypes.data for array in side)
            native.memory[number] = (ctypes.c_void_p * count)(*addresses)

    def _arrays_by_name(self) -> Snapshot:
        names = (name for name, _ in self._types)
        return dict(zip(names, self._current(), strict=True))

    def _current(self) -> list[Array]:
        """Return the arrays that the next call reads."""
        return self._arrays[self.native.side]

    def _read(self, name: str) -> Array:
        return self._arrays_by_name()[name].astype(dict(self._types)[name].dtype.numpy)

    def _write(self, name: str, value: Array) -> None:
        self._arrays_by_name()[name][...] = value

    def _tensors_like(self) -> Snapshot:
        return {  # of one element in memory
            name: np.broadcast_to(np.zeros((), type_.dtype.numpy), state_shape(type_))
            for name, type_ in self._types
        }


def native_state(state: State | None) -> NativeState | None:
    """Return the tensors of a state for native calls; None without a state."""
    return state.native if isinstance(state, OpenVinoState) else None


def state_shape(type_: TensorType) -> tuple[int, ...]:
    """Return the shape of a state tensor."""
    return tuple(size or 0 for size in type_.shape or ())
