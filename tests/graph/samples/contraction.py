"""Samples of products of tensors."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from graph.samples.sample import Sample
from support.graph_numbers import numbers
from support.graph_samples import ALL, by_jax

Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _sample(
    case: str,
    x: np.ndarray,
    y: np.ndarray,
    contracting: Axes,
    batching: Axes = ((), ()),
    preferred: str | None = None,
    constant: str = "",
) -> Sample:
    def expected(x: Any, y: Any) -> Any:
        if preferred:
            x, y = x.astype(preferred), y.astype(preferred)
        return jax.lax.dot_general(x, y, (contracting, batching), precision="highest")

    def build(b: Any, *values: Any) -> Any:
        given = iter(values)
        operands = [
            b.constant(array) if name in constant else next(given)
            for name, array in (("x", x), ("y", y))
        ]
        return b.dot_general(
            *operands, contracting=contracting, batching=batching, preferred_dtype=preferred
        )

    fed = tuple(array for name, array in (("x", x), ("y", y)) if name not in constant)
    return Sample("dot_general", case, build, fed, by_jax(expected, x, y))


def _floats(*shape: int) -> np.ndarray:
    return numbers("float32", shape, sum(shape))


def _dot(case: str, x: np.ndarray, y: np.ndarray) -> Sample:
    return Sample("dot", case, lambda b, x, y: b.dot(x, y), (x, y), by_jax(jax.lax.dot, x, y))


_VECTOR, _MATRIX = ((0,), (0,)), ((1,), (0,))
_LAST = ((1,), (1,))
_NONE = ((), ())

# case, shapes, contracting, batching, which are constant
_CASES: list[tuple[str, tuple[int, ...], tuple[int, ...], Axes, Axes, str]] = [
    ("vectors", (5,), (5,), _VECTOR, _NONE, ""),
    ("matrix and vector", (3, 5), (5,), _MATRIX, _NONE, ""),
    ("vector and matrix", (5,), (5, 3), _VECTOR, _NONE, ""),
    ("left turned", (4, 3), (4, 2), _VECTOR, _NONE, ""),
    ("right turned", (3, 4), (2, 4), _LAST, _NONE, ""),
    ("both turned", (4, 3), (2, 4), ((0,), (1,)), _NONE, ""),
    ("rank 3 and a matrix", (2, 3, 4), (4, 5), ((2,), (0,)), _NONE, ""),
    ("rank 3 and a vector", (2, 3, 4), (4,), ((2,), (0,)), _NONE, ""),
    ("middle axis", (2, 4, 3), (5, 4), _LAST, _NONE, ""),
    ("two axes", (2, 3, 4), (4, 3, 5), ((1, 2), (1, 0)), _NONE, ""),
    ("two axes in place", (2, 3, 4), (5, 3, 4), ((2, 1), (2, 1)), _NONE, ""),
    ("batch", (2, 3, 4), (2, 4, 5), ((2,), (1,)), ((0,), (0,)), ""),
    ("two batches", (2, 3, 6, 4), (3, 2, 5, 4), ((3,), (3,)), ((0, 1), (1, 0)), ""),
    ("heads", (2, 6, 3, 4), (2, 5, 3, 4), ((3,), (3,)), ((0, 2), (0, 2)), ""),
    ("batch last", (3, 4, 2), (4, 2), _MATRIX, ((2,), (1,)), ""),
    ("only batches", (3, 2), (2, 3), _NONE, ((0, 1), (1, 0)), ""),
    ("outer", (2, 3), (4,), _NONE, _NONE, ""),
    ("rank 0", (), (2, 2), _NONE, _NONE, ""),
    ("rank 5", (2, 1, 3, 2), (2, 2, 3), ((0,), (0,)), _NONE, ""),
    ("three batches", (2, 1, 2, 2, 3), (2, 1, 2, 3), ((4,), (3,)), ((0, 1, 2),) * 2, ""),
    ("four batches", (2, 1, 2, 2, 3), (2, 1, 2, 2, 3), ((4,), (4,)), ((0, 1, 2, 3),) * 2, ""),
    ("size 1", (1, 4), (4, 1), _MATRIX, _NONE, ""),
    ("nothing to sum", (2, 0), (0, 3), _MATRIX, _NONE, ""),
    ("empty", (0, 2), (2, 3), _MATRIX, _NONE, ""),
    ("constant weight", (2, 3, 4), (4, 5), ((2,), (0,)), _NONE, "y"),
    ("constant weight, turned", (3, 4), (5, 4), _LAST, _NONE, "y"),
    ("constant heads", (2, 3, 4), (4, 2, 5), ((2,), (0,)), _NONE, "y"),
    ("constant of two axes", (2, 3, 4), (3, 4, 5), ((1, 2), (0, 1)), _NONE, "y"),
    ("constant, left turned", (4, 3), (4, 5), _VECTOR, _NONE, "y"),
    ("constant vector", (3, 4), (4,), _MATRIX, _NONE, "y"),
    ("constant left of a vector", (3, 4), (4,), _MATRIX, _NONE, "x"),
    ("constant left", (3, 4), (4, 2), _MATRIX, _NONE, "x"),
    ("constant batch", (2, 3, 4), (2, 4, 5), ((2,), (1,)), ((0,), (0,)), "y"),
    ("both constant", (3, 4), (4, 5), _MATRIX, _NONE, "xy"),
]

# case, element types of the operands and of the result
_MIXED = [
    ("int8 to int32", "int8", "int8", "int32"),
    ("uint8 and int8", "uint8", "int8", "int32"),
    ("int32 to int8", "int32", "int32", "int8"),
    ("float16 to float32", "float16", "float16", "float32"),
    ("float32 to float16", "float32", "float32", "float16"),
    ("uint32 to float32", "uint32", "uint32", "float32"),
    ("int8 and float32", "int8", "float32", "float32"),
]

_TYPED = [(dtype, numbers(dtype, (3, 40)), numbers(dtype, (40, 2), 1)) for dtype in ALL]

SAMPLES = [
    *(_sample("matrices", x, y, _MATRIX) for _, x, y in _TYPED),
    *(_sample("constant", x, y, _MATRIX, constant="y") for _, x, y in _TYPED),
    *(
        _sample(case, _floats(*x), _floats(*y), contracting, batching, constant=constant)
        for case, x, y, contracting, batching, constant in _CASES
    ),
    *(
        _sample(case, numbers(x, (3, 40)), numbers(y, (40, 2), 1), _MATRIX, preferred=preferred)
        for case, x, y, preferred in _MIXED
    ),
    *(_dot("matrices", x, y) for _, x, y in _TYPED),
    _dot("vectors", _floats(5), _floats(5)),
    _dot("matrix and vector", _floats(3, 5), _floats(5)),
]
