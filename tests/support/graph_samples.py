"""Arrays of every element type, for samples, and JAX's results for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from graph.samples.sample import Sample

FLOATS = ("float32", "float16", "float64")
INTEGERS = ("int32", "int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, "bool")

_RANDOM = np.random.default_rng(0)


def of(dtype: str, shape: tuple[int, ...], most: int | None = None) -> np.ndarray:
    """Random numbers from the whole range of a type; 64-bit integers within 32 bits.

    Args:
        dtype: Element type.
        shape: Shape of the array.
        most: The largest magnitude of an integer, for arithmetic in 64 bits.
    """
    if dtype in FLOATS:
        values = np.asarray(_RANDOM.standard_normal(shape))
    elif dtype == "bool":
        values = np.asarray(_RANDOM.integers(0, 2, shape))
    else:
        bounds = np.iinfo(np.int32 if np.iinfo(dtype).bits == 64 else dtype)
        high = bounds.max if most is None else most
        low = 0 if dtype.startswith("u") else bounds.min if most is None else -most
        values = np.asarray(_RANDOM.integers(low, high, shape, endpoint=True))
    return values.astype(dtype)


@dataclass(frozen=True)
class ByJax:
    """A JAX call that runs when its result is needed.

    Attributes:
        function: Takes the arrays; its other arguments are bound.
        arrays: Its arguments.
    """

    function: Callable[..., Any]
    arrays: tuple[Any, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the first result."""
        with jax.enable_x64(True):
            return jax.tree.leaves(jax.eval_shape(self.function, *self.arrays))[0].dtype


def by_jax(function: Callable[..., Any], *arrays: Any, **options: Any) -> ByJax:
    """Return a placeholder of a function's result, which ``computed`` replaces."""
    return ByJax(functools.partial(function, **options), arrays)


def computed(samples: Iterable[Sample]) -> list[Sample]:
    """Return samples with JAX's results as expected arrays, all compiled at once."""
    samples = list(samples)
    calls = [sample.expected for sample in samples if isinstance(sample.expected, ByJax)]

    def call_all(arrays: list[Any]) -> list[Any]:
        return [call.function(*arguments) for call, arguments in zip(calls, arrays, strict=True)]

    with jax.enable_x64(True):
        results = iter(jax.jit(call_all)([call.arrays for call in calls]))
    return [
        dataclasses.replace(sample, expected=_as_numpy(next(results)))
        if isinstance(sample.expected, ByJax)
        else sample
        for sample in samples
    ]


def _as_numpy(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(np.asarray(array) for array in value)
    return np.asarray(value)
