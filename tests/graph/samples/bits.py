"""Samples of logic, shifts and counts of bits, and of random bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from graph.edge_arrays import ALL, INTEGERS, by_integers, extremes, numbers, pairs
from graph.samples.sample import Sample
from support.graph_samples import ByJax, by_jax


def _logic(operation: str, method: str, function: np.ufunc) -> Iterator[Sample]:
    def call(b: Any, x: Any, y: Any) -> Any:
        return getattr(b, method)(x, y)

    for dtype in (*INTEGERS, "bool"):
        x, y = pairs(dtype)
        yield Sample(operation, "pairs", call, (x, y), function(x, y))
        x, y = numbers(dtype, (2, 3)), numbers(dtype, ())
        yield Sample(operation, "rank 0", call, (x, y), function(x, y))
        yield Sample(operation, "scalars", call, (x[0, 0], y), function(x[0, 0], y))
        if dtype in ("int8", "uint32"):
            x, y = numbers(dtype, (2, 1, 2, 3, 1)), numbers(dtype, (1, 2, 2, 1, 2))
            yield Sample(operation, "rank 5", call, (x, y), function(x, y))
        for constant in (0, 1, 7, 9, 0x7F) if dtype in ("bool", "int8", "uint32") else (9,):
            y = np.asarray(constant, dtype)
            if dtype == "uint32":
                y = np.asarray({7: 0x7FFFFFFF, 9: 0x3F800000, 1: 0xFFFFFFFF}.get(constant, y))
                y = y.astype(dtype)
            yield Sample(
                operation,
                f"constant {y}",
                lambda b, x, y=y: call(b, b.constant(y), x),
                (extremes(dtype),),
                function(extremes(dtype), y),
            )


def _not() -> Iterator[Sample]:
    for dtype in (*INTEGERS, "bool"):
        x = extremes(dtype)
        yield Sample("not", "extremes", lambda b, x: b.not_(x), (x,), ~x)


def _width(dtype: str) -> int:
    return np.iinfo(dtype).bits


def _unsigned(x: int, width: int) -> int:
    return x % (1 << width)


def _shift(kind: str, dtype: str) -> Callable[[int, int], int]:
    width = _width(dtype)

    def left(x: int, y: int) -> int:
        return x << y if 0 <= y < width else 0

    def logical(x: int, y: int) -> int:
        return _unsigned(x, width) >> y if 0 <= y < width else 0

    def arithmetic(x: int, y: int) -> int:
        signed = _unsigned(x + (1 << (width - 1)), width) - (1 << (width - 1))
        return signed >> (y if 0 <= y < width else width - 1)

    return {"left": left, "right_logical": logical, "right_arithmetic": arithmetic}[kind]


def _fits(dtype: str, expected: np.ndarray, x: np.ndarray) -> bool:
    """Whether 32 bits hold what is expected of 64."""
    wide = expected.astype(object)
    return _width(dtype) < 64 or bool((abs(wide) < 1 << 31).all())


def _shifts(kind: str) -> Iterator[Sample]:
    operation = f"shift_{kind}"
    for dtype in INTEGERS:
        width = _width(dtype)
        function = _shift(kind, dtype)
        places = [0, 1, 2, 5, width // 2, width - 2, width - 1, width, width + 1, 33, 40, 127]
        signed = np.iinfo(dtype).min < 0
        y = np.array(
            [*places, -1, -40] if signed else [*places, *([1 << width - 1] if width < 64 else [])],
            dtype,
        )
        x = extremes(dtype)
        for column in y[::2] if width == 64 else ():
            y64 = np.asarray(column, dtype)
            expected = by_integers(function, x, y64)
            if _fits(dtype, expected, x):
                yield Sample(
                    operation,
                    f"by {column}",
                    lambda b, x, y: getattr(b, operation)(x, y),
                    (x, y64),
                    expected,
                )
        if width < 64:
            grid = (x[:, None], y[None])
            yield Sample(
                operation,
                "places",
                lambda b, x, y: getattr(b, operation)(x, y),
                grid,
                by_integers(function, *grid),
            )
            yield Sample(
                operation,
                "constant places",
                lambda b, x, y=grid[1]: getattr(b, operation)(x, b.constant(y)),
                grid[:1],
                by_integers(function, *grid),
            )
        for column in y if width == 32 else y[[0, 3, -2]]:
            by = np.asarray(column, dtype)
            expected = by_integers(function, x, by)
            if _fits(dtype, expected, x):
                yield Sample(
                    operation,
                    f"by constant {column}",
                    lambda b, x, y=by: getattr(b, operation)(x, b.constant(y)),
                    (x,),
                    expected,
                )


def _rotations() -> Iterator[Sample]:
    for dtype in ("uint32", "uint8", "int16"):
        x, width = numbers(dtype, (20,)), _width(dtype)

        def rotated(places: int, x: np.ndarray = x, width: int = width) -> np.ndarray:
            return by_integers(
                lambda n: _unsigned(n, width) << places | _unsigned(n, width) >> width - places, x
            )

        def by_constants(b: Any, x: Any, dtype: str = dtype, width: int = width) -> Any:
            up = b.shift_left(x, b.constant(5, dtype))
            return b.or_(b.shift_right_logical(x, b.constant(width - 5, dtype)), up)

        def by_value(b: Any, x: Any, y: Any, dtype: str = dtype, width: int = width) -> Any:
            rest = b.subtract(b.constant(width, dtype), y)
            return b.or_(b.shift_left(x, y), b.shift_right_logical(x, rest))

        yield Sample("or", "rotation by a constant", by_constants, (x,), rotated(5))
        for places in (0, 3, width):
            y = np.asarray(places, dtype)
            yield Sample("or", f"rotation by {places}", by_value, (x, y), rotated(places))


def _counts() -> Iterator[Sample]:
    for dtype in INTEGERS:
        width = _width(dtype)
        x = np.concatenate([extremes(dtype), numbers(dtype, (20,))])
        ones = by_integers(lambda n, w=width: _unsigned(n, w).bit_count(), x)
        zeros = by_integers(lambda n, w=width: w - _unsigned(n, w).bit_length(), x)
        yield Sample("popcnt", "extremes", lambda b, x: b.popcnt(x), (x,), ones)
        yield Sample(
            "count_leading_zeros", "extremes", lambda b, x: b.count_leading_zeros(x), (x,), zeros
        )
        yield Sample("popcnt", "rank 0", lambda b, x: b.popcnt(x), (x[1],), ones[1])


def _bitcast(x: np.ndarray, target: str, expected: np.ndarray, case: str = "") -> Sample:
    return Sample(
        "bitcast_convert",
        f"{case} as {target}",
        lambda b, x: b.bitcast_convert(x, target),
        (x,),
        expected,
        tolerance=(0.0, 0.0),
    )


def _bitcasts() -> Iterator[Sample]:
    for dtype in ALL:
        x = extremes(dtype)
        yield _bitcast(x, dtype, x)
    for one, other in (("int8", "uint8"), ("int16", "uint16"), ("int32", "uint32")):
        for source, target in ((one, other), (other, one)):
            x = extremes(source)
            yield _bitcast(x, target, x.view(target))
    for dtype, integers in (("float32", ("int32", "uint32")), ("float16", ("int16", "uint16"))):
        info = np.finfo(dtype)
        ends = [info.max, info.tiny, info.smallest_subnormal, info.tiny * 0.75, 1 - info.epsneg]
        x = np.concatenate([extremes(dtype), np.array([*ends, 3.1415, -1e-3, 1 + info.eps], dtype)])
        scales = np.exp2(np.arange(info.minexp, info.maxexp)).astype(dtype)
        x = np.concatenate([x, scales, np.nextafter(scales, np.asarray(0, dtype)), -scales])
        for integer in integers:
            yield _bitcast(x, integer, x.view(integer))
            bits = np.concatenate([x.view(integer), numbers(integer, (50,))])
            yield _bitcast(bits, dtype, bits.view(dtype))
            yield _bitcast(x[3], integer, x[3].view(integer), "rank 0")


def _random(key: np.ndarray, dtype: str, shape: tuple[int, ...]) -> ByJax:
    """JAX's new state and random bits."""
    return by_jax(
        jax.lax.rng_bit_generator,
        key,
        shape=shape,
        dtype=dtype,
        algorithm=jax.lax.RandomAlgorithm.RNG_THREE_FRY,
    )


def _random_bits() -> Iterator[Sample]:
    # The low word of the second counter overflows.
    for state, dtype, shape in (
        ([1, 2, 3, 4], "uint32", (5,)),
        ([0xFFFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF], "uint32", (3, 2, 700)),
    ):
        key = np.array(state, np.uint32)
        yield Sample(
            "rng_bit_generator",
            f"{dtype} of {shape}",
            lambda b, x, dtype=dtype, shape=shape: b.rng_bit_generator(x, dtype, shape),
            (key,),
            _random(key, dtype, shape),
        )
    # Of a constant state, everything is computed before the graph is compiled.
    for dtype, shape in (
        *(("uint32", shape) for shape in ((), (2, 3), (3, 5), (0, 2))),
        ("uint8", (5,)),
        ("uint16", (3, 2, 1)),
    ):
        key = np.array([5, 6, 7, 8], np.uint32)
        yield Sample(
            "rng_bit_generator",
            f"{dtype} of {shape}, constant state",
            lambda b, key=key, dtype=dtype, shape=shape: b.rng_bit_generator(
                b.constant(key), dtype, shape
            ),
            (),
            _random(key, dtype, shape),
        )


SAMPLES = [
    *_logic("and", "and_", np.bitwise_and),
    *_logic("or", "or_", np.bitwise_or),
    *_logic("xor", "xor", np.bitwise_xor),
    *_not(),
    *_shifts("left"),
    *_shifts("right_logical"),
    *_shifts("right_arithmetic"),
    *_rotations(),
    *_counts(),
    *_bitcasts(),
    *_random_bits(),
]
