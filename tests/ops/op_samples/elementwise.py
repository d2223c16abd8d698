"""Calls of elementwise ops."""

from __future__ import annotations

import math

import torch
from ops.op_samples.sample import accept, b, i, reject, w, x

from coreml_delegate.ops import ReasonCode

_UNARY = {
    "abs": {},
    "ceil": {},
    "cos": {},
    "erf": {},
    "exp": {},
    "exp2": {},
    "floor": {},
    "log": {"low": 0.125},
    "neg": {},
    "reciprocal": {"low": 0.25},
    "round": {},
    "rsqrt": {"low": 0.25},
    "sin": {},
    "sqrt": {"low": 0.0},
    "acos": {"low": -0.9, "high": 0.9},
    "acosh": {"low": 1.0, "high": 9.0},
    "asin": {"low": -0.9, "high": 0.9},
    "asinh": {},
    "atan": {},
    "atanh": {"low": -0.9, "high": 0.9},
    "cosh": {},
    "sinh": {},
    "tan": {"low": -1.2, "high": 1.2},
    "sign": {},
    "log2": {"low": 0.125},
    "log10": {"low": 0.125},
    "log1p": {"low": -0.5},
    "expm1": {},
    "square": {},
}
_SCALARS = ("eq", "ne", "lt", "le", "gt", "ge")
_I32 = torch.int32
_PROMOTED = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default"),
    *("minimum.default", "remainder.Tensor"),
)
_NUMBERS = ("add", "sub", "rsub", "mul", "div", "remainder")

# Beyond 2**24, where fp32 has gaps, and fp16 long has no values.
_WHOLE = i(values=[7, -7, 16777217, -2147483647])

# All eight octants, the axes between them, and zeros of both signs.
_OCTANTS = (
    x(values=[1.0, 2.0, 2.0, 1.0, -1.0, -2.0, -2.0, -1.0, 0.0, 0.0, 1.0, -1.0, 0.0, -0.0, -0.0]),
    x(values=[2.0, 1.0, -1.0, -2.0, -2.0, -1.0, 1.0, 2.0, 3.0, -3.0, 0.0, 0.0, 0.0, -3.0, -0.0]),
)
_BY_49 = x(values=[49.0 * n for n in range(-9, 10)])
_BETWEEN = x(values=[0.25, 1.25, 2.5, -0.25, -1.75, 3.0])
_ONES = w(values=[1.0] * 6)

# Squares that fp16 has not, and ones that a sum with 1 has not.
_FAR = [65504.0, 3e4, 1500.0, 300.0, 1.0]
_NEAR = [1e-4, 1e-3, 0.05, 0.0]

_OF_TRUTHS = ("add.Tensor", "mul.Tensor", "maximum.default", "minimum.default")

ACCEPTED = (
    *(accept(f"aten.{op}.default", x(2, 3, 4, **o)) for op, o in _UNARY.items()),
    accept("aten.acosh.default", x(values=[*_FAR, 0.5, -3.0]), note="far-and-outside"),
    accept("aten.acosh.default", i(values=[1, 2, 300]), note="int64"),
    accept(
        "aten.asinh.default", x(values=[*_FAR, *(-n for n in _FAR), *_NEAR]), note="far-and-near"
    ),
    accept("aten.asinh.default", x(values=[math.inf, -math.inf]), note="infinite"),
    *(accept(f"aten.{op}.default", x(**o), note="rank0") for op, o in _UNARY.items()),
    *(
        accept(f"aten.{op}.default", x(1, 2, 1, 3, 2, **o), note="rank5")
        for op, o in _UNARY.items()
    ),
    *(accept(f"aten.{op}.default", i(2, 3), note="int64") for op in ("abs", "neg", "sign")),
    accept("aten.clamp.default", i(2, 3), -1, 2, note="int64"),
    accept("aten.clamp_min.default", i(2, 3), 2, note="int64"),
    accept("aten.clamp_max.default", i(2, 3), 2, note="int64"),
    accept("aten.round.default", x(values=[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]), note="ties"),
    accept("aten.sign.default", x(values=[-2.5, 0.0, 0.5]), note="zero"),
    accept("aten.log1p.default", x(values=[-0.5, 0.0, 1e-3]), note="small"),
    accept("aten.expm1.default", x(values=[-0.5, 0.0, 1e-3]), note="small"),
    *(
        accept(f"aten.{op}", x(2, 3, 4), x(3, 1, low=0.5), note="broadcast")
        for op in (
            "div.Tensor",
            "maximum.default",
            "minimum.default",
            "add.Tensor",
            "sub.Tensor",
            "mul.Tensor",
            "atan2.default",
            "remainder.Tensor",
            "floor_divide.default",
        )
    ),
    *(
        accept(f"aten.{op}", x(), x(2, 2, low=0.5), note="rank0")
        for op in ("div.Tensor", "maximum.default", "add.Tensor", "sub.Tensor", "mul.Tensor")
    ),
    *(
        accept(f"aten.{op}", x(), x(low=0.5), note="scalars")
        for op in ("div.Tensor", "maximum.default", "add.Tensor", "sub.Tensor", "mul.Tensor")
    ),
    *(
        accept(f"aten.{op}", i(2, 3), i(2, 3), note="int64")
        for op in ("maximum.default", "minimum.default", "add.Tensor", "sub.Tensor", "mul.Tensor")
    ),
    *(
        accept(f"aten.{op}", i(2, 3, dtype=_I32), i(2, 3, dtype=_I32), note="int32")
        for op in ("maximum.default", "minimum.default", "add.Tensor", "sub.Tensor", "mul.Tensor")
    ),
    *(accept(f"aten.{op}", i(2, 3), i(2, 3, low=1), note="int64") for op in ("remainder.Tensor",)),
    *(
        accept(f"aten.{op}", x(2, 3), x(2, 3, low=0.5), rounding_mode=m, note=m)
        for m in ("floor", "trunc")
        for op in ("div.Tensor_mode",)
    ),
    accept("aten.pow.Tensor_Tensor", x(2, 3, low=0.25), x(3), note="broadcast"),
    *(
        accept("aten.pow.Tensor_Scalar", x(2, 3, low=0.25), e, note=f"{e}")
        for e in (2, 0.5, -1, 3.0)
    ),
    accept("aten.pow.Tensor_Scalar", x(2, 3), 3, note="negative-base"),
    accept("aten.pow.Scalar", 2.0, x(2, 3), note="float"),
    accept("aten.pow.Scalar", 2, x(2, 3), note="int"),
    accept("aten.pow.Scalar", 3.0, x(2, 3), note="three"),
    accept("aten.pow.Tensor_Tensor", w(values=[[2.0], [2.0]]), x(3), note="twos"),
    accept("aten.rsub.Scalar", x(2, 3), 1.5),
    accept("aten.remainder.Scalar", x(2, 3), 0.75),
    accept("aten.remainder.Scalar", x(2, 3), -0.75, note="negative"),
    *(accept(f"aten.{op}.Scalar", x(2, 3), 2, note="int") for op in ("add", "sub", "mul", "div")),
    *(
        accept(f"aten.{op}.Scalar", x(2, 3), 0.75, note="float")
        for op in ("add", "sub", "mul", "div")
    ),
    *(
        accept(f"aten.{op}.Tensor", x(2, 3), 0.75, note="number")
        for op in ("add", "sub", "mul", "div")
    ),
    *(accept(f"aten.{op}.Tensor", i(2, 3), 3, note="number-int") for op in ("add", "sub", "mul")),
    accept("aten.clamp_min.default", x(2, 3), 0.25),
    accept("aten.clamp_max.default", x(2, 3), 0.25),
    accept("aten.clamp_max.default", x(2, 3), 1, note="int"),
    accept("aten.clamp.default", x(2, 3), -0.5, 0.25, note="both"),
    accept("aten.clamp.Tensor", x(2, 3), x(3), x(2, 1), note="both"),
    accept("aten.clamp.Tensor", x(2, 3), w(3), note="min"),
    accept("aten.clamp.Tensor", i(2, 3), None, i(2, 3), note="max of int64"),
    accept("aten.clamp.default", x(2, 3), 0.5, note="min"),
    accept("aten.clamp.default", x(2, 3), None, 0.5, note="max"),
    accept("aten.clamp.default", x(2, 3), -1, 1, note="ints"),
    accept("aten.clamp.Tensor", x(2, 3), x(2, 3, high=0.0), x(2, 3, low=0.0)),
    accept("aten.clamp.default", _WHOLE, -5, note="least", fp16=False),
    accept("aten.clamp.default", _WHOLE, None, 16777217, note="most", fp16=False),
    accept("aten.clamp.Tensor", _WHOLE, _WHOLE, note="least", fp16=False),
    accept("aten.clamp.Tensor", _WHOLE, None, _WHOLE, note="most", fp16=False),
    accept("aten.atan2.default", _OCTANTS[0], _OCTANTS[1], note="octants"),
    accept("aten.atan2.default", x(), x(), note="rank0"),
    accept("aten.remainder.Scalar", _BETWEEN, 1.0, note="one"),
    accept("aten.remainder.Tensor", _BETWEEN, _ONES, note="ones"),
    accept("aten.fmod.Scalar", _BETWEEN, 1.0, note="one"),
    accept("aten.floor_divide.default", _BETWEEN, _ONES, note="ones"),
    accept("aten.div.Scalar_mode", _BETWEEN, 1, rounding_mode="floor", note="one"),
    *(
        accept("aten.div.Scalar_mode", _BY_49, y, rounding_mode="trunc", note=f"by{y:.0f}")
        for y in (49.0, -49.0)
    ),
    *(accept(f"aten.{op}.Tensor", x(2, 3), x(3), note="float") for op in _SCALARS),
    *(accept(f"aten.{op}.Tensor", i(2, 3), i(2, 3), note="int64") for op in _SCALARS),
    *(accept(f"aten.{op}.Tensor", b(2, 3), b(2, 3), note="bool") for op in ("eq", "ne")),
    *(accept(f"aten.{op}.Scalar", x(2, 3), 0.5, note="float") for op in _SCALARS),
    *(accept(f"aten.{op}.Scalar", x(2, 3), 1, note="floatint") for op in _SCALARS),
    *(accept(f"aten.{op}.Scalar", i(2, 3), 1, note="int64") for op in _SCALARS),
    *(accept(f"aten.{op}.Scalar", i(2, 3, dtype=_I32), 1, note="int32") for op in _SCALARS),
    *(accept(f"aten.{op}.Scalar", i(2, 3), 0.5, note="int64float") for op in _SCALARS),
    accept("aten.clamp.Tensor", x(), x(high=0.0), x(low=0.0), note="scalars"),
    accept("aten.clamp.Tensor", x(2, 3), None, x(low=0.0), note="max"),
    accept("aten.gt.Tensor", x(), x(), note="scalars"),
    # Operands of several kinds, which PyTorch promotes.
    *(
        accept(f"aten.{op}", x(2, 3), i(2, 3, low=1), note="mixed")
        for op in (*_PROMOTED, *(f"{op}.Tensor" for op in _SCALARS))
    ),
    *(
        accept(f"aten.{op}", i(2, 3), x(3, low=0.5), note="mixed-second")
        for op in (*_PROMOTED, *(f"{op}.Tensor" for op in _SCALARS))
    ),
    *(
        accept(f"aten.{op}.Tensor", i(2, 3), i(2, 3, dtype=_I32), note="integers")
        for op in ("add", "mul", *_SCALARS)
    ),
    *(accept(f"aten.{op}.Tensor", b(2, 3), x(2, 3), note="bool") for op in ("add", "mul")),
    *(
        accept(f"aten.{op}.Tensor", b(2, 3), i(2, 3), note="bool-int64")
        for op in ("add", "mul", "lt")
    ),
    *(accept(f"aten.{op}.Scalar", i(2, 3), 0.5, note="int64float") for op in _NUMBERS),
    *(
        accept(f"aten.{op}.Scalar", i(2, 3), 2, note="int64")
        for op in ("add", "sub", "rsub", "mul")
    ),
    *(accept(f"aten.{op}.Scalar", b(2, 3), 2, note="bool") for op in ("add", "mul", *_SCALARS)),
    *(
        accept(f"aten.{op}.default", i(2, 3, low=1, high=6), note="int64")
        for op in ("cos", "erf", "exp", "log", "reciprocal", "rsqrt", "sin", "sqrt", "atan")
    ),
    accept("aten.sqrt.default", b(2, 3), note="bool"),
    *(accept(f"aten.{op}.Tensor", x(2, 3), x(3), alpha=2, note="alpha") for op in ("add", "sub")),
    *(
        accept(f"aten.{op}.Tensor", i(2, 3), i(3), alpha=3, note="alpha-int64")
        for op in ("add", "sub")
    ),
    *(accept(f"aten.{op}.Scalar", x(2, 3), 0.5, 2, note="alpha") for op in ("add", "sub", "rsub")),
    accept("aten.trunc.default", x(values=[-2.5, -1.0, -0.5, 0.0, 0.5, 2.5])),
    *(
        accept("aten.round.decimals", x(2, 3), decimals=d, note=f"{d}", fp16=False)
        for d in (2, 0, -1)
    ),
    accept("aten.isnan.default", x(values=[0.0, float("nan"), float("inf"), -1.0])),
    accept("aten.fmod.Tensor", x(values=[-2.5, 2.5, -2.5, 2.5]), x(values=[1.0, 1.0, -1.0, -1.0])),
    accept("aten.fmod.Tensor", i(2, 3), i(2, 3, low=1), note="int64"),
    accept("aten.fmod.Scalar", x(2, 3), -0.75),
    accept("aten.fmod.Scalar", i(2, 3), 3, note="int64"),
    *(
        accept("aten.div.Scalar_mode", x(2, 3), 0.75, rounding_mode=m, note=f"{m}")
        for m in ("floor", "trunc", None)
    ),
    accept("aten.div.Tensor_mode", x(2, 3), i(2, 3, low=1), rounding_mode="trunc", note="mixed"),
    accept("aten.div.Tensor", i(2, 3), i(2, 3, low=1), note="int64"),
    accept("aten.remainder.Scalar", i(2, 3), 3, note="int64"),
    accept("aten.floor_divide.default", i(2, 3), i(2, 3, low=1), note="int64"),
    *(
        accept("aten.div.Tensor_mode", _WHOLE, y, rounding_mode=m, note=f"int64-{m}-{y.values[0]}")
        for m in ("floor", "trunc")
        for y in (i(values=[7, 3, 2, 5]), i(values=[-7, -3, -2, -5]))
    ),
    *(
        accept("aten.div.Scalar_mode", _WHOLE, n, rounding_mode=m, note=f"int64-{m}-{n}")
        for m in ("floor", "trunc")
        for n in (3, -3)
    ),
    accept("aten.remainder.Scalar_Tensor", 7, i(2, 3, low=1), note="int64"),
    accept("aten.remainder.Scalar_Tensor", 2.5, x(2, 3, low=0.5)),
    *(accept("aten.pow.Tensor_Scalar", i(2, 3), e, note=f"int64-{e}") for e in (2, 3, 4)),
    accept("aten.pow.Tensor_Scalar", i(2, 3), 2.0, note="int64-float"),
    accept("aten.clamp.Tensor", i(2, 3), i(2, 3, high=0), i(2, 3, low=0), note="int64"),
    accept("aten.clamp.default", i(2, 3), -0.5, 1.5, note="int64-floats"),
    *(accept(f"aten.{op}", b(2, 3), b(3), note="truths") for op in _OF_TRUTHS),
    *(accept(f"aten.{op}.Tensor", b(2, 3), True, note="truths-number") for op in ("add", "mul")),
    accept("aten.isinf.default", x(values=[0.0, math.nan, math.inf, -math.inf, 65504.0])),
)

REJECTED = (
    reject(
        ReasonCode.ARGUMENT,
        "other=4294967296 is beyond int32, the widest of Core ML",
        "aten.gt.Scalar",
        i(2, 3),
        2**32,
        note="wide",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "other=-4294967296 is beyond int32, the widest of Core ML",
        "aten.add.Tensor",
        i(2, 3),
        -(2**32),
        note="wide",
    ),
    reject(
        ReasonCode.NO_RULE,
        "no Core ML translation of aten.erfinv.default is known",
        "aten.erfinv.default",
        x(2, 3, low=-0.9, high=0.9),
    ),
    reject(
        ReasonCode.ARGUMENT,
        "booleans are added with another alpha than 1",
        "aten.add.Tensor",
        b(2, 3),
        b(2, 3),
        alpha=False,
        note="truths-alpha",
    ),
    *(
        reject(
            ReasonCode.DTYPE,
            "the result is bool, Core ML has numbers here",
            f"aten.{op}.Scalar",
            b(2, 3),
            True,
            note="bool-bool",
        )
        for op in ("add", "mul")
    ),
    *(
        reject(
            ReasonCode.DTYPE,
            "the result is int64, Core ML has floats here",
            f"aten.{op}",
            i(2, 3),
            *more,
            note="integers",
            **mode,
        )
        for op, more, mode in (("pow.Tensor_Tensor", (i(2, 3, low=0),), {}),)
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is int64, Core ML has floats here",
        "aten.pow.Scalar",
        2,
        i(2, 3, low=0),
        note="integers",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "Core ML has only the powers 2 to 4 of integers",
        "aten.pow.Tensor_Scalar",
        i(2, 3),
        5,
        note="integers",
    ),
    *(
        reject(
            ReasonCode.DTYPE,
            "booleans have no order in Core ML",
            f"aten.{op}.Tensor",
            b(2, 3),
            b(2, 3),
            note="bool-bool",
        )
        for op in ("lt", "le", "gt", "ge")
    ),
    *(
        reject(
            ReasonCode.DTYPE,
            "booleans have no order in Core ML",
            f"aten.{op}.Scalar",
            b(2, 3),
            True,
            note="bool-bool",
        )
        for op in _SCALARS
    ),
)
