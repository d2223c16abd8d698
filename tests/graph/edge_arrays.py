"""Arrays for samples: element types, extremes of each, and integer arithmetic that wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

FLOATS = ("float32", "float16", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ALL = (*FLOATS, *INTEGERS, "bool")
_RANDOM = np.random.default_rng(0)
_SPECIAL = (-np.inf, -3.5, -2.5, -1, -0.5, -0.0, 0, 0.25, 0.5, 1, 1.5, 2.5, 100, np.inf, np.nan)


def numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random elements: all integers of a type, 16 bits of 64, or normal floats."""
    if dtype == "bool":
        return _RANDOM.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        return _RANDOM.standard_normal(shape).astype(dtype)
    least, most = bounds(dtype)
    return _RANDOM.integers(least, most, shape, endpoint=True).astype(dtype)


def bounds(dtype: str) -> tuple[int, int]:
    """Return the least and the largest integer; of 64 bits, those whose products fit 32."""
    info = np.iinfo(dtype)
    if info.bits < 64:
        return int(info.min), int(info.max)
    return (0 if info.min == 0 else -32768), 32767


def extremes(dtype: str) -> np.ndarray:
    """Return special elements of a type, where mistakes are made."""
    if dtype == "bool":
        return np.array([False, True])
    if dtype in FLOATS:
        return np.array(_SPECIAL, dtype)
    least, most = bounds(dtype)
    near = {least, least + 1, -7, -2, -1, 0, 1, 2, 3, 100, most // 2, most // 2 + 1, most - 1, most}
    return np.array(sorted(n for n in near if least <= n <= most), dtype)


def pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of special elements, as two arrays that broadcast, and more at random."""
    x = np.concatenate([extremes(dtype), numbers(dtype, (4,))])
    return x[:, None], x[None]


def wrapped(number: int, dtype: str) -> int:
    """Return an integer modulo the range of a type."""
    info = np.iinfo(dtype)
    return (number - int(info.min)) % (1 << info.bits) + int(info.min)


def by_integers(function: Callable[..., int], *arrays: np.ndarray) -> np.ndarray:
    """Return a function of Python's integers for each element, wrapped to the type of the first."""
    dtype = str(arrays[0].dtype)
    repeated = np.broadcast_arrays(*arrays)
    found = [
        wrapped(function(*map(int, elements)), dtype)
        for elements in zip(*(array.reshape(-1) for array in repeated), strict=True)
    ]
    return np.array(found, dtype).reshape(repeated[0].shape)


def in_float64(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    """Return a function computed in float64, rounded to fp32 and the type of the first array."""
    with np.errstate(all="ignore"):
        result = np.asarray(function(*(array.astype(np.float64) for array in arrays)))
        narrow = np.float16 if arrays[0].dtype == np.float16 else np.float32
        return result.astype(narrow).astype(arrays[0].dtype)
