"""Calls of logical and bitwise ops, and of choices by a condition."""

from __future__ import annotations

from ops.op_samples.sample import accept, b, i, reject, x

from coreml_delegate.ops import ReasonCode

_BITWISE = ("and", "or", "xor")

# Beyond 2**24, where fp32 has gaps, and fp16 long has no values.
_WHOLE = i(values=[7, -7, 16777217, -2147483647])

ACCEPTED = (
    accept("aten.logical_not.default", b(2, 3)),
    *(accept(f"aten.logical_{op}.default", b(2, 3), b(3)) for op in ("and", "or", "xor")),
    accept("aten.bitwise_and.Tensor", b(2, 3), b(3)),
    accept("aten.bitwise_not.default", b(2, 3)),
    accept("aten.where.self", b(2, 3), x(2, 3), x(3), note="float"),
    accept("aten.where.self", b(2, 1), i(2, 3), i(2, 3), note="int64"),
    accept("aten.where.self", b(2, 1), b(2, 3), b(2, 3), note="bool"),
    accept("aten.where.self", b(2, 3), x(2, 3), x(), note="rank0"),
    accept("aten.where.self", b(), x(), x(), note="scalars"),
    accept("aten.masked_fill.Scalar", x(), b(), 0.5, note="scalars"),
    accept("aten.logical_and.default", b(), b(), note="scalars"),
    accept("aten.masked_fill.Scalar", x(2, 3), b(2, 3), -0.5),
    accept("aten.masked_fill.Scalar", x(2, 3), b(3), float("-inf"), note="inf"),
    accept("aten.masked_fill.Scalar", x(2, 3), b(3), 1, note="int"),
    accept("aten.where.self", b(2, 3), x(2, 3), i(2, 3), note="mixed"),
    accept("aten.logical_not.default", x(values=[0.0, 1.0, -0.5]), note="float"),
    *(accept(f"aten.bitwise_{op}.Tensor", b(2, 3), b(3)) for op in ("or", "xor")),
    accept("aten.bitwise_not.default", _WHOLE, note="int64"),
    *(accept(f"aten.bitwise_{op}.Scalar", b(2, 3), True, note="bool") for op in _BITWISE),
    *(accept(f"aten.bitwise_{op}.Scalar", b(2, 3), 6, note="bool-int") for op in _BITWISE),
    accept("aten.masked_fill.Scalar", i(2, 3), b(2, 3), -4, note="int64"),
    accept("aten.masked_fill.Scalar", x(3), b(2, 3), 1.5, note="broadcast"),
    *(
        accept(f"aten.logical_{op}.default", x(2, 3), i(2, 3), note="numbers")
        for op in ("and", "or", "xor")
    ),
    *(
        accept(f"aten.bitwise_{op}.Scalar", _WHOLE, mask, note=f"{mask}")
        for op in _BITWISE
        for mask in (0, 1, 15, 0b1011000, 2**30 - 1, -1, -8, -(2**30))
    ),
)

REJECTED = (
    *(
        reject(
            ReasonCode.ARGUMENT,
            "remainders of int32",
            f"aten.bitwise_{op}.Scalar",
            i(2, 3),
            2**30,
        )
        for op in _BITWISE
    ),
)
