"""``Case``: one graph of GoMLX's conformance tests, with what it has to return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """Operations on some arrays, and the arrays that they have to return.

    Attributes:
        test: Name of the test in GoMLX: of the function without ``Test``, then of the subtests.
        about: What tells it from other cases of the same test; empty if there is none.
        build: Takes the builder and one value per array; returns a value, or several.
        arrays: The arguments.
        expected: One array per result.
        more: Further runs of the same graph: arguments and expected arrays.
        shapes: Of the parameters, where sizes are symbolic; None for those of the arrays.
        tolerance: (absolute, relative); None for that of the element type.
    """

    test: str
    about: str
    build: Callable[..., Any]
    arrays: Arrays
    expected: Arrays
    more: tuple[tuple[Arrays, Arrays], ...] = ()
    shapes: tuple[tuple[Any, ...], ...] | None = None
    tolerance: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.test}, {self.about}" if self.about else self.test

    @property
    def runs(self) -> tuple[tuple[Arrays, Arrays], ...]:
        """Arguments and expected arrays of each run."""
        return ((self.arrays, self.expected), *self.more)


def case(
    test: str,
    build: Callable[..., Any] | str,
    arrays: Sequence[Any],
    *expected: Any,
    about: str = "",
    more: Sequence[tuple[Sequence[Any], Sequence[Any]]] = (),
    shapes: Sequence[Sequence[Any]] | None = None,
    tolerance: tuple[float, float] | None = None,
) -> Case:
    """Return a case; an operation may be given by its name, and arrays as NumPy's scalars."""
    made = called(build) if isinstance(build, str) else build
    return Case(
        test,
        about,
        made,
        _arrays(arrays),
        _arrays(expected),
        tuple((_arrays(given), _arrays(wanted)) for given, wanted in more),
        None if shapes is None else tuple(map(tuple, shapes)),
        tolerance,
    )


def called(operation: str, *arguments: Any, **keywords: Any) -> Callable[..., Any]:
    """Return a function that calls an operation on values, with the same further arguments."""

    def build(b: Any, *values: Any) -> Any:
        return getattr(b, operation)(*values, *arguments, **keywords)

    return build


def _arrays(given: Sequence[Any]) -> Arrays:
    return tuple(np.asarray(array) for array in given)


f32 = functools.partial(np.array, dtype=np.float32)
f16 = functools.partial(np.array, dtype=np.float16)  # GoMLX has some of these cases with bfloat16
f64 = functools.partial(np.array, dtype=np.float64)
i32 = functools.partial(np.array, dtype=np.int32)
i64 = functools.partial(np.array, dtype=np.int64)
i8 = functools.partial(np.array, dtype=np.int8)
u8 = functools.partial(np.array, dtype=np.uint8)
u32 = functools.partial(np.array, dtype=np.uint32)
flags = functools.partial(np.array, dtype=np.bool_)


def counted(dtype: Any, *shape: int, first: int = 0) -> np.ndarray:
    """Return 0, 1, 2 ... in rows."""
    return np.arange(first, first + int(np.prod(shape))).reshape(shape).astype(dtype)
