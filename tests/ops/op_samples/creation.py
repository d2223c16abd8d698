"""Calls of ops that make tensors; what random ones draw is tested in ``test_random_numbers``."""

from __future__ import annotations

from dataclasses import replace

import torch
from ops.op_samples.sample import accept, b, i, reject, x

from coreml_delegate.ops import ReasonCode

_EMPTY = ("aten.empty.memory_format", "dim_order_ops._empty_dim_order.default")

ACCEPTED = (
    accept("aten.full.default", [2, 3], 0.5),
    accept("aten.full.default", [2, 3], 5, note="int"),
    accept("aten.full.default", [2, 3], True, note="bool"),
    accept("aten.full.default", [2, 3], 1, dtype=torch.float32, note="dtype"),
    accept("aten.full.default", [], 1.5, note="rank0"),
    accept("aten.full_like.default", x(2, 3), 2.5),
    accept("aten.full_like.default", x(2, 3), 2, note="int"),
    accept("aten.full_like.default", i(2, 3), 2, note="int64"),
    accept("aten.full_like.default", i(2, 3), 2.5, dtype=torch.float32, note="dtype"),
    accept("aten.new_zeros.default", x(2, 3), [4, 2]),
    accept("aten.new_zeros.default", x(2, 3), [4, 2], dtype=torch.int64, note="dtype"),
    accept("aten.new_zeros.default", i(2, 3), [4, 2], note="int64"),
    accept("aten.zeros_like.default", x(2, 3)),
    accept("aten.zeros_like.default", i(2, 3), note="int64"),
    accept("aten.zeros_like.default", b(2, 3), note="bool"),
    accept("aten.zeros_like.default", i(2, 3), dtype=torch.float32, note="dtype"),
    accept("aten.ones_like.default", x(2, 3)),
    accept("aten.ones_like.default", i(2, 3), note="int64"),
    accept("aten.ones_like.default", i(2, 3), dtype=torch.float32, note="dtype"),
    accept("aten.arange.start_step", 0, 6),
    accept("aten.arange.start_step", 1, 9, 3, note="step"),
    accept("aten.arange.start_step", 5, -3, -2, note="negstep"),
    accept("aten.arange.start_step", 0.0, 2.0, 0.5, note="float"),
    accept("aten.arange.start_step", 0, 6, dtype=torch.float32, note="dtype"),
    accept("aten.scalar_tensor.default", 2.5),
    accept("aten.scalar_tensor.default", 2, dtype=torch.int64, note="int64"),
    accept("aten.scalar_tensor.default", 2, dtype=torch.float32, note="float"),
    # Core ATen compares integers of 8 bits.
    accept("aten.eye.default", 3, core=False),
    accept("aten.eye.default", 3, dtype=torch.int64, note="int64", core=False),
    accept("aten.eye.m", 2, 4, core=False),
    accept("aten.fill.Tensor", x(2, 3), x()),
    accept("aten.fill.Tensor", i(2, 3), i(), note="int64"),
    accept("aten.fill.Scalar", x(2, 3), 0.5),
    accept("aten.fill.Scalar", x(2, 3), 2, note="int"),
    accept("aten.fill.Scalar", i(2, 3), 2, note="int64"),
    accept("aten.fill.Scalar", i(2, 3), 2.5, note="int64float"),
    accept("aten.fill.Scalar", b(2, 3), True, note="bool"),
    accept("aten.copy.default", x(2, 3), x(3)),
    accept("aten.copy.default", i(2, 3), i(2, 3), note="int64"),
    accept("aten.fill.Tensor", x(), x(), note="rank0"),
    accept("aten.copy.default", x(), x(), note="rank0"),
    accept("aten.copy.default", i(), x(), note="rank0-mixed"),
    *(accept(op, x(2, 3), i(), note="mixed") for op in ("aten.fill.Tensor", "aten.copy.default")),
    *(
        replace(accept(op, [2, 3], dtype=dtype, **more, note=note), compare=False)
        for op, more in zip(_EMPTY, ({}, {"dim_order": [0, 1]}), strict=True)
        for note, dtype in (("", torch.float32), ("int64", torch.int64))
    ),
    accept("aten.empty_strided.default", [2, 3], [3, 1], compare=False),
    *(accept(f"aten.{op}.default", [3, 4], compare=False) for op in ("rand", "randn")),
    # Core ATen has neither, and nothing they decompose to.
    accept("aten.randn_like.default", x(3, 4), compare=False, core=False),
    accept("aten.rand_like.default", x(3, 4), compare=False, core=False),
)

REJECTED = (
    reject(
        ReasonCode.LAYOUT,
        "Core ML is row-major",
        "aten.empty_strided.default",
        [2, 3],
        [1, 2],
        note="columns",
        compare=False,
    ),
    *(
        reject(
            ReasonCode.LAYOUT,
            "Core ML is row-major",
            op,
            [1, 2, 3, 4],
            **{how: value},
            note="channels-last",
            compare=False,
        )
        for op, how, value in zip(
            _EMPTY,
            ("memory_format", "dim_order"),
            (torch.channels_last, [0, 2, 3, 1]),
            strict=True,
        )
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "the result has dynamic shape",
        "aten.fill.Tensor",
        x(2, 3),
        x(),
        note="dynamic",
        dynamic=True,
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "the result has dynamic shape",
        "aten.copy.default",
        x(2, 3),
        x(1),
        note="dynamic",
        dynamic=True,
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is float64",
        "aten.full.default",
        [2, 3],
        0.5,
        dtype=torch.float64,
        note="float64",
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is uint8",
        "aten.zeros_like.default",
        x(2, 3),
        dtype=torch.uint8,
        note="uint8",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "fill_value=4294967296 is beyond int32, the widest of Core ML",
        "aten.full.default",
        [2, 3],
        2**32,
        note="wide",
    ),
    reject(
        ReasonCode.SHAPE,
        "'result' is empty: (0, 3)",
        "aten.full.default",
        [0, 3],
        1.0,
        note="empty",
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the result has dynamic shape",
            f"aten.{op}.default",
            x(3, 4),
            dynamic=True,
            compare=False,
            note="dynamic",
        )
        for op in ("randn_like", "rand_like")
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is float64",
        "aten.rand_like.default",
        x(3, 4),
        dtype=torch.float64,
        compare=False,
        note="float64",
    ),
)
