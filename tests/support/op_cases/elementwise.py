"""Elementwise ops, activations and reductions."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.targets import Opset
from support.op_cases.case import OpCase, integers, normal, uniform

_X = normal(3, 4, scale=3)
_POSITIVE = uniform(3, 4, low=0.1, high=5)
_UNIT = uniform(3, 4, low=-0.9, high=0.9)
_HALVES = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.0], dtype=np.float32)
_TRUTH = np.array([True, False, True, False])
_OTHER = np.array([True, True, False, False])

UNARY = [
    *(
        OpCase(op, "normal", {"x": _X})
        for op in ("abs", "atan", "cos", "erf", "exp2", "sign", "sin", "square", "tanh")
    ),
    *(OpCase(op, "unit", {"x": _UNIT}) for op in ("acos", "asin", "atanh", "tan")),
    *(OpCase(op, "small", {"x": _UNIT * 3}) for op in ("cosh", "exp", "sinh")),
    *(OpCase(op, "halves", {"x": _HALVES}) for op in ("ceil", "floor", "round", "sign")),
    *(OpCase(op, "int", {"x": integers(3, 4)}) for op in ("abs", "sign", "square")),
    OpCase("sqrt", "positive", {"x": _POSITIVE}),
    OpCase("logical_not", "bool", {"x": _TRUTH}),
    *(
        OpCase(
            op, f"epsilon-{opset.name}", {"x": _POSITIVE}, {"epsilon": np.float32(0.25)}, {}, opset
        )
        for op in ("inverse", "log", "rsqrt")
        for opset in (Opset.iOS15, Opset.iOS17)
    ),
    *(OpCase(op, "default", {"x": _POSITIVE}) for op in ("inverse", "log", "rsqrt")),
    OpCase("clip", "both", {"x": _X}, {"alpha": np.float32(-1), "beta": np.float32(2)}),
    OpCase("threshold", "float", {"x": _X}, {"alpha": np.float32(0.5)}),
    OpCase("threshold", "int", {"x": integers(5)}, {"alpha": np.int32(2)}),
]

_BROADCAST = {"x": normal(2, 3, 4, scale=3), "y": normal(3, 1, seed=1, scale=2)}
_INTEGERS = {"x": integers(2, 3, 4), "y": np.array([[-4], [3], [7]], dtype=np.int32)}
_WORDS = np.array([-(2**31), -(2**31) + 1, -70000, -1, 0, 1, 77777777, 2**31 - 1], np.int32)
_POWERS_OF_TWO = np.array([[1], [4], [1 << 8], [1 << 30]], np.int32)
_TIED = {
    "x": np.array([1.0, 2.0, 3.0, -0.0], dtype=np.float32),
    "y": np.array([1.0, 3.0, 2.0, 0.0], dtype=np.float32),
}

BINARY = [
    *(
        OpCase(op, "broadcast", _BROADCAST)
        for op in ("add", "floor_div", "maximum", "minimum", "mod", "mul", "real_div", "sub")
    ),
    *(
        OpCase(op, "int", _INTEGERS)
        for op in ("add", "floor_div", "maximum", "minimum", "mod", "mul", "sub")
    ),
    *(
        OpCase(op, "powers of two", {"x": _WORDS}, {"y": _POWERS_OF_TWO})
        for op in ("floor_div", "mod")
    ),
    *(
        OpCase(op, "tied", _TIED)
        for op in ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")
    ),
    *(
        OpCase(op, "bool", {"x": _TRUTH, "y": _OTHER})
        for op in ("logical_and", "logical_or", "logical_xor")
    ),
    OpCase("pow", "float", {"x": _POSITIVE, "y": normal(4, seed=2)}),
    OpCase("pow", "int", {"x": integers(4), "y": np.arange(4, dtype=np.int32)}),
    OpCase(
        "real_div",
        "int-truncates",
        {"x": np.array([7, -7, 6], dtype=np.int32), "y": np.array([2, 2, 3], dtype=np.int32)},
        expected=lambda x, y: torch.tensor([3, -3, 2], dtype=torch.int32),
    ),
]

CAST = [
    OpCase("cast", f"{label}-{dtype}", {"x": x}, {}, {"dtype": dtype}, opset)
    for opset, dtypes in (
        (Opset.iOS15, ("int32", "fp16", "fp32", "bool")),
        (Opset.iOS17, ("int8", "uint8", "int16", "uint16", "int32", "fp16", "bool")),
    )
    for dtype in dtypes
    for label, x in (
        ("float", np.array([0.0, 0.9, 1.5, 100.7], dtype=np.float32)),
        ("int", np.array([0, 1, 3, 120], dtype=np.int32)),
        ("bool", _TRUTH),
    )
]

_ALPHA = {"alpha": np.float32(0.3)}
_ALPHA_BETA = {"alpha": np.float32(0.3), "beta": np.float32(0.8)}
_IMAGE = normal(2, 3, 4, 5, scale=2)
_CHANNEL = {"alpha": normal(3, seed=1), "beta": uniform(3, low=0.5, high=2, seed=2)}

ACTIVATION = [
    *(
        OpCase(op, "plain", {"x": _X})
        for op in ("relu", "relu6", "sigmoid", "softplus", "softsign", "softmax")
    ),
    OpCase("silu", "plain", {"x": _X}, expected=lambda x: F.silu(x)),
    *(OpCase(op, "alpha", {"x": _X}, _ALPHA) for op in ("elu", "leaky_relu")),
    # coremltools' inference writes into its argument here, so torch it is.
    OpCase(
        "thresholded_relu", "alpha", {"x": _X}, _ALPHA, expected=lambda x, alpha: x * (x >= alpha)
    ),
    *(
        OpCase(op, "alpha-beta", {"x": _X}, _ALPHA_BETA)
        for op in ("clamped_relu", "linear_activation", "scaled_tanh", "sigmoid_hard")
    ),
    *(
        OpCase("gelu", mode.lower(), {"x": _X}, {}, {"mode": mode})
        for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")
    ),
    OpCase("softmax", "axis", {"x": _IMAGE}, {}, {"axis": 1}),
    OpCase("prelu", "channels", {"x": _IMAGE}, {"alpha": _CHANNEL["alpha"]}),
    OpCase("softplus_parametric", "channels", {"x": _IMAGE}, _CHANNEL),
]

_AXES = ("reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_max", "reduce_mean")
_MORE_AXES = ("reduce_min", "reduce_sum", "reduce_sum_square")
_NEAR_ONE = uniform(2, 3, 4, low=0.8, high=1.2)  # whose product is still an fp16 number

REDUCTION = [
    *(
        OpCase(op, f"{note}-{keep}", {"x": x}, {}, {**axes, "keep_dims": keep})
        for ops, x in (((*_AXES, *_MORE_AXES), _IMAGE), (("reduce_prod",), _NEAR_ONE))
        for op in ops
        for note, axes in (("all", {}), ("some", {"axes": [1, -1]}))
        for keep in (True, False)
    ),
    OpCase("reduce_log_sum", "some", {"x": _POSITIVE}, {}, {"axes": [1]}),
    *(
        OpCase(op, "int", {"x": integers(3, 5, low=1)}, {}, {"axes": [-1]})
        for op in (*_AXES, *_MORE_AXES, "reduce_log_sum", "reduce_prod")
    ),
    *(
        OpCase(op, f"axis-{keep}", {"x": _IMAGE}, {}, {"axis": 2, "keep_dims": keep}, opset)
        for op in ("reduce_argmax", "reduce_argmin")
        for keep in (True, False)
        for opset in (Opset.iOS15, Opset.iOS17)
    ),
    *(
        OpCase(op, "uint16", {"x": _X}, {}, {"output_dtype": "uint16"})
        for op in ("reduce_argmax", "reduce_argmin")
    ),
]

CASES = [*UNARY, *BINARY, *CAST, *ACTIVATION, *REDUCTION]
