"""States, the tensors that persist between calls, and their snapshots: copies as arrays by name.

A snapshot is checked completely before it is restored, so that a state is never half overwritten.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import InputError

Array: TypeAlias = NDArray[np.generic]
Snapshot: TypeAlias = dict[str, Array]
"""Arrays by name."""


class State(abc.ABC):
    """Mutable tensors of one model instance, zero at start; opaque outside its engine."""

    def snapshot(self) -> Snapshot:
        """Return copies of the state tensors, by feature name, in the declared dtypes."""
        return {name: self._read(name) for name in self._tensors_like()}

    def restore(self, snapshot: Mapping[str, Array]) -> None:
        """Replace the content of every state tensor.

        Args:
            snapshot: The result of ``snapshot``, or arrays of the same names and shapes, with
                dtypes of the same kind.

        Raises:
            InputError: A name, shape or kind of dtype differs; then nothing is replaced.
        """
        for name, value in cast_snapshot(self._tensors_like(), snapshot).items():
            self._write(name, value)

    def write(self, name: str, value: Array) -> None:
        """Replace a state tensor by ``value``, which is cast from any dtype of the same kind.

        Raises:
            InputError: No such state tensor, or the shape or the kind of dtype differs.
        """
        self._write(name, _cast_state(self._tensors_like(), name, value))

    @abc.abstractmethod
    def reset(self) -> None:
        """Set every state tensor to zero, its initial value."""

    @abc.abstractmethod
    def _tensors_like(self) -> Mapping[str, Array]:
        """Return arrays of the declared dtypes and shapes, by name; their content is not read."""

    @abc.abstractmethod
    def _read(self, name: str) -> Array:
        """Return a copy of a tensor in its declared dtype."""

    @abc.abstractmethod
    def _write(self, name: str, value: Array) -> None:
        """Replace the content of a tensor by an array of its declared dtype."""


def _cast_state(tensors: Mapping[str, Array], name: str, value: Array) -> Array:
    """Return ``value`` in the dtype of the state tensor that it replaces.

    Raises:
        InputError: No such tensor, or the shape or the kind of dtype differs.
    """
    if name not in tensors:
        raise InputError(
            "no such state", got=repr(name), expected=", ".join(sorted(tensors)) or None
        )
    current = tensors[name]
    if value.shape != current.shape:
        raise InputError(
            f"state {name!r} has another shape", got=str(value.shape), expected=str(current.shape)
        )
    if not np.can_cast(value.dtype, current.dtype, casting="same_kind"):
        raise InputError(
            f"state {name!r} has another dtype", got=str(value.dtype), expected=str(current.dtype)
        )
    return value.astype(current.dtype)


def cast_snapshot(tensors: Mapping[str, Array], snapshot: Mapping[str, Array]) -> Snapshot:
    """Return a snapshot in the dtypes of the state tensors that it replaces.

    Raises:
        InputError: A name, shape or kind of dtype differs.
    """
    if missing := sorted(tensors.keys() - snapshot.keys()):
        raise InputError(
            "the snapshot lacks states",
            got=", ".join(sorted(snapshot)) or "nothing",
            expected=f"{', '.join(missing)} as well",
        )
    return {name: _cast_state(tensors, name, np.asarray(value)) for name, value in snapshot.items()}
