"""Cases of reductions: running sums, reductions of axes and of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from graph.gomlx.case import Case, called, case, counted, f16, f32, f64, flags, i32, i64, u8, u32


def _summed(axis: int, *, reverse: bool = False, exclusive: bool = False) -> Callable[..., Any]:
    def build(b: Any, x: Any) -> Any:
        total = b.cumulative_sum(x, axis, reverse=reverse)
        return b.subtract(total, x) if exclusive else total

    return build


def _running(
    test: str, x: np.ndarray, axis: int, wanted: Sequence[Any], exclusive: bool, reverse: bool
) -> Case:
    """Return a case; ours has no exclusive sums, which lack the element itself."""
    kinds = [word for word, is_so in (("exclusive", exclusive), ("reverse", reverse)) if is_so]
    build = _summed(axis, reverse=reverse, exclusive=exclusive)
    about = " ".join([f"axis {axis}", *kinds])
    return case(f"SpecialOps/CumSum/{test}", build, [x], np.array(wanted, x.dtype), about=about)


_FOUR = i32([1, 2, 3, 4])
_SIX = counted(np.float32, 2, 3, first=1)
_RUNNING = [
    _running("1D_Int32", _FOUR, 0, [1, 3, 6, 10], False, False),
    _running("1D_Int32", _FOUR, 0, [0, 1, 3, 6], True, False),
    _running("1D_Int32", _FOUR, 0, [10, 9, 7, 4], False, True),
    _running("1D_Int32", _FOUR, 0, [9, 7, 4, 0], True, True),
    _running("2D_Float32", _SIX, 1, [[1, 3, 6], [4, 9, 15]], False, False),
    _running("2D_Float32", _SIX, 0, [[1, 2, 3], [5, 7, 9]], False, False),
    _running("2D_Float32", _SIX, 1, [[0, 1, 3], [0, 4, 9]], True, False),
    _running("2D_Float32", _SIX, 0, [[0, 0, 0], [1, 2, 3]], True, False),
    _running("2D_Float32", _SIX, 1, [[6, 5, 3], [15, 11, 6]], False, True),
    _running("2D_Float32", _SIX, 0, [[5, 7, 9], [4, 5, 6]], False, True),
    _running("2D_Float32", _SIX, 1, [[5, 3, 0], [11, 6, 0]], True, True),
    _running("2D_Float32", _SIX, 0, [[4, 5, 6], [0, 0, 0]], True, True),
    _running(
        "3D_Int64",
        counted(np.int64, 2, 2, 2, first=1),
        1,
        [[[1, 2], [4, 6]], [[5, 6], [12, 14]]],
        False,
        False,
    ),
    _running("1D_Float16", f16([1, 2, 3]), 0, [1, 3, 6], False, False),
    _running("1D_BFloat16", f16([1, 2, 3]), 0, [0, 1, 3], True, False),
]


def _reduced(
    test: str,
    operation: str,
    x: np.ndarray,
    axes: Sequence[int],
    wanted: np.ndarray,
    tolerance: tuple[float, float] | None = None,
    about: str = "",
) -> Case:
    build = called(operation, tuple(axes))
    return case(f"SpecialOps/{test}", build, [x], wanted, tolerance=tolerance, about=about)


_MIXED = flags([[True, False], [True, True]])
_FLAGGED = flags([[True, False], [False, False]])
_COLUMN = [[3], [12], [17]]
_REDUCED = [
    _reduced(
        "Reduce/Min",
        "reduce_min",
        f32([[7, 0, 9], [0, 3, 2], [1001, 101, 11]]),
        [1],
        f32([0, 0, 11]),
    ),
    _reduced("Reduce/Max", "reduce_max", f64([-1e8, -1e6, -1e16]), [0], f64(-1e6)),
    _reduced(
        "Reduce/Sum",
        "reduce_sum",
        counted(np.uint32, 2, 2, 2, 2, 2),
        [1, 3],
        u32([[[20, 24], [36, 40]], [[84, 88], [100, 104]]]),
    ),
    _reduced(
        "Reduce/Product", "reduce_product", f32([-1e-2, 1e5, -1e-3]), [0], f32(1), (1e-3, 0.0)
    ),
    _reduced(
        "Reduce/MinBFloat16", "reduce_min", f16([-11, -17, -8]), [0], f16(-17), about="with float16"
    ),
    _reduced(
        "Reduce/SumFullReduction",
        "reduce_sum",
        f16([[-11, -17], [8, 21]]),
        [0, 1],
        f16(1),
        about="with float16",
    ),
    _reduced("ReduceBitwise", "reduce_and", i32([7, 3, 2]), [0], i32(2), about="and"),
    _reduced("ReduceBitwise", "reduce_or", u8(_COLUMN), [0, 1], u8(31), about="or"),
    _reduced("ReduceBitwise", "reduce_xor", i64(_COLUMN), [0], i64([30]), about="xor"),
    _reduced("ReduceLogical", "reduce_and", _MIXED, [1], flags([False, True]), about="and"),
    _reduced("ReduceLogical", "reduce_or", _FLAGGED, [0], flags([True, False]), about="or"),
    _reduced("ReduceLogical", "reduce_xor", _MIXED, [1], flags([True, False]), about="xor"),
    case(
        "SpecialOps/ArgMinMax",
        called("arg_min", 0, "int32"),
        [f32([3, 1, 4, 1, 5])],
        i32(1),
        about="the first of equal ones",
    ),
    case(
        "SpecialOps/ArgMinMax",
        called("arg_max", 1, "int32"),
        [i32([[1, 2, 3], [4, 1, 2], [7, 8, 5]])],
        i32([2, 0, 1]),
        about="of rows",
    ),
]


def _window(body: str, start: float, **keywords: Any) -> Callable[..., Any]:
    def build(b: Any, x: Any) -> Any:
        return b.reduce_window(x, b.constant(f32(start)), getattr(b, body), **keywords)

    return build


_SEVEN = counted(np.float32, 7, first=1)
_WINDOWS = [
    case(
        "SpecialOps/ReduceWindow/F32_1D_Sum_Win2_Stride1",
        _window("add", 0, window=(2,), strides=(1,)),
        [_SEVEN[:5]],
        f32([3, 5, 7, 9]),
    ),
    case(
        "SpecialOps/ReduceWindow/F32_1D_Product_Win2_Stride2_Pad1_1",
        _window("multiply", 1, window=(2,), strides=(2,), padding=((1, 1),)),
        [_SEVEN[:4]],
        f32([1, 6, 4]),
    ),
    case(
        "SpecialOps/ReduceWindow/F32_1D_Max_Win3_WindowDilation2",
        _window("maximum", -np.inf, window=(3,), strides=(1,), window_dilation=(2,)),
        [_SEVEN],
        f32([5, 6, 7]),
    ),
    case(
        "SpecialOps/ReduceWindow/F32_1D_Max_Win3_InputDilation2",
        _window(
            "maximum", -np.inf, window=(3,), strides=(1,), base_dilation=(2,), padding=((1, 1),)
        ),
        [_SEVEN],
        f32([1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]),
    ),
]


def _selected(
    test: str,
    select: str,
    x: Any,
    source: Any,
    wanted: Any,
    window: tuple[int, ...],
    strides: tuple[int, ...],
) -> Case:
    def build(b: Any, x: Any, source: Any) -> Any:
        return b.select_and_scatter(
            x,
            source,
            b.constant(0.0),
            getattr(b, select),
            b.add,
            window=window,
            strides=strides,
        )

    name = f"SpecialOps/SelectAndScatter/{test}"
    return case(name, build, [f32(x), f32(source)], f32(wanted))


_SELECTED = [
    _selected(
        "Max/F32_1D_Max_Win3_Stride2",
        "greater_equal",
        [1, 5, 2, 8, 3],
        [10, 20],
        [0, 10, 0, 20, 0],
        (3,),
        (2,),
    ),
    _selected(
        "Max/F32_1D_Max_TieBreaker_FirstIndex",
        "greater_equal",
        [5, 5, 1, 2],
        [10, 20, 30],
        [10, 20, 0, 30],
        (2,),
        (1,),
    ),
    _selected(
        "Max/F32_1D_Max_Overlapping_Accumulation",
        "greater_equal",
        [1, 10, 2],
        [5, 7],
        [0, 12, 0],
        (2,),
        (1,),
    ),
    _selected(
        "Max/F32_2D_Max_Win2x2_Stride1x1",
        "greater_equal",
        [[1, 3], [2, 4]],
        [[10]],
        [[0, 0], [0, 10]],
        (2, 2),
        (1, 1),
    ),
    _selected(
        "Min/F32_1D_Min_Win3_Stride2",
        "less_equal",
        [5, 1, 8, 2, 9],
        [10, 20],
        [0, 10, 0, 20, 0],
        (3,),
        (2,),
    ),
]

CASES = [*_RUNNING, *_REDUCED, *_WINDOWS, *_SELECTED]
