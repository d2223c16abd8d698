"""Cases of operations that move elements: reshape, transpose, broadcast, slice, gather, scatter."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph.gomlx.case import called, case, counted, f16, f32, i8, i32, i64, u8

_THREES_AND_FIVES = f16([[[3, 3], [5, 5]], [[3, 3], [5, 5]]])
_GRID = counted(np.int32, 3, 3)
_FIVE = counted(np.int64, 5)

_MOVED = [
    case("SpecialOps/Identity", "identity", [f16(7)], f16(7), about="with float16"),
    case(
        "SpecialOps/Reshape",
        called("reshape", (2, 2)),
        [i32([42, 0, 1, 2])],
        i32([[42, 0], [1, 2]]),
    ),
    case(
        "SpecialOps/Reverse",
        called("reverse", (0, 1)),
        [f32([[1, 2], [3, 4]])],
        f32([[4, 3], [2, 1]]),
    ),
    case(
        "SpecialOps/Transpose",
        called("transpose", (2, 0, 1)),
        [counted(np.float32, 2, 3, 4)],
        f32(
            [
                [[0, 4, 8], [12, 16, 20]],
                [[1, 5, 9], [13, 17, 21]],
                [[2, 6, 10], [14, 18, 22]],
                [[3, 7, 11], [15, 19, 23]],
            ]
        ),
    ),
    case("SpecialOps/Iota", called("iota", "int8", (2, 3), 1), [], i8([[0, 1, 2]] * 2)),
    case(
        "SpecialOps/Iota",
        called("iota", "float16", (2, 3), 0),
        [],
        f16([[0] * 3, [1] * 3]),
        about="of halves",
    ),
    case(
        "SpecialOps/BroadcastInDim/Scalar",
        called("broadcast_in_dim", (2,), ()),
        [f16(42)],
        f16([42, 42]),
        about="with float16",
    ),
    case(
        "SpecialOps/BroadcastInDim/Prefix",
        called("broadcast_in_dim", (2, 3, 2), (0, 2)),
        [i8([[1, 3]])],
        i8([[[1, 3]] * 3] * 2),
    ),
    case(
        "SpecialOps/BroadcastInDim/Interspaced",
        called("broadcast_in_dim", (2, 2, 2), (1,)),
        [f16([3, 5])],
        _THREES_AND_FIVES,
    ),
]


def _joined(dimension: int) -> Any:
    return lambda b, *values: b.concatenate(values, dimension)


_JOINED = [
    case(
        "SpecialOps/Concatenate",
        _joined(0),
        [f32([1, 2, 3]), f32([4, 5])],
        f32([1, 2, 3, 4, 5]),
        about="vectors",
    ),
    case(
        "SpecialOps/Concatenate",
        _joined(0),
        [i8([[1, 2], [3, 4]]), i8([[5, 6]])],
        i8([[1, 2], [3, 4], [5, 6]]),
        about="rows",
    ),
    case(
        "SpecialOps/Concatenate",
        _joined(1),
        [f16([[1], [2]]), f16([[3, 4], [5, 6]]), f16([[7], [8]])],
        f16([[1, 3, 4, 7], [2, 5, 6, 8]]),
        about="columns, with float16",
    ),
]

_PARTS = [
    case("SpecialOps/Slice/Simple1D", called("slice", (1,), (4,), (1,)), [_FIVE], i64([1, 2, 3])),
    case(
        "SpecialOps/Slice/2DWithStride",
        called("slice", (0, 0), (3, 3), (2, 2)),
        [_GRID],
        i32([[0, 2], [6, 8]]),
    ),
    case(
        "SpecialOps/Slice/2DWithStart",
        called("slice", (0, 1), (3, 3), (1, 1)),
        [_GRID],
        i32([[1, 2], [4, 5], [7, 8]]),
    ),
    case("SpecialOps/Slice/EmptySlice", called("slice", (2,), (2,), (1,)), [_FIVE], i64([])),
    case(
        "SpecialOps/Slice/EmptySliceMultipleDimensions",
        called("slice", (0, 1), (2, 1), (1, 1)),
        [counted(np.int64, 2, 3)],
        np.zeros((2, 0), np.int64),
    ),
    case(
        "PadNegative",
        lambda b, x: b.pad(x, b.constant(0.0), (-1,), (-1,)),
        [f32([10, 20, 30, 40, 50])],
        f32([20, 30, 40]),
    ),
    case(
        "PadNegativeAndPositive2D",
        lambda b, x: b.pad(x, b.constant(99), (-1, 1), (1, -1)),
        [counted(np.int32, 3, 3, first=1)],
        i32([[99, 4, 5], [99, 7, 8], [99, 99, 99]]),
    ),
]


def _gathered(b: Any, indices: Any) -> Any:
    numbers = b.reshape(b.iota("float32", (48,), 0), (4, 3, 2, 2))
    return b.gather(
        numbers,
        indices,
        offset_dims=(1, 3),
        collapsed_slice_dims=(0, 2),
        start_index_map=(0, 2, 3),
        index_vector_dim=1,
        slice_sizes=(1, 3, 1, 1),
    )


def _scattered(body: str, *inserted: int) -> Any:
    return called(
        "scatter",
        body,
        update_window_dims=(0,),
        inserted_window_dims=inserted,
        scatter_dims_to_operand_dims=inserted,
        index_vector_dim=1,
        indices_are_sorted=True,
        unique_indices=True,
    )


_CORNERS = u8([[0, 1], [1, 0]])
_UPDATES = counted(np.float32, 5, 2, first=1)

_INDEXED = [
    case(
        "SpecialOps/Gather",
        _gathered,
        [i32([[[0, 1]] * 3, [[0, 0], [0, 0], [1, 1]], [[0, 0], [1, 1], [0, 0]]])],
        f32(
            [
                [[[0], [15]], [[4], [19]], [[8], [23]]],
                [[[1], [1]], [[5], [5]], [[9], [9]]],
                [[[2], [2]], [[6], [6]], [[10], [10]]],
            ]
        ),
    ),
    case(
        "SpecialOps/Scatter",
        _scattered("max", 0, 1),
        [np.zeros((2, 2, 5), np.float32), _CORNERS, _UPDATES],
        f32([[[0] * 5, [1, 3, 5, 7, 9]], [[2, 4, 6, 8, 10], [0] * 5]]),
        about="the largest",
    ),
    case(
        "SpecialOps/Scatter",
        _scattered("min", 0, 1),
        [np.full((2, 2, 5), 4, np.float32), _CORNERS, _UPDATES],
        f32([[[4] * 5, [1, 3, 4, 4, 4]], [[2, 4, 4, 4, 4], [4] * 5]]),
        about="the smallest",
    ),
    case(
        "SpecialOps/Scatter",
        _scattered("add", 0, 2),
        [np.ones((2, 5, 2), np.float32), _CORNERS, _UPDATES],
        f32(
            [
                [[1, 2], [1, 4], [1, 6], [1, 8], [1, 10]],
                [[3, 1], [5, 1], [7, 1], [9, 1], [11, 1]],
            ]
        ),
        about="sums",
    ),
]

CASES = [*_MOVED, *_JOINED, *_PARTS, *_INDEXED]
