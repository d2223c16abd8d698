"""Cases with sizes that are known at run time only."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph.gomlx.case import called, case, counted, f32, i32


def _sizes(b: Any, x: Any) -> list[Any]:
    return [b.get_dimension_size(x, axis) for axis in range(x.rank)]


def _vector(b: Any, *sizes: Any) -> Any:
    return b.concatenate([b.reshape(size, (1,)) for size in sizes], 0)


def _flat(b: Any, x: Any) -> Any:
    rows, columns = _sizes(b, x)
    return b.dynamic_reshape(x, _vector(b, b.multiply(rows, columns)))


def _rest_inferred(b: Any, x: Any) -> Any:
    rows, columns, depth = _sizes(b, x)
    return b.dynamic_reshape(x, _vector(b, columns, b.multiply(rows, depth)))


def _repeated_constant(b: Any, x: Any) -> Any:
    rows = b.get_dimension_size(x, 0)
    return b.dynamic_broadcast_in_dim(
        b.constant(i32([[10, 20, 30]])), _vector(b, rows, b.constant(3)), (0, 1)
    )


def _repeated(b: Any, x: Any) -> Any:
    rows = b.get_dimension_size(x, 0)
    return b.dynamic_broadcast_in_dim(x, _vector(b, rows, b.constant(2)), (0,))


def _numbered(b: Any, x: Any) -> Any:
    rows = b.get_dimension_size(x, 0)
    return b.dynamic_iota("int32", _vector(b, rows, b.constant(3)), 1)


def _padded(b: Any, x: Any, low: Any) -> Any:
    zero, one = b.constant(0), b.constant(1)
    return b.dynamic_pad(
        x,
        b.constant(0.0),
        _vector(b, low, one),
        _vector(b, one, zero),
        _vector(b, zero, zero),
    )


def _shape_and_size(b: Any, x: Any) -> Any:
    return b.get_dimension_size(x, 0), _vector(b, *_sizes(b, x))


def _dense(b: Any, x: Any) -> Any:
    weight = b.constant(f32([[1, 3, 5], [2, 4, 6]]))
    return b.dense(x, weight, b.constant(f32([10, 20])), activation="relu")


_COUNTED = counted(np.int32, 2, 3, 4, first=1)

CASES = [
    case(
        "BinaryOps/Add/DynamicShapesBroadcasting/Dim1Broadcast",
        "add",
        [f32([[10], [20]]), counted(np.float32, 2, 4, first=1)],
        f32([[11, 12, 13, 14], [25, 26, 27, 28]]),
        shapes=[("rows", 1), ("rows", 4)],
    ),
    case(
        "BinaryOps/Add/DynamicShapesBroadcasting/ScalarBroadcast",
        "add",
        [f32(10), counted(np.float32, 2, 3, first=1)],
        f32([[11, 12, 13], [14, 15, 16]]),
        shapes=[(), ("rows", 3)],
    ),
    case(
        "SpecialOps/DynamicReshape/ExplicitDynamicValues",
        _flat,
        [counted(np.int32, 2, 3, first=1)],
        i32([1, 2, 3, 4, 5, 6]),
        shapes=[("batch", "length")],
        more=[
            (
                [i32([[10, 20], [30, 40], [50, 60], [70, 80]])],
                [np.arange(1, 9, dtype=np.int32) * 10],
            )
        ],
    ),
    case(
        "SpecialOps/DynamicReshape/MixedDynamicAndInferred",
        _rest_inferred,
        [_COUNTED],
        _COUNTED.reshape(3, 8),
        shapes=[("batch", "length", 4)],
    ),
    case(
        "SpecialOps/DynamicBroadcastInDim/BroadcastStaticToDynamic",
        _repeated_constant,
        [i32([[1], [2]])],
        i32([[10, 20, 30]] * 2),
        shapes=[("batch", 1)],
        more=[([i32([[1], [2], [3]])], [i32([[10, 20, 30]] * 3)])],
    ),
    case(
        "SpecialOps/DynamicBroadcastInDim/BroadcastDynamicOperandPreservingAxis",
        _repeated,
        [i32([5, 6])],
        i32([[5, 5], [6, 6]]),
        shapes=[("batch",)],
        more=[([i32([1, 2, 3])], [i32([[1, 1], [2, 2], [3, 3]])])],
    ),
    case(
        "SpecialOps/DynamicIota",
        _numbered,
        [np.zeros((2, 1), np.float32)],
        i32([[0, 1, 2]] * 2),
        shapes=[("batch", 1)],
        about="the size of a tensor",
        more=[([np.zeros((4, 1), np.float32)], [i32([[0, 1, 2]] * 4)])],
    ),
    case(
        "SpecialOps/Reduce/DynamicShapeReduction",
        called("reduce_sum", (1,)),
        [np.repeat(f32([[1, 2, 3], [4, 5, 6]]), 4).reshape(2, 3, 4)],
        f32([[6] * 4, [15] * 4]),
        shapes=[("batch", "length", 4)],
    ),
    case(
        "SpecialOps/Concatenate/DynamicNonConcatAxis",
        lambda b, x, y: b.concatenate([x, y], 1),
        [f32([[1, 2], [3, 4]]), f32([[10, 20, 30], [40, 50, 60]])],
        f32([[1, 2, 10, 20, 30], [3, 4, 40, 50, 60]]),
        shapes=[("batch", 2), ("batch", 3)],
    ),
    case(
        "SpecialOps/Slice/DynamicShapeFullAxis",
        lambda b, x: b.slice(x, (0, 0), (x.shape[0], 2)),
        [counted(np.float32, 2, 3, first=1)],
        f32([[1, 2], [4, 5]]),
        shapes=[("batch", 3)],
    ),
    case(
        "DynamicShapeOps",
        _shape_and_size,
        [np.zeros((2, 3), np.float32)],
        i32(2),
        i32([2, 3]),
        shapes=[("batch", 3)],
        more=[([np.zeros((4, 3), np.float32)], [i32(4), i32([4, 3])])],
    ),
    case(
        "DenseDynamic",
        _dense,
        [counted(np.float32, 2, 3, first=1)],
        f32([[32, 48], [59, 84]]),
        shapes=[("batch", 3)],
        more=[([f32([[1, 0, 1]])], [f32([[16, 28]])])],
    ),
]
