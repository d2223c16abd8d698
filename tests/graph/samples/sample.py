"""``Sample``: one call of an operation, and the arrays that it has to return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One call of an operation.

    Attributes:
        operation: Name of the operation.
        case: What is special about this call, for the test's name.
        build: Takes the builder and one value per array; returns a value or a tuple of values.
        arrays: The arguments. Tuple of arrays; rank 0 and any element type are fine.
        expected: Array or tuple of arrays, computed by something independent of this package: NumPy
            or JAX; or a call of JAX, from ``by_jax``, that is made when it is needed.
        tolerance: (absolute, relative), or None for that of the element type.
    """

    operation: str
    case: str
    build: Callable[..., Any]
    arrays: tuple[Any, ...]
    expected: Any
    tolerance: tuple[float, float] | None = None

    @property
    def results(self) -> tuple[np.ndarray, ...]:
        """The expected arrays."""
        given = self.expected if isinstance(self.expected, tuple) else (self.expected,)
        return tuple(np.asarray(array) for array in given)

    @property
    def dtype(self) -> str:
        """Element type of the first argument, or of the first result if there is none."""
        first = self.arrays[0] if self.arrays else self.expected
        first = first[0] if isinstance(first, tuple) else first
        return str(first.dtype if hasattr(first, "dtype") else np.asarray(first).dtype)
