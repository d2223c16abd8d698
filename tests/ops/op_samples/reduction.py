"""Calls of reductions."""

from __future__ import annotations

import torch
from ops.op_samples.sample import accept, b, i, reject, x

from coreml_delegate.ops import ReasonCode

DIMS = ("mean.dim", "sum.dim_IntList", "amax.default", "amin.default")
V = "aten.linalg_vector_norm.default"
inf = float("inf")
# Integers that fp32 has not.
_APART = i(values=[[16777217, 16777216, -3], [-16777217, -16777216, 5]])
_FACTORS = (("", x(2, 4)), ("int64", i(2, 4, low=1)), ("bool", b(2, 4)))
ACCEPTED = (
    *(accept(f"aten.{op}", x(2, 3, 4), [-1], note="last") for op in DIMS),
    *(accept(f"aten.{op}", x(2, 3, 4), [0, 2], True, note="two-keep") for op in DIMS),
    *(accept(f"aten.{op}", x(4), [0], note="rank1") for op in DIMS),
    *(accept(f"aten.{op}", x(1, 2, 2, 3, 2), [-1, -2], True, note="rank5") for op in DIMS),
    accept("aten.mean.dim", x(2, 3), None, note="none"),
    accept("aten.sum.dim_IntList", x(2, 3), None, note="none"),
    accept("aten.sum.dim_IntList", x(2, 3), [], note="empty"),
    accept("aten.mean.dim", x(2, 3), [], note="empty"),
    accept("aten.amax.default", x(2, 3), [], note="empty"),
    accept("aten.amin.default", x(2, 3), note="default"),
    accept("aten.mean.dim", x(2, 3), [1], False, dtype=torch.float32, note="dtype"),
    accept("aten.sum.dim_IntList", i(2, 3), [1], False, note="int64"),
    accept("aten.sum.default", i(2, 3), note="int64"),
    accept("aten.sum.dim_IntList", i(2, 3), [1], False, dtype=torch.float32, note="int64-dtype"),
    accept("aten.sum.dim_IntList", b(2, 3), [1], note="bool"),
    accept("aten.sum.default", b(2, 3), note="bool"),
    accept("aten.amax.default", i(2, 3), [1], False, note="int64"),
    *(accept(f"aten.{op}.default", x(2, 3, 4)) for op in ("mean", "sum", "max", "min")),
    *(accept(f"aten.{op}.default", x(), note="rank0") for op in ("mean", "sum")),
    accept("aten.sum.default", x(2, 3), dtype=torch.float32, note="dtype"),
    accept("aten.mean.default", x(2, 3), dtype=torch.float32, note="dtype"),
    *(accept(V, x(2, 3), o, [1], note=f"{o}") for o in (2, 1, inf, -inf, 0, 3, 0.5)),
    accept(V, x(2, 3), 2, None, note="none"),
    accept(V, x(2, 3), 2, [0, 1], True, note="two-keep"),
    accept(V, x(2, 3), 1, [0, 1], True, note="two-keep1"),
    accept(V, x(2, 3), 2, [-1], False, dtype=torch.float32, note="dtype"),
    accept(V, x(2, 3), note="default"),
    *(
        accept(f"aten.arg{m}.default", x(2, 3, 4), d, k, note=f"{d}{k}")
        for m in ("max", "min")
        for d in (0, -1, 1)
        for k in (False, True)
    ),
    *(
        accept(f"aten.arg{m}.default", i(2, 6, low=-100, high=100), 1, note="int64")
        for m in ("max", "min")
    ),
    *(
        accept(
            f"aten.arg{m}.default", i(2, 6, low=-100, high=100, dtype=torch.int32), 1, note="int32"
        )
        for m in ("max", "min")
    ),
    *(accept(f"aten.arg{m}.default", x(5), 0, note="rank1") for m in ("max", "min")),
    *(accept(f"aten.arg{m}.default", x(1, 2, 3, 2, 2), 2, note="rank5") for m in ("max", "min")),
    *(accept(f"aten.{op}.dim", x(2, 5), 1, takes=(0, 1)) for op in ("max", "min")),
    *(
        accept(f"aten.{op}.dim", x(2, 5), 0, True, takes=(0, 1), note="keep")
        for op in ("max", "min")
    ),
    *(
        accept(f"aten.{op}.dim", x(2, 5), 0, True, takes=(0,), note="values")
        for op in ("max", "min")
    ),
    *(
        accept(f"aten.{op}.dim", _APART, 1, keep, takes=takes, note=f"int64-{keep}{len(takes)}")
        for op in ("max", "min")
        for keep, takes in ((False, (0, 1)), (True, (0, 1)), (False, (1,)))
    ),
    accept("aten.any.dim", b(2, 3), 1),
    accept("aten.any.default", b(2, 3)),
    accept("aten.any.dims", b(2, 3), [0, 1]),
    accept("aten.cumsum.default", x(2, 3), 1),
    accept("aten.cumsum.default", x(2, 3), 0, note="first"),
    accept("aten.cumsum.default", x(2, 3, 2), -3, note="from-the-last"),
    accept("aten.cumsum.default", i(2, 3), -1, note="int64"),
    accept("aten.cumsum.default", b(2, 3), 1, note="bool"),
    accept("aten.cumsum.default", b(2, 3), 1, dtype=torch.float32, note="bool-to-floats"),
    accept("aten.cumsum.default", x(3), 0, note="rank1"),
    accept("aten.logsumexp.default", x(2, 3), [1]),
    accept("aten.logsumexp.default", x(2, 3), [0, 1], True, note="keep"),
    accept("aten.var.correction", x(2, 3), [1]),
    accept("aten.var.correction", x(2, 3), [1], correction=0, note="c0"),
    accept("aten.var.correction", x(2, 3), None, correction=1, keepdim=True, note="none"),
    accept("aten.sum.default", x(2, 3), dtype=torch.int64, note="to-integers", fp16=False),
    accept("aten.sum.dim_IntList", x(2, 3), [1], dtype=torch.int64, note="to-integers", fp16=False),
    accept("aten.cumsum.default", x(2, 3), 1, dtype=torch.int64, note="to-integers", fp16=False),
    accept("aten.var.correction", x(2, 3), [1], correction=2, note="correction"),
    accept("aten.var.correction", x(2, 5), correction=3, keepdim=True, note="correction-all"),
    *(accept(f"aten.{op}.default", x(2, 5), note="flat") for op in ("argmax", "argmin")),
    *(
        accept(f"aten.{op}.default", x(2, 5), None, True, note="flat-keep")
        for op in ("argmax", "argmin")
    ),
    accept("aten.any.default", x(values=[0.0, 0.5]), note="float"),
    *(accept("aten.prod.default", tensor, note=note) for note, tensor in _FACTORS),
    *(
        accept(f"aten.{op}", tensor, -1, note=note)
        for op in ("prod.dim_int", "cumprod.default")
        for note, tensor in _FACTORS
    ),
    accept("aten.prod.default", x(), note="rank0"),
    accept("aten.prod.default", b(2, 3), dtype=torch.float32, note="dtype"),
    accept("aten.prod.dim_int", x(2, 3, 4), 1, True, note="keep"),
    accept("aten.prod.dim_int", x(2, 1, 2, 3, 2), 3, note="rank5"),
    accept("aten.cumprod.default", x(5, 3, 2), 0, note="first"),
    accept("aten.cumprod.default", x(2, 9), 1, note="long"),
    accept("aten.cumprod.default", x(), 0, note="rank0"),
    accept("aten.cumprod.default", i(2, 3), 1, dtype=torch.float32, note="dtype"),
    *(
        accept("aten.var_mean.correction", x(2, 3), *arguments, takes=takes, note=note)
        for note, arguments, takes in (
            ("both", ([1],), (0, 1)),
            ("all", (None,), (0, 1)),
            ("variance", ([0],), (0,)),
            ("mean", ([-1],), (1,)),
        )
    ),
    accept(
        "aten.var_mean.correction",
        x(2, 5),
        [1],
        correction=2,
        keepdim=True,
        takes=(0, 1),
        note="correction",
    ),
    accept("aten.any.dim", i(2, 3), 1, note="int64"),
)

REJECTED = (
    reject(
        ReasonCode.SYMBOLIC,
        "the number of factors is known at run time",
        "aten.cumprod.default",
        x(2, 3),
        1,
        dynamic=True,
        note="dynamic",
    ),
    reject(
        ReasonCode.DTYPE,
        "the result is float64",
        "aten.mean.dim",
        x(2, 3),
        [1],
        dtype=torch.float64,
        note="float64",
    ),
)
