"""What every engine checks before a state tensor is overwritten."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.engines.base import Array


def fitting(held: Mapping[str, Array], name: str, value: Array) -> Array:
    """``value`` in the dtype of the state tensor it is to replace.

    Args:
        held: The tensors of the state, by feature name.
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
