"""Snapshots of states: what a model or a program keeps from one call to the next, as arrays.

A snapshot is a plain dictionary of arrays by name, copies in the dtypes they are kept in. What is
restored is checked as a whole before anything is overwritten.
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


def cast_state(held: Mapping[str, Array], name: str, value: Array) -> Array:
    """``value`` in the dtype of the tensor it is to replace.

    Args:
        held: The tensors of the state, by name.
        name: Which of them is to be replaced.
        value: Of the same shape, and of a dtype of the same kind.

    Raises:
        InputError: No such tensor, or another shape or kind of dtype.
    """
    if name not in held:
        raise InputError("no such state", got=repr(name), expected=", ".join(sorted(held)) or None)
    present = held[name]
    if value.shape != present.shape:
        raise InputError(
            f"state {name!r} has another shape", got=str(value.shape), expected=str(present.shape)
        )
    if not np.can_cast(value.dtype, present.dtype, casting="same_kind"):
        raise InputError(
            f"state {name!r} has another dtype", got=str(value.dtype), expected=str(present.dtype)
        )
    return value.astype(present.dtype)


def cast_snapshot(held: Mapping[str, Array], snapshot: Mapping[str, Array]) -> Snapshot:
    """A snapshot in the dtypes of the tensors it is to replace, all of them.

    Args:
        held: The tensors of the state, by name.
        snapshot: What takes their place.

    Raises:
        InputError: A name too many or too few, or another shape or kind of dtype.
    """
    if missing := sorted(held.keys() - snapshot.keys()):
        raise InputError(
            "the snapshot lacks states",
            got=", ".join(sorted(snapshot)) or "nothing",
            expected=f"{', '.join(missing)} as well",
        )
    return {name: cast_state(held, name, np.asarray(value)) for name, value in snapshot.items()}
