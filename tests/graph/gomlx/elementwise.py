"""Cases of operations on each element: arithmetic, functions, bits, comparisons, conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph.gomlx.case import Case, called, case, f16, f32, flags, i8, i32, u8, u32

_FACTORS = np.repeat([0.4026, 0.383, 0.3614, 0.04446, 0.2288, 0.0327, 0.199, 0.03168], 8)
_SQUARES = np.repeat([0.1621, 0.1467, 0.1306, 0.001977, 0.05235, 0.001069, 0.0396, 0.001004], 8)
_FIVES = np.full((2, 2), 5, np.uint64)
_ROWS = np.array([[1, 2], [3, 4]], np.uint64)

_BINARY = [
    case("BinaryOps/Add", "add", [f16(7), f16(11)], f16(18), about="rank 0, with float16"),
    case("BinaryOps/Add", "add", [i32([-1, 2]), i32([1])], i32([0, 3]), about="a size of 1"),
    case("BinaryOps/Add", "add", [i32([[-1], [2]]), i32(-1)], i32([[-2], [1]]), about="rank 0"),
    case("BinaryOps/Add", "add", [_ROWS, _ROWS[::-1, ::-1]], _FIVES, about="equal shapes"),
    case(
        "BinaryOps/Add",
        "add",
        [i32([[-1], [2], [5]]), i32([[10, 100]])],
        i32([[9, 99], [12, 102], [15, 105]]),
        about="sizes of 1 on both sides",
    ),
    case("BinaryOps/Mul/SimpleWithBroadcast", "multiply", [f32([1, 2, 3]), f32(2)], f32([2, 4, 6])),
    case(
        "BinaryOps/Mul/Large-2D",
        "multiply",
        [_FACTORS.reshape(8, 8)] * 2,
        _SQUARES.reshape(8, 8),
        tolerance=(0.0, 1e-2),
    ),
    case("BinaryOps/Sub", "subtract", [f16(7), f16(11)], f16(-4), about="with float16"),
    case(
        "BinaryOps/Div",
        "divide",
        [i32([[-6, 9], [12, 15]]), i32([[2, 3], [4, 5]])],
        i32([[-3, 3], [3, 3]]),
    ),
    case("BinaryOps/Rem", "remainder", [i32([7, 9]), i32([4])], i32([3, 1])),
    case("BinaryOps/Pow", "power", [i32([2, 3]), i32([2])], i32([4, 9])),
    case("BinaryOps/Max", "maximum", [i32([-1, 2]), i32([0])], i32([0, 2])),
    case("BinaryOps/Min", "minimum", [i32([-1, 2]), i32([0])], i32([-1, 0])),
]


def _bitwise(test: str, operation: str, wanted: int, logical: list[bool]) -> list[Case]:
    x, y = flags([True, False]), flags([True, True])
    return [
        case(f"BinaryOps/Logical/{test}", operation, [x, y], flags(logical)),
        case(f"BinaryOps/Bitwise/{test}", operation, [u8(0b11110000), u8(0b10101010)], u8(wanted)),
    ]


def _compared(test: str, operation: str, x: float, y: float) -> Case:
    return case(f"BinaryOps/Comparison/{test}", operation, [f32(x), f32(y)], flags(True))


def _function(test: str, operation: str, x: float, y: float, absolute: float = 1e-6) -> Case:
    return case(f"UnaryOps/{test}", operation, [f32(x)], f32(y), tolerance=(absolute, 0.0))


_UNARY = [
    case("UnaryOps/Neg", "negate", [f32(7)], f32(-7), about="float32"),
    case("UnaryOps/Neg", "negate", [i32([-1, 2])], i32([1, -2]), about="int32"),
    case("UnaryOps/Neg", "negate", [f16([-7, 13, 0])], f16([7, -13, 0]), about="float16"),
    case("UnaryOps/Abs", "abs", [f32(-7)], f32(7)),
    case("UnaryOps/Sign", "sign", [i32([-1, 0, 2])], i32([-1, 0, 1])),
    case("UnaryOps/LogicalNot", "not_", [flags([True, False, True])], flags([False, True, False])),
    case("UnaryOps/BitwiseNot", "not_", [i32(7)], i32(-8)),
    case("UnaryOps/BitCount", "popcnt", [i8(7)], i8(3)),
    case("UnaryOps/Clz", "count_leading_zeros", [i8(7)], i8(5)),
    _function("Exp", "exponential", 1.0, np.e),
    _function("Expm1", "exponential_minus_one", 1.0, 1.71828, 1e-4),
    _function("Log", "log", np.e, 1.0),
    _function("Log1p", "log_plus_one", np.e - 1, 1.0),
    _function("Ceil", "ceil", 1.6, 2.0, 0.0),
    _function("Floor", "floor", 1.6, 1.0, 0.0),
    _function("Round", "round_nearest_even", 1.6, 2.0, 0.0),
    _function("Rsqrt", "rsqrt", 4.0, 0.5),
    _function("Sqrt", "sqrt", 4.0, 2.0),
    _function("Cos", "cosine", 0.0, 1.0),
    _function("Sin", "sine", np.pi / 2, 1.0),
    _function("Tanh", "tanh", 0.0, 0.0),
    _function("Logistic", "logistic", 0.0, 0.5),
    case("UnaryOps/IsFinite", "is_finite", [f32(1)], flags(True)),
    _function("Erf", "erf", 1.0, 0.8427, 1e-4),
]


def _converted(x: Any, y: Any, about: str) -> Case:
    build = called("convert", np.asarray(y).dtype)
    return case("ConvertDType/ConvertDType", build, [x], y, about=about, tolerance=(0.02, 0.0))


_CONVERSIONS = [
    _converted(i32(42), f32(42), "int32 to float32"),
    _converted(f32(3.14), f16(3.14), "float32 to half precision"),
    _converted(f16(7.8), i32(7), "half precision to int32"),
    _converted(flags(True), i32(1), "bool to int32"),
    _converted(f32(1), flags(True), "float32 to bool"),
]

_OTHERS = [
    case(
        "Bitcast/Uint32ToFloat32",
        called("bitcast_convert", "float32"),
        [u32([0x3F800000])],
        f32([1]),
    ),
    case(
        "SpecialOps/Where",
        "select",
        [flags(True), f16(7), f16(11)],
        f16(7),
        about="all of rank 0, with float16",
    ),
    case(
        "SpecialOps/Where",
        "select",
        [flags(False), u8([1, 2]), u8([11, 12])],
        u8([11, 12]),
        about="a predicate of rank 0",
    ),
    case(
        "SpecialOps/Where",
        "select",
        [flags([True, False]), i32(1), i32(0)],
        i32([1, 0]),
        about="values of rank 0",
    ),
    case(
        "SpecialOps/Where",
        "select",
        [flags([False, True, True]), f32([1, 2, 3]), f32([101, 102, 103])],
        f32([101, 2, 3]),
        about="equal shapes",
    ),
]

CASES = [
    *_BINARY,
    *_bitwise("And", "and_", 0b10100000, [True, False]),
    *_bitwise("Or", "or_", 0b11111010, [True, True]),
    *_bitwise("Xor", "xor", 0b01011010, [False, True]),
    _compared("Equal", "equal", 1.5, 1.5),
    _compared("GreaterOrEqual", "greater_equal", 2.5, 1.5),
    _compared("GreaterThan", "greater", 2.5, 1.5),
    _compared("LessOrEqual", "less_equal", 1.0, 2.0),
    _compared("LessThan", "less", 1.5, 2.5),
    *_UNARY,
    *_CONVERSIONS,
    *_OTHERS,
]
