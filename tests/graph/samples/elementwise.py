"""Samples of the operations on each element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import scipy.special
from graph.edge_arrays import (
    ALL,
    FLOATS,
    INTEGERS,
    by_integers,
    extremes,
    in_float64,
    numbers,
    pairs,
    wrapped,
)
from graph.samples.sample import Sample
from support.graph_samples import by_jax

# Errors of fp16 are those of its rounding.
_NEAR_ZERO = {"float32": (0.0, 2e-6), "float64": (0.0, 2e-6), "float16": (0.0, 2e-3)}


def _call(operation: str, case: str, arrays: tuple[Any, ...], expected: Any, **more: Any) -> Sample:
    return Sample(
        operation, case, lambda b, *x: getattr(b, operation)(*x), arrays, expected, **more
    )


def _of_floats(operation: str, function: Callable[..., Any], *points: float) -> Iterator[Sample]:
    """Samples of a function of one operand: special numbers, and points of its domain."""
    for dtype in FLOATS:
        x = np.concatenate([extremes(dtype), np.array(points, dtype)])
        x = x[np.abs(x) < 1e4] if operation in ("sine", "cosine", "tan") else x
        # -0 + epsilon, which is 0, is either zero.
        x = x + np.asarray(0, dtype) if operation == "rsqrt" else x
        yield _call(operation, "special", (x,), in_float64(function, x))
        x = np.asarray(0.625, dtype) + np.asarray(operation == "acosh", dtype)
        yield _call(operation, "rank 0", (x,), in_float64(function, x))


def _near_zero(operation: str, function: Callable[..., Any]) -> Iterator[Sample]:
    for dtype in FLOATS:
        x = np.concatenate([sign * np.geomspace(6e-5, 0.9, 60) for sign in (-1, 1)]).astype(dtype)
        tolerance = _NEAR_ZERO[dtype]
        yield _call(operation, "near 0", (x,), in_float64(function, x), tolerance=tolerance)


def _of_pairs(
    operation: str,
    of_floats: Callable[..., Any],
    of_integers: Callable[..., int] | None = None,
) -> Iterator[Sample]:
    for dtype in FLOATS:
        x, y = pairs(dtype)
        yield _call(operation, "pairs", (x, y), in_float64(of_floats, x, y))
        x, y = numbers(dtype, (2, 3)), numbers(dtype, ())
        yield _call(operation, "rank 0", (x, y), in_float64(of_floats, x, y))
    if of_integers is None:
        return
    for dtype in INTEGERS:
        x, y = pairs(dtype)
        yield _call(operation, "pairs", (x, y), by_integers(of_integers, x, y))
        constant = numbers(dtype, (1, 1)) | np.asarray(1, dtype)
        for y in (constant, np.array([[1]], dtype), np.array([[8]], dtype), np.array([[0]], dtype)):
            yield Sample(
                operation,
                f"by constant {y.item()}",
                lambda b, x, y=y: getattr(b, operation)(x, b.constant(y)),
                (x,),
                by_integers(of_integers, x, y),
            )


def _quotient(x: int, y: int) -> int:
    if y == 0:
        return -1
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def _rest(x: int, y: int) -> int:
    return x if y == 0 else x - _quotient(x, y) * y


def _power(x: int, y: int) -> int:
    if y < 0:
        return {1: 1, -1: -1 if y % 2 else 1}.get(x, 0)
    return pow(x, y, 1 << 64)


def _high_products() -> Iterator[Sample]:
    for dtype in INTEGERS:
        bits = np.iinfo(dtype).bits
        x, y = pairs(dtype)
        if bits == 64:
            # All that 32 bits hold are allowed: no product has to fit them.
            x = np.concatenate([x, np.array([[2**31 - 1]], dtype)])
            y = x.T
        high = by_integers(lambda a, b, bits=bits: a * b >> bits, x, y)
        yield _call("mulhi", "pairs", (x, y), high)


def _powers() -> Iterator[Sample]:
    for dtype in FLOATS:
        x = np.array([0.5, 2, 1.5, 0, 3, 4, -2, -2, np.nan, 1.25], dtype)
        y = np.array([-2, 0.5, 3, 2, 0, -0.5, 3, 2, 1, 8], dtype)
        yield _call("power", "numbers", (x, y), in_float64(np.power, x, y))
    for dtype in INTEGERS:
        x = extremes(dtype)[:, None]
        least = 0 if np.iinfo(dtype).min == 0 else -3
        y = np.arange(least, 12).astype(dtype)[None]
        y = y[:, y[0] < 3] if dtype.endswith("64") else y
        x = x[np.abs(x.astype(np.int64)[:, 0]) < 1000] if dtype.endswith("64") else x
        yield _call("power", "exponents", (x, y), by_integers(_power, x, y))
        y = np.array(np.iinfo(dtype).max if "64" not in dtype else 2, dtype)
        yield _call("power", "rank 0", (x, y), by_integers(_power, x, y))
        yield _call("power", "scalars", (x[1, 0], y), by_integers(_power, x[1, 0], y))
        for exponent in (0, 1, 2, 5) if "64" not in dtype else (0, 1, 2):
            yield Sample(
                "power",
                f"constant {exponent}",
                lambda b, x, e=exponent, d=dtype: b.power(x, b.constant(e, d)),
                (x[:5],),
                by_integers(lambda x, e=exponent: _power(x, e), x[:5]),
            )


def _of_one(operation: str, of_floats: Callable[..., Any], of_integers: Any) -> Iterator[Sample]:
    for dtype in FLOATS:
        x = extremes(dtype)
        yield _call(operation, "special", (x,), in_float64(of_floats, x))
    for dtype in INTEGERS:
        x = extremes(dtype)
        yield _call(operation, "extremes", (x,), by_integers(of_integers, x))


def _extrema(operation: str, function: np.ufunc) -> Iterator[Sample]:
    for dtype in ALL:
        x, y = pairs(dtype)
        with np.errstate(invalid="ignore"):
            yield _call(operation, "pairs", (x, y), function(x, y))
            yield _call(operation, "rank 0", (x, y[0, 0]), function(x, y[0, 0]))


def _clamps() -> Iterator[Sample]:
    for dtype in (*FLOATS, *INTEGERS):
        x = extremes(dtype)
        low, high = np.asarray(1, dtype), np.asarray(3, dtype)
        with np.errstate(invalid="ignore"):
            expected = np.minimum(np.maximum(x, low), high)
            yield _call("clamp", "rank 0", (low, x, high), expected)
            low, high = x[::-1].copy(), np.full_like(x, 3)
            expected = np.minimum(np.maximum(x, low), high)
            yield _call("clamp", "full", (low, x, high), expected)


def _selects() -> Iterator[Sample]:
    for dtype in ALL:
        x, y = (np.concatenate([extremes(dtype)] * 2)[:10] for _ in range(2))
        y = y[::-1].copy()
        predicate = np.arange(len(x)) % 3 == 0
        expected = np.where(predicate, x, y)
        yield _call("select", f"of {dtype}", (predicate, x, y), expected)
        yield _call("select", f"one of {dtype}", (predicate[0], x, y), x)
        yield _call(
            "select",
            f"of scalars of {dtype}",
            (predicate, x[-1], y[-1]),
            np.where(predicate, x[-1], y[-1]),
        )
        yield _call("select", f"rank 0 of {dtype}", (predicate[1], x[0], y[0]), y[0])


def _converted(x: np.ndarray, target: str) -> np.ndarray:
    """Return elements of another type, by StableHLO's rules."""
    if target == "bool":
        return x != 0
    if x.dtype.kind == "f" and target in INTEGERS:
        return np.array([wrapped(int(element), target) for element in x], target)
    with np.errstate(over="ignore"):
        return x.astype(target)


def _conversions() -> Iterator[Sample]:
    for source in ALL:
        for target in ALL:
            x = np.concatenate([extremes(source), numbers(source, (5,))])
            if source in FLOATS and target in INTEGERS:
                info = np.iinfo(target if "64" not in target else np.int32)
                most = min(float(info.max), float(np.finfo(source).max)) * 0.999
                more = np.array([-2.75, -1, 1.75, 2.5, 100.9, most, 0.5 * most], source)
                x = np.concatenate([x[np.isfinite(x)], more])
                # Beyond the range, and NaN, the result is anything.
                x = x.astype(np.float32).astype(source)
                whole = np.trunc(x.astype(np.float64))
                x = x[(whole >= info.min) & (whole <= info.max)]
            if "int" in source and target in ("uint64",):
                x = x[x.astype(np.int64) >= 0]
            if source == "uint32" and "64" in target and "int" in target:
                x = x[x < 1 << 31]
            yield Sample(
                "convert",
                f"to {target}",
                lambda b, x, target=target: b.convert(x, target),
                (x,),
                _converted(x, target),
            )


def _reduced(x: Any, format_: tuple[int, int], dtype: str) -> Any:
    return jax.lax.reduce_precision(x, *format_).astype(dtype)


def _reductions_of_precision() -> Iterator[Sample]:
    for dtype in FLOATS:
        base = np.array([0, -0.0, 1, 1.0009765, 1.0004883, -1.0014648, 3.3, 1 / 3, 5e-5, 65504])
        x = np.concatenate([base, [np.inf, -np.inf, np.nan, 65519, 65520, 1e-7, 6.2e-5, 250.3]])
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        for format_ in ((5, 10), (8, 7), (8, 23), (4, 3), (5, 2), (11, 52), (3, 0)):
            exact = x.astype(np.float32) if dtype == "float64" else x
            yield Sample(
                "reduce_precision",
                f"to {format_}",
                lambda b, x, format_=format_: b.reduce_precision(x, *format_),
                (x,),
                by_jax(_reduced, exact, format_=format_, dtype=dtype),
                tolerance=(0.0, 0.0),
            )


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc)(x)


def _round_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.trunc(np.abs(x) + 0.5), x)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _tails() -> Iterator[Sample]:
    for dtype in FLOATS:
        relative = (0.0, 2e-3) if dtype == "float16" else (0.0, 2e-5)
        x = np.linspace(0, 3 if dtype == "float16" else 9, 50).astype(dtype)
        yield _call("erfc", "tail", (x,), in_float64(_erfc, x), tolerance=relative)
        x = -np.linspace(0, 8 if dtype == "float16" else 80, 50).astype(dtype)
        yield _call("logistic", "tail", (x,), in_float64(_logistic, x), tolerance=relative)
        # Of 32 bits each, in which Core ML computes: near 1 the last bit decides.
        x = np.concatenate([np.linspace(-1, 1, 41), [0.99999, -0.9999999]]).astype(np.float32)
        x = x.astype(dtype)
        yield _call("erf_inv", "whole", (x,), in_float64(scipy.special.erfinv, x))


def _predicates() -> Iterator[Sample]:
    for dtype in FLOATS:
        x = extremes(dtype)
        yield _call("is_nan", "special", (x,), np.isnan(x))
        yield _call("is_inf", "special", (x,), np.isinf(x))
        yield _call("is_finite", "special", (x,), np.isfinite(x))


def _bools() -> Iterator[Sample]:
    x, y = np.array([[False], [True]]), np.array([[False, True]])
    yield _call("add", "bools", (x, y), x | y)
    yield _call("multiply", "bools", (x, y), x & y)


def _squares() -> Iterator[Sample]:
    for dtype in (*FLOATS, *INTEGERS):
        x = numbers(dtype, (2, 3))
        yield _call("square", "matrix", (x,), x * x)


SAMPLES = [
    *_of_pairs("add", np.add, lambda x, y: x + y),
    *_of_pairs("subtract", np.subtract, lambda x, y: x - y),
    *_of_pairs("multiply", np.multiply, lambda x, y: x * y),
    *_high_products(),
    *_of_pairs("divide", np.divide, _quotient),
    *_of_pairs("remainder", np.fmod, _rest),
    *_of_pairs("atan2", np.arctan2),
    *_powers(),
    *_extrema("maximum", np.maximum),
    *_extrema("minimum", np.minimum),
    *_of_one("abs", np.abs, abs),
    *_of_one("negate", np.negative, lambda x: -x),
    *_of_one("sign", np.sign, lambda x: (x > 0) - (x < 0)),
    *_of_floats("ceil", np.ceil),
    *_of_floats("floor", np.floor),
    *_of_floats("round_nearest_even", np.rint, -1.5, 3.5, 0.49999997),
    *_of_floats("round_nearest_afz", _round_away, -1.5, 3.5, 0.49999),
    *_of_floats("sqrt", np.sqrt, 1e-6),
    *_of_floats("rsqrt", lambda x: 1 / np.sqrt(x), 6.2e-5, 4),
    *_of_floats("cbrt", np.cbrt, 27, -8, 1e-4),
    *_of_floats("exponential", np.exp, -20),
    *_of_floats("exponential_minus_one", np.expm1, 0.3, 0.4),
    *_near_zero("exponential_minus_one", np.expm1),
    *_of_floats("log", np.log, 1e-4),
    *_of_floats("log_plus_one", np.log1p, -0.9, 0.4),
    *_near_zero("log_plus_one", np.log1p),
    *_of_floats("logistic", _logistic),
    *_of_floats("erf", np.vectorize(math.erf)),
    *_of_floats("erfc", _erfc),
    *_of_floats("erf_inv", scipy.special.erfinv),
    *_tails(),
    *_of_floats("sine", np.sin, 3, -30),
    *_of_floats("cosine", np.cos, 3, -30),
    *_of_floats("tan", np.tan, 1.5),
    *_of_floats("asin", np.arcsin, 0.99),
    *_of_floats("acos", np.arccos, 0.99),
    *_of_floats("atan", np.arctan, 3),
    *_of_floats("sinh", np.sinh, 3),
    *_of_floats("cosh", np.cosh, 3),
    *_of_floats("tanh", np.tanh, 3),
    *_of_floats("asinh", np.arcsinh, 3, 1e4),
    *_near_zero("asinh", np.arcsinh),
    *_of_floats("acosh", np.arccosh, 1.001, 3, 1e4, -3),
    *_of_floats("atanh", np.arctanh, 0.99, -0.3),
    *_predicates(),
    *_bools(),
    *_squares(),
    *_clamps(),
    *_selects(),
    *_conversions(),
    *_reductions_of_precision(),
]
