"""Samples of reshaping, permuting, repeating, joining, counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph.samples.sample import Sample
from jax import lax
from support.graph_samples import ALL, NUMBERS, by_jax, of


def _moved(
    operation: str, case: str, shape: tuple[int, ...], expected: Callable, *args: Any
) -> list[Sample]:
    """One sample per element type of an operation that takes a tensor and numbers."""
    return [
        Sample(
            operation,
            case,
            lambda b, x: getattr(b, operation)(x, *args),
            (x,),
            expected(x),
        )
        for x in (of(dtype, shape) for dtype in ALL)
    ]


def _one(
    operation: str, case: str, shape: tuple[int, ...], expected: Callable, *args: Any
) -> Sample:
    return _moved(operation, case, shape, expected, *args)[0]


_RESHAPES: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("to rank 0", (1, 1), ()),
    ("of rank 0", (), (1,)),
    ("to rank 0 of rank 0", (), ()),
    ("nothing changes", (2, 3), (2, 3)),
    ("a size left out", (4, 3), (2, -1)),
    ("no elements", (0, 3), (5, 0)),
    ("no elements, a size left out", (0, 3), (3, -1)),
    ("rank 6", (8, 9), (2, 2, 2, 3, 3, 1)),
]

_TRANSPOSES: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("rank 0", (), ()),
    ("nothing changes", (2, 3), (0, 1)),
    ("only a size of 1 moves", (1, 2, 3), (1, 0, 2)),
    ("negative", (2, 3, 4), (-1, 0, 1)),
    ("no elements", (2, 0, 3), (2, 1, 0)),
    ("rank 6 as rank 2", (2, 1, 3, 2, 2, 1), (3, 4, 5, 0, 1, 2)),
    ("rank 6, reversed", (2, 3, 2, 2, 1, 2), (5, 4, 3, 2, 1, 0)),
]

_BROADCASTS: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ("rank 0", (), (2, 3), ()),
    ("rank 0 to rank 0", (), (), ()),
    ("new dimensions around", (3,), (2, 3, 2), (1,)),
    ("repeated and new", (1, 3), (2, 4, 3), (1, 2)),
    ("dimensions out of order", (2, 3), (3, 4, 2), (2, 0)),
    ("to no elements", (1, 3), (0, 3), (0, 1)),
    ("of no elements", (0, 1), (0, 4), (0, 1)),
    ("rank 7", (2, 1, 3), (2, 2, 2, 3, 3, 2, 1), (1, 2, 3)),
]


def _broadcast(shape: tuple[int, ...], dimensions: tuple[int, ...]) -> Callable:
    return lambda x: by_jax(lax.broadcast_in_dim, x, shape=shape, broadcast_dimensions=dimensions)


def _joined(case: str, dimension: int, *shapes: tuple[int, ...]) -> list[Sample]:
    return [
        Sample(
            "concatenate",
            case,
            lambda b, *values: b.concatenate(values, dimension),
            arrays,
            np.concatenate(arrays, dimension),
        )
        for arrays in (tuple(of(dtype, shape) for shape in shapes) for dtype in ALL)
    ]


def _iota(
    case: str, shape: tuple[int, ...], dimension: int, dtypes: tuple[str, ...]
) -> list[Sample]:
    return [
        Sample(
            "iota",
            case,
            lambda b, dtype=dtype: b.iota(dtype, shape, dimension),
            (),
            by_jax(lax.broadcasted_iota, dtype=dtype, shape=shape, dimension=dimension),
        )
        for dtype in dtypes
    ]


def _sized(x: Any, b: Any) -> Any:
    """A shape that flows through a graph: the sizes of a matrix, swapped, and one more."""
    sizes = [b.reshape(b.get_dimension_size(x, axis), (1,)) for axis in (1, 0)]
    return b.concatenate([*sizes, b.constant([1], "int32")], 0)


def _dynamic() -> list[Sample]:
    found: list[Sample] = []
    for dtype in ALL:
        x = of(dtype, (2, 3))
        found += [
            Sample(
                "dynamic_reshape",
                "sizes of another tensor",
                lambda b, x: b.dynamic_reshape(x, _sized(x, b)),
                (x,),
                x.reshape(3, 2, 1),
            ),
            Sample(
                "dynamic_broadcast_in_dim",
                "sizes of another tensor",
                lambda b, x: b.dynamic_broadcast_in_dim(x, _sized(x, b), (1, 0)),
                (x,),
                x.T[..., None],
            ),
        ]
    found += [
        Sample(
            "dynamic_iota",
            "sizes of a constant",
            lambda b, dtype=dtype: b.dynamic_iota(dtype, b.constant([2, 3]), 1),
            (),
            np.tile(np.arange(3), (2, 1)).astype(dtype),
        )
        for dtype in NUMBERS
    ]
    x = of("float32", (2, 3))
    found.append(
        Sample(
            "dynamic_reshape",
            "sizes computed by reverse, slice, transpose and broadcast",
            lambda b, x: b.dynamic_reshape(
                x,
                b.slice(
                    b.reverse(
                        b.reshape(
                            b.transpose(
                                b.broadcast(b.reshape(b.constant([2, 1, 3]), (3, 1)), (3, 2)),
                                (1, 0),
                            ),
                            (6,),
                        ),
                        [0],
                    ),
                    (0,),
                    (3,),
                ),
            ),
            (x,),
            x.reshape(3, 1, 2),
        )
    )
    found.append(
        Sample(
            "dynamic_reshape",
            "a shape of which nothing is known",
            lambda b, x, shape: b.dynamic_reshape(x, shape, (3, 2)),
            (x, np.array([3, 2], np.int32)),
            x.reshape(3, 2),
        )
    )
    return found


def _several(dtype: str) -> Sample:
    x, y = of(dtype, (2, 3)), of("int32", ())
    return Sample(
        "optimization_barrier",
        "two, and one without elements",
        lambda b, x, y, z: b.optimization_barrier(x, y, z),
        (x, y, np.zeros((0, 2), np.float32)),
        (x, y, np.zeros((0, 2), np.float32)),
    )


_RANK_6 = of("float32", (2, 1, 2, 1, 2, 2))

SAMPLES = [
    *_moved("reshape", "matrix", (2, 6), lambda x: x.reshape(4, 3), (4, 3)),
    *(
        _one("reshape", case, have, lambda x, want=want: x.reshape(want), want)
        for case, have, want in _RESHAPES
    ),
    *_moved("transpose", "rank 3", (2, 3, 4), lambda x: x.transpose(1, 2, 0), (1, 2, 0)),
    *(
        _one("transpose", case, shape, lambda x, p=order: x.transpose(p), order)
        for case, shape, order in _TRANSPOSES
    ),
    *_moved(
        "broadcast_in_dim",
        "a new dimension, and one repeated",
        (3, 1),
        _broadcast((2, 3, 4), (1, 2)),
        (2, 3, 4),
        (1, 2),
    ),
    *(
        _one("broadcast_in_dim", case, have, _broadcast(want, dims), want, dims)
        for case, have, want, dims in _BROADCASTS
    ),
    *_moved("broadcast", "rows", (3,), lambda x: np.broadcast_to(x, (2, 3)), (2, 3)),
    _one("broadcast", "rank 0", (), lambda x: np.broadcast_to(x, (2,)), (2,)),
    *_joined("columns", 1, (2, 3), (2, 1), (2, 2)),
    _joined("a part without elements", 0, (2, 3), (0, 3), (1, 3))[0],
    _joined("one part with elements", 0, (0, 3), (2, 3))[0],
    _joined("no elements", 0, (0, 3), (0, 3))[0],
    _joined("one value", -1, (2, 3))[0],
    _joined("rank 6", 2, (2, 1, 2, 2, 1, 2), (2, 1, 3, 2, 1, 2))[0],
    *_moved("reverse", "two dimensions", (2, 3, 2), lambda x: x[::-1, :, ::-1], (0, 2)),
    _one("reverse", "none", (2, 3), lambda x: x, ()),
    _one("reverse", "rank 0", (), lambda x: x, ()),
    _one("reverse", "no elements", (0, 3), lambda x: x, (0,)),
    _one("reverse", "rank 6", (2, 1, 2, 2, 1, 2), lambda x: x[:, :, ::-1], (2,)),
    *_iota("vector", (5,), 0, NUMBERS),
    *_iota("matrix", (3, 4), 1, ("float32", "uint8")),
    *_iota("more than 8 bits hold", (300,), 0, ("int8", "uint8", "float16")),
    *_iota("large", (2, 70, 50), 1, ("float32", "int16", "uint32")),
    *_iota("rank 6", (2, 1, 3, 1, 2, 2), 2, ("float32",)),
    *_iota("large, rank 6", (20, 2, 3, 10, 2, 4), 3, ("int8",)),
    Sample("constant", "rank 6", lambda b: b.constant(_RANK_6), (), _RANK_6),
    *_iota("no elements", (0, 2), 1, ("int32",)),
    *_moved("identity", "matrix", (2, 3), lambda x: x),
    _one("identity", "rank 0", (), lambda x: x),
    *(_several(dtype) for dtype in ALL),
    *_moved("get_dimension_size", "last", (2, 3), lambda x: np.int32(3), -1),
    _one("get_dimension_size", "of no elements", (0, 3), lambda x: np.int32(0), 0),
    *_moved("expand_dims", "two", (2, 3), lambda x: x[None, :, None], (0, 2)),
    _one("expand_dims", "of rank 0", (), lambda x: x[None], 0),
    *_moved("squeeze", "one", (1, 2, 1), lambda x: x[0], 0),
    _one("squeeze", "all", (1, 2, 1), lambda x: x[0, :, 0]),
    _one("squeeze", "to rank 0", (1,), lambda x: x[0], 0),
    *_dynamic(),
]
