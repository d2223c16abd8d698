"""Samples of reductions of windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from graph.samples.sample import Sample
from jax import lax
from support.graph_numbers import numbers
from support.graph_samples import ALL, INTEGERS, NUMBERS, by_jax

Body = tuple[str, Callable[..., Any], Callable[[str], Any]]

_NAN, _INF = np.nan, np.inf
# The ends of what a graph carries of types that have more.
_CARRIED = {"int64": (-(2**31), 2**31 - 1), "uint64": (0, 2**31 - 1)}
_SPECIAL = np.array([[1, _NAN, 5, 2, -_INF, -_INF, 3], [_INF, -_INF, 3, 1, 1, 0, 2]], np.float32)


def _bounds(dtype: str) -> tuple[Any, Any]:
    return (False, True) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def _least(dtype: str) -> Any:
    if np.dtype(dtype).kind == "f":
        return -_INF
    return _CARRIED.get(dtype, _bounds(dtype))[0]


def _most(dtype: str) -> Any:
    if np.dtype(dtype).kind == "f":
        return _INF
    return _CARRIED.get(dtype, _bounds(dtype))[1]


# The builder's method, what JAX has for it, and what it leaves as it is.
_SUM: Body = ("add", lax.add, lambda _: 0)
_PRODUCT: Body = ("multiply", lax.mul, lambda _: 1)
_MAX: Body = ("maximum", lax.max, _least)
_MIN: Body = ("minimum", lax.min, _most)
_AND: Body = ("and_", lax.bitwise_and, lambda dtype: True if dtype == "bool" else _ones(dtype))
_OR: Body = ("or_", lax.bitwise_or, lambda _: 0)
_XOR: Body = ("xor", lax.bitwise_xor, lambda _: 0)


def _ones(dtype: str) -> Any:
    """All bits set; of a uint64, those that its carrier has."""
    return _most(dtype) if dtype.startswith("u") else -1


def _in_jax(given: dict[str, Any], rank: int) -> dict[str, Any]:
    names = {"window": "window_dimensions", "strides": "window_strides"}
    found = {names.get(key, key): value for key, value in given.items()}
    found.setdefault("window_strides", (1,) * rank)
    found.setdefault("padding", ((0, 0),) * rank)
    return found


def _sample(
    case: str,
    body: Body,
    x: np.ndarray,
    window: tuple[int, ...],
    initial: Any = None,
    constant: bool = True,
    **given: Any,
) -> Sample:
    method, function, identity = body
    dtype = str(x.dtype)
    first = np.asarray(identity(dtype) if initial is None else initial, dtype)
    given["window"] = window

    def build(b: Any, x: Any, *rest: Any) -> Any:
        start = b.constant(first) if constant else rest[0]
        return b.reduce_window(x, start, getattr(b, method), **given)

    def in_jax(x: Any, start: Any) -> Any:
        return lax.reduce_window(x, start, function, **_in_jax(given, x.ndim))

    if initial is None:
        expected: Any = by_jax(in_jax, x, first)
    else:
        # XLA's CPU leaves padding out; by StableHLO's definition it has the initial value.
        padded = np.pad(x, given["padding"], constant_values=first)
        windows = np.lib.stride_tricks.sliding_window_view(padded, window)
        axes = tuple(range(x.ndim, 2 * x.ndim))
        expected = getattr(np, method).reduce(windows, axes, initial=first)
    arrays = (x,) if constant else (x, first)
    return Sample("reduce_window", case, build, arrays, expected)


def _floats(*shape: int) -> np.ndarray:
    return numbers("float32", shape, sum(shape))


_IMAGE = _floats(2, 3, 7, 6)
_WHOLE = ((0, 0), (5, 0))
_WHOLE_BACK = ((0, 0), (0, 5))


def _shapes(body: Body) -> list[Sample]:
    same = {"strides": (1, 1, 2, 2), "padding": "SAME"}
    wide = {"padding": ((0, 0), (0, 0), (4, 0), (0, 5))}
    spread = {"base_dilation": (1, 1, 2, 1), "window_dilation": (1, 1, 2, 3)}
    return [
        _sample("image", body, _IMAGE, (1, 1, 3, 2), strides=(1, 1, 2, 3)),
        _sample("same", body, _IMAGE, (1, 1, 3, 3), **same),
        _sample("channels last", body, _IMAGE, (1, 2, 2, 1), strides=(1, 1, 2, 1)),
        _sample("wide padding", body, _IMAGE, (1, 1, 3, 2), **wide),
        _sample("cropped", body, _IMAGE, (1, 1, 3, 2), padding=((0, 0), (0, 0), (-1, 2), (1, -2))),
        _sample("dilated", body, _IMAGE, (1, 1, 3, 2), **spread),
        _sample("vector", body, _floats(9), (4,), strides=(2,)),
        _sample("three axes", body, _floats(2, 4, 5, 3), (1, 2, 3, 2), padding="SAME"),
        _sample("four axes", body, _IMAGE, (2, 2, 3, 2)),
        _sample("rank 5", body, _floats(2, 2, 1, 5, 4), (1, 1, 1, 2, 3)),
        _sample("rank 0", body, _floats(), ()),
        _sample("strides only", body, _floats(5, 6), (1, 1), strides=(2, 3)),
        _sample("nothing", body, _floats(5, 6), (1, 1)),
        _sample("no window", body, _floats(2, 3), (1, 4)),
        _sample("only padding", body, _floats(2, 0), (1, 2), padding=((0, 0), (2, 1))),
        _sample("running", body, _floats(3, 6), (1, 6), padding=_WHOLE),
        _sample("running back", body, _floats(3, 6), (1, 6), padding=_WHOLE_BACK),
        _sample("from 2", body, _IMAGE, (1, 1, 3, 2), 2, padding=((0, 0), (0, 0), (1, 1), (0, 1))),
        _sample("argument", body, _floats(3, 6), (1, 4), 3, False, padding=((0, 0), (2, 0))),
        _sample("running from 2", body, _floats(3, 6), (1, 6), 2, padding=_WHOLE),
        _sample("not numbers", body, _SPECIAL, (1, 2), padding=((0, 0), (1, 1))),
        _sample("float16", body, numbers("float16", (2, 6)), (1, 3), padding=((0, 0), (1, 1))),
    ]


def _types(body: Body, dtypes: tuple[str, ...]) -> list[Sample]:
    found: list[Sample] = []
    for dtype in dtypes:
        x = numbers(dtype, (2, 7))
        x = x % 4 + 1 if dtype in ("int64", "uint64") else x
        found += [
            _sample("type", body, x, (1, 3), strides=(1, 2), padding=((0, 0), (1, 1))),
            _sample("type, running", body, x, (1, 7), padding=((0, 0), (6, 0))),
        ]
    return found


def _by_body() -> list[Sample]:
    """Bodies that are no operation of their own."""
    x = _floats(2, 7)

    def log_add(b: Any) -> Any:
        return lambda x, y: b.log(b.add(b.exponential(x), b.exponential(y)))

    def in_jax(x: Any, y: Any) -> Any:
        return lax.log(lax.exp(x) + lax.exp(y))

    def sample(case: str, **given: Any) -> Sample:
        return Sample(
            "reduce_window",
            f"log of a sum, {case}",
            lambda b, x: b.reduce_window(x, b.constant(np.float32(-_INF)), log_add(b), **given),
            (x,),
            by_jax(
                lambda x: lax.reduce_window(x, np.float32(-_INF), in_jax, **_in_jax(given, 2)), x
            ),
        )

    def affine(b: Any) -> Any:
        return lambda a, c, d, e: (b.multiply(a, d), b.add(b.multiply(c, d), e))

    pair = (_floats(3, 6), _floats(3, 7)[:, :6].copy())
    window = {"window": (2, 5), "strides": (1, 2), "padding": ((0, 1), (3, 0))}

    def in_order(*arrays: Any) -> Any:
        return lax.reduce_window(
            arrays,
            (np.float32(1), np.float32(0)),
            lambda first, second: (first[0] * second[0], first[1] * second[0] + second[1]),
            **_in_jax(window, 2),
        )

    return [
        sample("stride", window=(1, 3), strides=(1, 2)),
        sample("seven", window=(1, 7), padding=((0, 0), (6, 0))),
        sample("dilated", window=(2, 3), window_dilation=(1, 2), padding=((1, 0), (1, 1))),
        sample("no window", window=(3, 3)),
        Sample(
            "reduce_window",
            "pairs in their order",
            lambda b, *values: b.reduce_window(
                values,
                (b.constant(np.float32(1)), b.constant(np.float32(0))),
                affine(b),
                **window,
            ),
            pair,
            by_jax(in_order, *pair),
        ),
        Sample(
            "reduce_window",
            "sum and largest at once",
            lambda b, *values: b.reduce_window(
                values,
                (b.constant(np.float32(0)), b.constant(np.float32(-_INF))),
                lambda x, y, z, w: (b.add(x, z), b.maximum(y, w)),
                **window,
            ),
            pair,
            by_jax(
                lambda x, y: (
                    lax.reduce_window(x, np.float32(0), lax.add, **_in_jax(window, 2)),
                    lax.reduce_window(y, np.float32(-_INF), lax.max, **_in_jax(window, 2)),
                ),
                *pair,
            ),
        ),
    ]


def _scattered(
    case: str,
    x: np.ndarray,
    window: tuple[int, ...],
    *,
    select: str = "GE",
    scatter: Body = _SUM,
    initial: Any = 0,
    constant: bool = True,
    **given: Any,
) -> Sample:
    """Return a sample; padding is a tuple of pairs."""
    given["window"] = window
    used = _in_jax(given, x.ndim)
    pads = used["padding"]
    steps = used["window_strides"]
    counts = [
        (size + sum(pair) - width) // step + 1
        for size, pair, width, step in zip(x.shape, pads, window, steps, strict=True)
    ]
    source = numbers(str(x.dtype), tuple(counts), 5)
    first = np.asarray(initial, x.dtype)

    def build(b: Any, x: Any, source: Any, *rest: Any) -> Any:
        start = b.constant(first) if constant else rest[0]
        return b.select_and_scatter(
            x,
            source,
            start,
            lambda x, y: b.compare(x, y, select),
            getattr(b, scatter[0]),
            **given,
        )

    arrays = (x, source) if constant else (x, source, first)
    expected = _scatter(x, source, first, select, scatter[0], (window, steps, pads))
    return Sample("select_and_scatter", case, build, arrays, expected)


def _scatter(
    x: np.ndarray,
    source: np.ndarray,
    first: np.ndarray,
    select: str,
    scatter: str,
    windows: tuple[Any, Any, Any],
) -> np.ndarray:
    """Compute by the specification, element by element: JAX has only sums of the largest."""
    window, steps, pads = windows
    keeps = {"GE": np.greater_equal, "GT": np.greater, "LE": np.less_equal}[select]
    combine = {
        "add": np.add,
        "multiply": np.multiply,
        "maximum": np.maximum,
        "minimum": np.minimum,
        "or_": np.logical_or,
        "and_": np.logical_and,
    }[scatter]
    result = np.full(x.shape, first, x.dtype)
    for at in np.ndindex(source.shape):
        best = None
        for corner in np.ndindex(*window):
            place = tuple(
                a * step + c - low
                for a, step, c, (low, _) in zip(at, steps, corner, pads, strict=True)
            )
            if any(not 0 <= p < size for p, size in zip(place, x.shape, strict=True)):
                continue
            if best is None or not keeps(x[best], x[place]):
                best = place
        if best is not None:
            with np.errstate(over="ignore"):
                result[best] = combine(result[best], source[at])
    return result


def _scatters() -> list[Sample]:
    small = numbers("int8", (4, 6)) // 40
    padded = ((1, 0), (1, 1))
    image = _floats(1, 4, 6, 2)
    return [
        *(
            _scattered("type", numbers(dtype, (4, 6)), (2, 3), strides=(2, 3), scatter=body)
            for dtype in ALL
            for body in ((_OR,) if dtype == "bool" else (_SUM,))
        ),
        _scattered("and", numbers("bool", (4, 6)), (2, 3), scatter=_AND, initial=True),
        _scattered("image", image, (1, 2, 2, 1), strides=(1, 2, 2, 1)),
        _scattered("overlapping", image, (1, 3, 2, 1)),
        _scattered("smallest", image, (1, 2, 2, 1), select="LE"),
        _scattered("last of the largest", small, (2, 3), select="GT", padding=padded),
        _scattered("first of the largest", small, (2, 3), padding=padded),
        _scattered("padded", small.astype(np.float32), (2, 3), strides=(2, 2), padding=padded),
        _scattered("only padding", _floats(2, 3), (1, 2), strides=(1, 2), padding=((0, 0), (2, 3))),
        _scattered("from 3", _floats(4, 6), (2, 3), initial=3, constant=False),
        _scattered("product", _floats(4, 6), (2, 3), initial=1, scatter=_PRODUCT),
        _scattered("largest", _floats(4, 6), (2, 3), initial=-1, scatter=_MAX),
        _scattered(
            "smallest of uint32", numbers("uint32", (4, 6)), (2, 3), scatter=_MIN, initial=9
        ),
        _scattered("not numbers", _SPECIAL, (1, 2)),
        _scattered("one element", _floats(3, 2), (1, 1)),
        _scattered("no window", _floats(1, 2), (1, 3)),
        _scattered("rank 0", _floats(), ()),
    ]


def _of_jax() -> Sample:
    """The gradient of a max pooling."""
    x = _floats(1, 5, 6, 2)
    source = _floats(1, 2, 3, 2)
    window = {"window": (1, 3, 2, 1), "strides": (1, 2, 2, 1)}

    def gradient(x: Any, source: Any) -> Any:
        def pooled(x: Any) -> Any:
            return lax.reduce_window(x, -np.inf, lax.max, **_in_jax(window, 4))

        return jax.vjp(pooled, x)[1](source)[0]

    return Sample(
        "select_and_scatter",
        "gradient",
        lambda b, x, source: b.select_and_scatter(
            x, source, b.constant(0.0), b.greater_equal, b.add, **window
        ),
        (x, source),
        by_jax(gradient, x, source),
    )


SAMPLES = [
    *(sample for body in (_SUM, _MAX, _MIN, _PRODUCT) for sample in _shapes(body)),
    *(sample for body in (_SUM, _PRODUCT) for sample in _types(body, NUMBERS)),
    *(sample for body in (_MAX, _MIN) for sample in _types(body, NUMBERS)),
    *_types(_OR, ("bool", *INTEGERS)),
    *_types(_AND, ("bool", "int8", "uint32")),
    *_types(_XOR, ("bool", "int8", "uint32")),
    *_by_body(),
    *_scatters(),
    _of_jax(),
]
