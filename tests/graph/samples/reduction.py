"""Samples of reductions along axes, and of running ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph.samples.sample import Sample
from jax import lax
from support.graph_numbers import numbers
from support.graph_samples import ALL, INTEGERS, NUMBERS, by_jax

_NAN, _INF = np.nan, np.inf
_SPECIAL = np.array([[1, _NAN, 5], [_INF, -_INF, 3], [-_INF, -_INF, -_INF]], np.float32)

_REDUCTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "reduce_sum": (lax.reduce_sum, NUMBERS),
    "reduce_product": (lax.reduce_prod, NUMBERS),
    "reduce_max": (lax.reduce_max, ALL),
    "reduce_min": (lax.reduce_min, ALL),
    "reduce_and": (lax.reduce_and, ("bool", *INTEGERS)),
    "reduce_or": (lax.reduce_or, ("bool", *INTEGERS)),
    "reduce_xor": (lax.reduce_xor, ("bool", *INTEGERS)),
}

# case, shape, dimensions
_SHAPES: list[tuple[str, tuple[int, ...], tuple[int, ...] | None]] = [
    ("all", (2, 3), None),
    ("outer axes", (2, 3, 4), (0, 2)),
    ("no axis", (2, 3), ()),
    ("size 1", (3, 1), (1,)),
    ("no elements", (2, 0), (1,)),
    ("none left", (0, 2), (1,)),
    ("rank 0", (), None),
    ("rank 5", (2, 1, 3, 2, 2), (1, 3)),
    ("seven", (2, 7), (1,)),
]


def _factors(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers; those of 64 bits are so small that 32 bits hold their product."""
    found = numbers(dtype, shape)
    return np.asarray(found % 4 + 1) if dtype in ("int64", "uint64") else found


def _reduced(operation: str, case: str, x: np.ndarray, axes: tuple[int, ...] | None) -> Sample:
    function = _REDUCTIONS[operation][0]
    over = tuple(range(x.ndim)) if axes is None else axes
    return Sample(
        operation,
        case,
        lambda b, x: getattr(b, operation)(x, axes),
        (x,),
        by_jax(lambda x: function(x, over), x),
    )


def _reductions() -> list[Sample]:
    found: list[Sample] = []
    for operation, (_, dtypes) in _REDUCTIONS.items():
        found += [_reduced(operation, "matrix", _factors(d, (3, 5)), (1,)) for d in dtypes]
        for dtype in sorted({dtypes[0], dtypes[-1], "uint32" if "uint32" in dtypes else dtypes[0]}):
            found += [
                _reduced(operation, case, _factors(dtype, shape), axes)
                for case, shape, axes in _SHAPES
            ]
        if "float32" in dtypes:
            found.append(_reduced(operation, "not numbers", _SPECIAL, (1,)))
    return found


def _index(operation: str, case: str, x: np.ndarray, axis: int, dtype: str = "int32") -> Sample:
    function = {"arg_max": lax.argmax, "arg_min": lax.argmin}[operation]
    return Sample(
        operation,
        case,
        lambda b, x: getattr(b, operation)(x, axis, dtype),
        (x,),
        by_jax(lambda x: function(x, axis % x.ndim, np.dtype(dtype)), x),
    )


def _indices(operation: str) -> list[Sample]:
    return [
        *(_index(operation, "matrix", numbers(d, (3, 6)), 1) for d in ALL),
        *(_index(operation, "ties", numbers(d, (3, 40)) // 100, 1) for d in ("int8", "float32")),
        *(_index(operation, "index type", numbers("float32", (3, 6)), 0, d) for d in INTEGERS),
        _index(operation, "not numbers", _SPECIAL, -1),
        _index(operation, "vector", numbers("int32", (6,)), 0),
        _index(operation, "size 1", numbers("int32", (2, 1)), 1),
        _index(operation, "rank 5", numbers("float32", (2, 1, 3, 2, 2)), 2),
    ]


_RUNNING: dict[str, Any] = {
    "cumulative_sum": lax.cumsum,
    "cumulative_product": lax.cumprod,
    "cumulative_max": lax.cummax,
    "cumulative_min": lax.cummin,
}


def _runs(operation: str, case: str, x: np.ndarray, axis: int, reverse: bool) -> Sample:
    function = _RUNNING[operation]
    return Sample(
        operation,
        f"{case}, reversed" if reverse else case,
        lambda b, x: getattr(b, operation)(x, axis, reverse),
        (x,),
        by_jax(lambda x: function(x, axis % x.ndim, reverse), x),
    )


def _running(operation: str) -> list[Sample]:
    return [
        *(_runs(operation, "matrix", _factors(d, (3, 6)), 1, False) for d in NUMBERS),
        *(_runs(operation, "matrix", _factors(d, (7, 2)), 0, True) for d in NUMBERS),
        _runs(operation, "not numbers", _SPECIAL, -1, False),
        _runs(operation, "size 1", numbers("float32", (2, 1)), 1, True),
        _runs(operation, "no elements", numbers("float32", (2, 0)), 1, False),
        _runs(operation, "vector", numbers("float32", (5,)), 0, True),
    ]


def _folded(
    case: str,
    build_body: Callable[[Any], Callable[..., Any]],
    jax_body: Callable[..., Any],
    arrays: tuple[np.ndarray, ...],
    initial: tuple[Any, ...],
    axes: tuple[int, ...],
    constant: bool = True,
) -> Sample:
    """Return a sample of ``reduce``; initial values are constants or arguments."""
    count = len(arrays)
    firsts = tuple(np.asarray(v, a.dtype) for v, a in zip(initial, arrays, strict=True))

    def build(b: Any, *values: Any) -> Any:
        first = [b.constant(value) for value in firsts] if constant else values[count:]
        if count == 1:
            return b.reduce(values[0], first[0], axes, build_body(b))
        return b.reduce(values[:count], first, axes, build_body(b))

    def folded(*given: Any) -> Any:
        values, firsts = given[:count], given[count:]
        if count == 1:
            return lax.reduce(values[0], firsts[0], jax_body, axes)
        return lax.reduce(
            values, firsts, lambda totals, elements: jax_body(*totals, *elements), axes
        )

    arguments = arrays if constant else (*arrays, *firsts)
    return Sample("reduce", case, build, arguments, by_jax(folded, *arrays, *firsts))


def _last(first: Any, second: Any) -> Any:
    return second


_ADD = (lambda b: lambda x, y: b.add(x, y)), lambda x, y: x + y
_TURNED = (lambda b: lambda x, y: b.add(y, x)), lambda x, y: y + x
_MULTIPLY = (lambda b: lambda x, y: b.multiply(x, y)), lambda x, y: x * y
# Associative, and no operation of its own: (1 + x)(1 + y) - 1.
_GROW = (
    lambda b: lambda x, y: b.add(b.add(x, y), b.multiply(x, y)),
    lambda x, y: x + y + x * y,
)
# Associative, but not commutative.
_LAST = (lambda b: _last), _last
# Affine maps, one after the other: a pair whose parts depend on each other.
_AFFINE = (
    lambda b: lambda a, c, d, e: (b.multiply(a, d), b.add(b.multiply(c, d), e)),
    lambda a, c, d, e: (a * d, c * d + e),
)
_BOTH = (
    (lambda b: lambda x, y, z, w: (b.add(x, z), b.multiply(w, y))),
    lambda x, y, z, w: (
        x + z,
        y * w,
    ),
)


_MAXIMUM = (lambda b: lambda x, y: b.maximum(x, y)), lax.max
_MINIMUM = (lambda b: lambda x, y: b.minimum(y, x)), lax.min
_AND = (lambda b: lambda x, y: b.and_(x, y)), lambda x, y: x & y
_OR = (lambda b: lambda x, y: b.or_(x, y)), lambda x, y: x | y
_XOR = (lambda b: lambda x, y: b.xor(x, y)), lambda x, y: x ^ y
# The log of a sum of exponentials.
_LOG_ADD = (
    lambda b: lambda x, y: b.log(b.add(b.exponential(x), b.exponential(y))),
    lambda x, y: lax.log(lax.exp(x) + lax.exp(y)),
)


def _keeps_extremum(b: Any, greater: str) -> Callable[..., Any]:
    """The body of JAX's argmax, or argmin."""

    def body(value: Any, index: Any, other: Any, other_index: Any) -> Any:
        wins = b.or_(b.compare(value, other, greater), b.compare(value, value, "NE"))
        is_first = b.and_(b.compare(value, other, "EQ"), b.compare(index, other_index, "LT"))
        keeps = b.or_(wins, is_first)
        return b.select(wins, value, other), b.select(keeps, index, other_index)

    return body


def _searched(case: str, x: np.ndarray, axis: int, greater: str, with_iota: bool) -> Sample:
    """Return a sample of the reduction that JAX makes of argmax or argmin."""
    index = np.indices(x.shape, np.int32)[axis]
    is_max = greater == "GT"

    def build(b: Any, x: Any) -> Any:
        places = b.iota("int32", x.shape, axis) if with_iota else b.constant(index)
        number = b.constant(np.array(-np.inf if is_max else np.inf, np.float32))
        return b.reduce((x, places), (number, b.constant(0)), axis, _keeps_extremum(b, greater))

    def expected(x: Any) -> Any:
        if is_max:
            return lax.reduce_max(x, (axis,)), lax.argmax(x, axis, np.int32)
        return lax.reduce_min(x, (axis,)), lax.argmin(x, axis, np.int32)

    return Sample("reduce", case, build, (x,), by_jax(expected, x))


def _reduce_known() -> list[Sample]:
    floats, bools = numbers("float32", (3, 5)), numbers("bool", (3, 5))
    search = np.concatenate([_SPECIAL, [[2, 7, 7], [-3, -3, 9]]]).astype(np.float32)
    found = [
        _folded("maximum", *_MAXIMUM, (_SPECIAL,), (-np.inf,), (1,)),
        _folded("maximum from 1", *_MAXIMUM, (floats,), (1,), (1,)),
        _folded("minimum", *_MINIMUM, (floats,), (np.inf,), (0, 1)),
        _folded("largest of uint32", *_MAXIMUM, (numbers("uint32", (3, 5)),), (0,), (1,)),
        _folded("log of a sum", *_LOG_ADD, (floats,), (-np.inf,), (1,)),
        _folded("and of bools", *_AND, (bools,), (True,), (1,)),
        _folded("or of bools", *_OR, (bools,), (False,), (0,), constant=False),
        _folded("xor of bools", *_XOR, (bools,), (True,), (0, 1)),
    ]
    for dtype in ("int8", "uint16", "uint32"):
        x = numbers(dtype, (3, 5))
        found += [
            _folded("and", *_AND, (x,), (np.iinfo(dtype).max,), (1,)),
            _folded("or", *_OR, (x,), (0,), (1,)),
            _folded("xor", *_XOR, (x,), (3,), (1,)),
        ]
    for greater in ("GT", "LT"):
        found += [
            _searched(f"index, {greater}", search, 1, greater, True),
            _searched(f"index, first axis, {greater}", search, 0, greater, True),
            _searched(f"index, {greater}, body", search, 1, greater, False),
        ]
    return found


def _reduce() -> list[Sample]:
    pair = numbers("float32", (3, 4)), numbers("int32", (3, 4), 1)
    floats = numbers("float32", (3, 4)), numbers("float32", (3, 4), 1)
    found = [_folded("sum", *_ADD, (numbers(d, (3, 4)),), (0,), (1,)) for d in NUMBERS]
    found += [
        _folded("sum from 3", *_TURNED, (numbers("float32", (3, 4)),), (3,), (0,)),
        _folded("sum, argument", *_ADD, (numbers("int8", (3, 4)),), (3,), (0, 1), constant=False),
        _folded("product", *_MULTIPLY, (numbers("int32", (3, 4)),), (1,), (0,)),
        _folded("sum of none", *_ADD, (numbers("float32", (2, 0)),), (3,), (1,)),
        _folded("two at once", *_BOTH, pair, (0, 1), (1,)),
        _folded("affine", *_AFFINE, floats, (1, 0), (1,), constant=False),
        _folded("no axes", *_ADD, (numbers("float32", (2, 3)),), (0,), ()),
        _folded("none, body", *_GROW, (numbers("float32", (2, 0)),), (3,), (1,)),
        _folded("empty, body", *_GROW, (numbers("float32", (0, 2)),), (3,), (1,)),
    ]
    found += [
        _folded("body", *_GROW, (numbers("float32", (2, size)),), (0,), (1,))
        for size in (1, 2, 3, 7, 8)
    ]
    found += [
        _folded("body, two axes", *_GROW, (numbers("int8", (2, 3, 3)),), (0,), (0, 2)),
        _folded("body, rank 0", *_GROW, (numbers("uint32", (5,)),), (4,), (0,), constant=False),
        _folded("last", *_LAST, (numbers("float32", (2, 5)),), (0,), (1,)),
        _folded("last of bools", *_LAST, (numbers("bool", (2, 5)),), (False,), (1,)),
    ]
    return found


SAMPLES = [
    *_reductions(),
    *_indices("arg_max"),
    *_indices("arg_min"),
    *(sample for operation in _RUNNING for sample in _running(operation)),
    *_reduce(),
    *_reduce_known(),
]
