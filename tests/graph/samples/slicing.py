"""Samples of slices, of writing into slices, and of padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph.samples.sample import Sample
from jax import lax
from support.graph_samples import ALL, INTEGERS, ByJax, by_jax, of

_SLICES: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ("rank 0", (), (), (), ()),
    ("the whole", (2, 3), (0, 0), (2, 3), (1, 1)),
    ("strides beyond the end", (5, 3), (1, 0), (5, 3), (3, 5)),
    ("one element", (5, 3), (4, 2), (5, 3), (1, 1)),
    ("no elements", (5, 3), (2, 0), (2, 3), (1, 2)),
    ("of no elements", (0, 3), (0, 1), (0, 3), (1, 2)),
    ("rank 6", (2, 1, 4, 2, 1, 3), (0, 0, 1, 0, 0, 0), (2, 1, 4, 2, 1, 3), (1, 1, 2, 1, 1, 1)),
]


def _slice(case: str, x: np.ndarray, start: Any, limit: Any, strides: Any) -> Sample:
    return Sample(
        "slice",
        case,
        lambda b, x: b.slice(x, start, limit, strides),
        (x,),
        by_jax(lax.slice, x, start_indices=start, limit_indices=limit, strides=strides),
    )


def _starts(*starts: int, dtype: str = "int32") -> tuple[np.ndarray, ...]:
    return tuple(np.array(start, dtype) for start in starts)


def _dynamic_slice(case: str, x: np.ndarray, starts: Any, sizes: tuple[int, ...]) -> Sample:
    return Sample(
        "dynamic_slice",
        case,
        lambda b, x, *starts: b.dynamic_slice(x, starts, sizes),
        (x, *starts),
        _region(x, starts, sizes),
    )


def _region(x: np.ndarray, starts: Any, sizes: tuple[int, ...]) -> ByJax:
    return by_jax(lax.dynamic_slice, x, starts, slice_sizes=sizes, allow_negative_indices=False)


def _fixed(x: np.ndarray, starts: Any, sizes: tuple[int, ...]) -> Sample:
    return Sample(
        "dynamic_slice",
        f"starts are constants of {starts[0].dtype}",
        lambda b, x: b.dynamic_slice(x, [b.constant(start) for start in starts], sizes),
        (x,),
        _region(x, starts, sizes),
    )


def _update(case: str, x: np.ndarray, update: np.ndarray, starts: Any) -> Sample:
    return Sample(
        "dynamic_update_slice",
        case,
        lambda b, x, update, *starts: b.dynamic_update_slice(x, update, starts),
        (x, update, *starts),
        by_jax(lax.dynamic_update_slice, x, update, starts, allow_negative_indices=False),
    )


def _update_fixed(dtype: str) -> Sample:
    x, update = of(dtype, (4, 5)), of(dtype, (2, 2))
    expected = x.copy()
    expected[2:, 1:3] = update
    return Sample(
        "dynamic_update_slice",
        "starts are constants",
        lambda b, x, u: b.dynamic_update_slice(x, u, [b.constant(7), b.constant(1)]),
        (x, update),
        expected,
    )


_PADS: list[tuple[str, tuple[int, ...], list[tuple[int, int, int]]]] = [
    ("rank 0", (), []),
    ("nothing", (2, 3), [(0, 0, 0), (0, 0, 0)]),
    ("at the ends", (2, 3), [(1, 2, 0), (0, 3, 0)]),
    ("between", (2, 3), [(0, 0, 1), (0, 0, 3)]),
    ("between and at the ends", (2, 3), [(1, 0, 2), (2, 1, 1)]),
    ("removed", (4, 5), [(-1, -2, 0), (0, -3, 0)]),
    ("removed of what is between", (4, 5), [(-2, 1, 1), (1, -3, 2)]),
    ("more removed than there was", (2, 3), [(-3, 4, 0), (5, -6, 0)]),
    ("all removed", (2, 3), [(-1, -1, 0), (0, 0, 0)]),
    ("size 1", (1, 3), [(0, 1, 2), (0, 0, 0)]),
    ("no elements", (0, 3), [(1, 1, 4), (0, 1, 0)]),
    ("no elements of none", (0, 3), [(0, 0, 2), (0, 1, 0)]),
    ("rank 5, between", (2, 1, 2, 2, 2), [(0, 0, 0), (0, 0, 0), (1, 0, 1), (0, 0, 0), (0, 0, 0)]),
    ("rank 6", (2, 1, 2, 1, 2, 2), [(0, 0, 0)] * 4 + [(1, 0, 1), (0, 0, 0)]),
]


def _pad(
    case: str, x: np.ndarray, value: Any, amounts: list[tuple[int, int, int]], *, known: bool
) -> Sample:
    low, high, interior = ([each[n] for each in amounts] for n in range(3))
    number = np.array(value, x.dtype)
    expected = by_jax(lax.pad, x, number, padding_config=amounts)
    if known:
        return Sample(
            "pad",
            f"{case}, a constant",
            lambda b, x: b.pad(x, b.constant(number), low, high, interior),
            (x,),
            expected,
        )
    return Sample(
        "pad", case, lambda b, x, v: b.pad(x, v, low, high, interior), (x, number), expected
    )


def _of_type(dtype: str) -> list[Sample]:
    x = of(dtype, (4, 5))
    pads = [(1, -1, 1), (-1, 2, 0)]
    vector = [np.array(given, np.int32) for given in ([1, 0], [4, 5], [2, 1])]
    return [
        _slice("matrix", x, (1, 0), (4, 4), (2, 1)),
        _dynamic_slice("matrix", x, _starts(1, 3), (2, 2)),
        _update("matrix", x, of(dtype, (2, 3)), _starts(1, 1)),
        _pad("matrix", x, 1, pads, known=False),
        _pad("matrix", x, 1, pads, known=True),
        Sample(
            "dynamic_pad",
            "constants",
            lambda b, x, v: b.dynamic_pad(x, v, *map(b.constant, ([1, 0], [0, -1], [0, 1]))),
            (x, np.array(1, dtype)),
            by_jax(lax.pad, x, np.array(1, dtype), padding_config=[(1, 0, 0), (0, -1, 1)]),
        ),
        Sample(
            "real_dynamic_slice",
            "constants",
            lambda b, x: b.real_dynamic_slice(x, *map(b.constant, vector)),
            (x,),
            x[1:4:2, 0:5],
        ),
    ]


_FLOAT = of("float32", (4, 5))
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0)

SAMPLES = [
    *(sample for dtype in ALL for sample in _of_type(dtype)),
    *(_slice(case, of("float32", shape), *rest) for case, shape, *rest in _SLICES),
    *(
        _dynamic_slice(f"starts beyond the ends, {dtype}", _FLOAT, starts, (3, 2))
        for dtype in INTEGERS
        for starts in [_starts(0, 100, dtype=dtype)]
    ),
    _dynamic_slice("negative starts", _FLOAT, _starts(-1, -9), (3, 2)),
    _dynamic_slice("extreme starts", _FLOAT, _starts(2**31 - 1, -(2**31)), (3, 2)),
    _dynamic_slice("unsigned starts", _FLOAT, _starts(2**32 - 1, 1, dtype="uint32"), (3, 2)),
    _dynamic_slice("the whole", _FLOAT, _starts(1, 2), (4, 5)),
    _dynamic_slice("rank 0", of("float32", ()), (), ()),
    _dynamic_slice("no elements", _FLOAT, _starts(1, 2), (0, 5)),
    _dynamic_slice("of no elements", of("float32", (0, 3)), _starts(1, 2), (0, 2)),
    _dynamic_slice(
        "rank 6",
        of("float32", (2, 1, 3, 2, 1, 2)),
        _starts(0, 0, 1, 0, 0, 1),
        (2, 1, 2, 2, 1, 1),
    ),
    _fixed(_FLOAT, _starts(9, -2), (3, 2)),
    _fixed(_FLOAT, _starts(2**32 - 1, 1, dtype="uint32"), (3, 2)),
    _update("starts beyond the ends", _FLOAT, of("float32", (2, 2)), _starts(7, -3)),
    _update("extremes", _FLOAT, of("float32", (2, 2)), _starts(2**31 - 1, -(2**31))),
    _update("the whole", _FLOAT, of("float32", (4, 5)), _starts(1, 2)),
    _update("whole rows", _FLOAT, of("float32", (1, 5)), _starts(2, 2)),
    _update("rank 0", of("float32", ()), of("float32", ()), ()),
    _update("an update without elements", _FLOAT, of("float32", (0, 5)), _starts(1, 2)),
    _update("no elements", of("float32", (0, 5)), of("float32", (0, 2)), _starts(1, 2)),
    _update(
        "rank 6",
        of("float32", (2, 1, 3, 2, 1, 2)),
        of("float32", (2, 1, 2, 2, 1, 2)),
        _starts(0, 0, 1, 0, 0, 0),
    ),
    _update_fixed("float32"),
    *(
        _pad(case, of(dtype, shape), 3, amounts, known=known)
        for dtype in ("float32", "int32")
        for case, shape, amounts in _PADS
        for known in (False, True)
    ),
    *(_pad(str(v), _FLOAT, v, [(1, 0, 0), (0, 0, 1)], known=True) for v in _SPECIAL),
]
