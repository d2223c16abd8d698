"""Bringing an input to the dtype its program takes, without losing what the values say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import InputError

Array = NDArray[Any]


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """``array`` as ``dtype``; the same object if it is so already.

    Args:
        array: Any shape.
        dtype: What the program takes.
        name: The input, for errors.

    Raises:
        InputError: Integers that ``dtype`` does not hold.
    """
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise InputError(
                f"input {name!r} has values beyond {dtype.name}",
                got=f"{array.min()} to {array.max()}",
                expected=f"{limits.min} to {limits.max}",
                remedy="Core ML has no wider integers: keep the values small, or leave the ops "
                "that need them on the CPU (skip_ops_for_coreml_delegation)",
            )
    return array.astype(dtype)
