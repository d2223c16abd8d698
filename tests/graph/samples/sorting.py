"""Samples of sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from graph.samples.sample import Sample
from support.graph_samples import by_jax

from coreml_delegate.graph import DType

_LABELS = tuple(dtype.label for dtype in DType)
_NUMBERS = np.array([[3, 1, 2, 1, 0, 3], [1, 1, 0, 5, 4, 2]])
_EXTREMES = np.array([[0.0, -0.0, 1, np.nan, -np.inf, np.inf, -0.0, 0.0, -1, np.nan]], np.float32)
_PLACES = np.arange(10, dtype=np.int32)[None]
_RANDOM = np.random.default_rng(0)
_MANY = _RANDOM.integers(-9, 9, (1, 2, 3, 2, 1, 3)).astype(np.int32)


def _of(label: str) -> np.ndarray:
    """Small numbers; of unsigned types, some in the upper half."""
    array = _NUMBERS.astype(label)
    if np.dtype(label).kind == "u":
        array[0, 1] = np.iinfo(np.int32).max if array.itemsize == 8 else np.iinfo(label).max
    elif label != "bool":
        array[1, 2] = -7
    return array


def _by(array: np.ndarray, *arrays: np.ndarray, axis: int = -1) -> tuple[np.ndarray, ...]:
    order = np.argsort(array, axis=axis, kind="stable")
    return tuple(np.take_along_axis(other, order, axis) for other in (array, *arrays))


def _jax_comparator(b: Any, keys: int) -> Callable[..., Any]:
    """Return the comparator that ``jax.lax.sort`` writes."""

    def canonical(x: Any) -> Any:
        if not x.dtype.is_float:
            return x
        zero = b.constant(np.zeros((), x.dtype.numpy), x.dtype)
        nan = b.constant(np.array(np.nan, x.dtype.numpy), x.dtype)
        merged = b.select(b.equal(x, zero), zero, x)
        return b.select(b.not_equal(x, x), nan, merged)

    def comparator(*pairs: Any) -> Any:
        x, y = [canonical(x) for x in pairs[0::2]], [canonical(y) for y in pairs[1::2]]
        result = None
        for one, other in reversed(list(zip(x[:keys], y[:keys], strict=True))):
            before = b.less(one, other, total_order=True)
            if result is None:
                result = before
            else:
                result = b.or_(before, b.and_(b.equal(one, other, total_order=True), result))
        return result

    return comparator


def _sorted_by_jax(*arrays: Any, keys: int) -> Any:
    return jax.lax.sort(arrays, num_keys=keys)


def _lexicographic(label: str, keys: int) -> Sample:
    first = _RANDOM.integers(0, 2, (3, 8)).astype(label)
    second = _RANDOM.choice([0.0, -0.0, 1, np.nan, -np.inf], (3, 8)).astype(np.float32)
    third = _RANDOM.integers(0, 3, (3, 8)).astype(np.int8)
    last = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    arrays = (first, second, third, last)
    return Sample(
        "sort",
        f"{keys} keys, as jax.lax.sort",
        lambda b, *values: b.sort(values, 1, _jax_comparator(b, keys)),
        arrays,
        by_jax(_sorted_by_jax, *arrays, keys=keys),
    )


def _magnitudes(b: Any) -> Callable[..., Any]:
    return lambda x, y: b.less(b.abs(x), b.abs(y))


def _largest(label: str) -> Sample:
    array = _of(label)
    # Integers beyond 2 ** 53 are no samples: float64 has all others.
    order = np.argsort(-array.astype(np.float64), axis=-1, kind="stable")[:, :4]
    expected = np.take_along_axis(array, order, -1), order.astype(np.int32)
    return Sample("top_k", "4", lambda b, x: b.top_k(x, 4), (array,), expected)


_SORTED = [
    *(
        Sample(
            "sort",
            "ascending, with places",
            lambda b, x, p: b.sort((x, p)),
            (_of(label), np.tile(np.arange(6, dtype=np.int32), (2, 1))),
            _by(_of(label), np.tile(np.arange(6, dtype=np.int32), (2, 1))),
        )
        for label in _LABELS
    ),
    *(
        Sample(
            "sort",
            "first dimension",
            lambda b, x: b.sort((x,), 0, lambda u, v: b.less(u, v)),
            (_of(label),),
            np.sort(_of(label), axis=0),
        )
        for label in ("float32", "uint32", "bool", "int16")
    ),
    *(_lexicographic(label, keys) for label in ("int32", "bool", "uint8") for keys in (1, 2, 3)),
    Sample(
        "sort",
        "extremes",
        lambda b, x, p: b.sort((x, p)),
        (_EXTREMES, _PLACES),
        by_jax(_sorted_by_jax, _EXTREMES, _PLACES, keys=1),
    ),
    Sample(
        "sort",
        "extremes in total order",
        lambda b, x, p: b.sort((x, p), 1, lambda u, v, *_: b.less(u, v, total_order=True))[1],
        (_EXTREMES, _PLACES),
        np.array([[4, 8, 1, 6, 0, 7, 2, 5, 3, 9]], np.int32),
    ),
    Sample(
        "sort",
        "descending keeps the order of equals",
        lambda b, x, p: b.sort((x, p), 1, "descending"),
        (_EXTREMES, _PLACES),
        (
            _EXTREMES[:, [3, 9, 5, 2, 0, 1, 6, 7, 8, 4]],
            np.array([[3, 9, 5, 2, 0, 1, 6, 7, 8, 4]], np.int32),
        ),
    ),
    Sample(
        "sort",
        "swapped arguments of greater",
        lambda b, x: b.sort((x,), 1, lambda u, v: b.greater(v, u)),
        (_of("float32"),),
        np.sort(_of("float32")),
    ),
    Sample(
        "sort",
        "by select",
        lambda b, x, y: b.sort(
            (x, y), 1, lambda u, v, w, z: b.select(b.equal(u, v), b.greater(w, z), b.less(u, v))
        ),
        (np.array([[1, 0, 1, 0]], np.int32), np.array([[1, 2, 3, 4]], np.int32)),
        (np.array([[0, 0, 1, 1]], np.int32), np.array([[4, 2, 3, 1]], np.int32)),
    ),
    Sample(
        "sort",
        "nothing goes before anything",
        lambda b, x: b.sort((x,), 1, lambda *_: b.constant(False)),
        (_of("int8"),),
        _of("int8"),
    ),
    *(
        Sample(
            "sort",
            "by another comparator",
            lambda b, x: b.sort((x,), 1, _magnitudes(b)),
            (array,),
            np.take_along_axis(array, np.argsort(np.abs(array), axis=1, kind="stable"), 1),
        )
        for array in (
            _RANDOM.integers(-4, 4, (3, 9, 2)).astype(np.int32),
            _RANDOM.integers(-4, 4, (2, 40)).astype(np.float16),
            np.zeros((3, 1), np.float32),
        )
    ),
    Sample(
        "sort",
        "by another comparator of two, and a captured value",
        lambda b, x, p, s: b.sort(
            (x, p), 0, lambda u, v, y, z: b.less(b.multiply(u, s), b.multiply(v, s))
        ),
        (np.array([2, 3, 1, 3], np.float32), np.array([True, False, True, True]), np.float32(-1)),
        (np.array([3, 3, 2, 1], np.float32), np.array([False, True, True, True])),
    ),
    Sample(
        "sort",
        "more dimensions than Core ML has",
        lambda b, x: b.sort((x,), 2, _magnitudes(b)),
        (_MANY,),
        np.take_along_axis(_MANY, np.argsort(np.abs(_MANY), axis=2, kind="stable"), 2),
    ),
    Sample(
        "sort",
        "more dimensions than Core ML has, by keys",
        lambda b, x: b.sort((x,), 3),
        (_MANY,),
        np.sort(_MANY, axis=3),
    ),
    Sample(
        "sort",
        "empty",
        lambda b, x: b.sort((x,), 0, _magnitudes(b)),
        (np.zeros((0, 3), np.float32),),
        np.zeros((0, 3), np.float32),
    ),
]

_TOP = [
    *(_largest(label) for label in _LABELS),
    Sample(
        "top_k",
        "all, extremes",
        lambda b, x: b.top_k(x, 10),
        (_EXTREMES,),
        (
            _EXTREMES[:, [3, 9, 5, 2, 0, 1, 6, 7, 8, 4]],
            np.array([[3, 9, 5, 2, 0, 1, 6, 7, 8, 4]], np.int32),
        ),
    ),
    Sample(
        "top_k",
        "more dimensions than Core ML has",
        lambda b, x: b.top_k(x, 2)[0],
        (_MANY,),
        -np.sort(-_MANY)[..., :2],
    ),
    Sample(
        "top_k",
        "none",
        lambda b, x: b.top_k(x, 0),
        (_of("float32"),),
        (np.zeros((2, 0), np.float32), np.zeros((2, 0), np.int32)),
    ),
]

SAMPLES = [*_SORTED, *_TOP]
