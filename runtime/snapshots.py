"""Snapshots of states: copies of the tensors that persist between calls, as arrays by name.

A snapshot is checked completely before it is restored, so that a state is never half overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import InputError

Array: TypeAlias = NDArray[np.generic]
Snapshot: TypeAlias = dict[str, Array]
"""Arrays by name."""


def cast_state(tensors: Mapping[str, Array], name: str, value: Array) -> Array:
    """Return ``value`` in the dtype of the state tensor that it replaces.

    Args:
        tensors: The tensors of the state, by name.
        name: Name of the tensor to replace.
        value: Array of the same shape, with a dtype of the same kind.

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

    Args:
        tensors: The tensors of the state, by name.
        snapshot: New content of the tensors, by name.

    Raises:
        InputError: A name, shape or kind of dtype differs.
    """
    if missing := sorted(tensors.keys() - snapshot.keys()):
        raise InputError(
            "the snapshot lacks states",
            got=", ".join(sorted(snapshot)) or "nothing",
            expected=f"{', '.join(missing)} as well",
        )
    return {name: cast_state(tensors, name, np.asarray(value)) for name, value in snapshot.items()}
