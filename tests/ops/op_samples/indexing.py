"""Calls of ops that gather and scatter by index."""

from __future__ import annotations

import torch
from ops.op_samples.sample import TensorArg, accept, b, i, reject, w, x

from coreml_delegate.ops import ReasonCode


def n(*shape: int, high: int = 2, dtype: torch.dtype = torch.int64) -> TensorArg:
    """Indices below ``high``."""
    return i(*shape, low=0, high=high, dtype=dtype)


_ALONG = w(values=[[0, 3, 1, 2], [1, 4, 0, 1]], dtype=torch.int64)

_TWICE = w(values=[[0, 3, 1, 2], [1, 3, 0, 2], [0, 4, 1, 1]], dtype=torch.int64)

# Integers that fp32 has not.
_APART = i(values=[[16777217, 16777216, -3], [-16777217, -16777216, 5]])

_REDUCE = "aten.scatter_reduce.two"
_SEARCH = "aten.searchsorted.Tensor"

ACCEPTED = (
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4)], note="first"),
    accept("aten.index.Tensor", x(4, 3), [None, n(5, high=3)], note="second"),
    accept("aten.index.Tensor", x(4, 3), [n(2, 2, high=4)], note="2d"),
    accept("aten.index.Tensor", x(4, 3, 2), [None, n(2, 2, high=3)], note="2d-second"),
    accept("aten.index.Tensor", x(4, 3), [i(5, low=-4, high=4)], note="negative"),
    accept("aten.index.Tensor", i(4, 3), [n(5, high=4)], note="int64"),
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4, dtype=torch.int32)], note="int32"),
    accept(
        "aten.index.Tensor", x(4, 3), [w(3, values=[0, 2, 1], dtype=torch.int64)], note="constant"
    ),
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4), n(5, high=3)], note="two"),
    accept("aten.index.Tensor", x(4, 3), [n(5, 1, high=4), n(1, 2, high=3)], note="two-broadcast"),
    accept("aten.index.Tensor", x(4, 3, 2), [None, n(5, high=3), n(5, high=2)], note="two-last"),
    accept("aten.index.Tensor", x(4, 3, 2), [n(5, high=4), None, n(5, high=2)], note="apart"),
    accept("aten.index.Tensor", b(4, 3), [n(5, high=4)], note="bool"),
    accept("aten.index.Tensor", b(4, 3), [n(5, 1, high=4), n(1, 2, high=3)], note="bool-two"),
    accept("aten.index_select.default", b(4, 3), 1, n(5, high=3), note="bool"),
    accept("aten.gather.default", b(4, 3), 0, n(2, 2, high=4), note="bool"),
    accept("aten.index_select.default", x(4, 3), 0, n(5, high=4)),
    accept("aten.index_select.default", x(4, 3), -1, n(5, high=3), note="last"),
    accept("aten.index_select.default", x(4, 3), 1, n(5, high=3, dtype=torch.int32), note="int32"),
    accept("aten.index_select.default", i(4, 3), 1, n(5, high=3), note="int64"),
    accept("aten.gather.default", x(4, 3), 1, n(4, 2, high=3)),
    accept("aten.gather.default", x(4, 3), 0, n(2, 3, high=4), note="first"),
    accept("aten.gather.default", x(4, 3, 2), -1, n(4, 3, 5), note="rank3"),
    accept("aten.gather.default", i(4, 3), 1, n(4, 2, high=3), note="int64"),
    accept("aten.embedding.default", w(7, 3), n(2, 4, high=7)),
    accept("aten.embedding.default", w(7, 3), n(4, high=7, dtype=torch.int32), note="int32"),
    accept("aten.embedding.default", w(7, 3), n(4, high=7), 2, note="padding_idx"),
    accept("aten.embedding.default", x(7, 3), n(4, high=7), note="computed"),
    accept("aten.embedding.default", w(7, 3), n(high=7), note="rank0"),
    accept("aten.slice_scatter.default", x(5, 4), x(2, 4), 0, 1, 3),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 2), 1, 0, 4, 2, note="step"),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 2), -1, -2, note="negative"),
    accept("aten.slice_scatter.default", i(5, 4), i(2, 4), 0, 1, 3, note="int64"),
    accept("aten.slice_scatter.default", x(5, 4), x(2, 4), 0, 3, 9223372036854775807, note="end"),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 4), note="all"),
    accept("aten.select_scatter.default", x(5, 4), x(4), 0, 1),
    accept("aten.select_scatter.default", x(5, 4), x(5), -1, -1, note="neg"),
    accept("aten.scatter.src", x(5, 4), 0, _ALONG, x(2, 4)),
    accept("aten.scatter.value", x(5, 4), 0, _ALONG, 0.5),
    accept("aten.scatter_add.default", x(5, 4), 0, _ALONG, x(2, 4)),
    *(
        accept(
            "aten.bucketize.Tensor",
            x(values=[[-1.0, 0.5, 2.0], [0.25, 1.0, 3.0]]),
            w(values=[0.0, 0.5, 1.0, 2.0]),
            **more,
            note=note,
        )
        for note, more in (("", {}), ("right", {"right": True}), ("int32", {"out_int32": True}))
    ),
    accept("aten.topk.default", x(3, 7), 3, takes=(0, 1)),
    accept("aten.topk.default", x(3, 7), 3, 0, False, takes=(0, 1), note="first-smallest"),
    accept("aten.topk.default", x(3, 7), 1, -1, True, False, takes=(0, 1), note="unsorted"),
    accept("aten.topk.default", _APART, 2, takes=(0, 1), note="int64"),
    accept("aten.sort.default", _APART, takes=(0, 1), note="int64"),
    accept("aten.sort.default", x(3, 7), takes=(0, 1)),
    accept("aten.sort.default", x(3, 7), 0, True, takes=(0, 1), note="desc"),
    accept("aten.gather.default", x(4, 3), 0, n(2, 2, high=4), note="part"),
    accept("aten.gather.default", x(4, 3, 5), 1, n(2, 2, 4, high=3), note="part-rank3"),
    accept("aten.scatter.src", x(5, 5), 0, _ALONG, x(2, 4), note="part"),
    accept("aten.scatter.src", x(5, 4), 0, _ALONG, x(3, 6), note="part-source"),
    accept("aten.scatter.value", x(5, 5), 0, _ALONG, 0.5, note="part"),
    accept("aten.scatter.value", x(5, 5), 0, _ALONG, 2, note="part-int"),
    accept("aten.scatter_add.default", x(5, 5), 0, _ALONG, x(2, 4), note="part"),
    accept(
        "aten.scatter_add.default", x(5, 5, 3), 0, n(2, 4, 2, high=5), x(2, 4, 2), note="part-rank3"
    ),
    *(
        accept(f"aten.{op}", data, 0, _ALONG, *source, note=note)
        for note, data, source in (
            ("int64", i(5, 4), {"src": i(2, 4), "value": 7}),
            ("bool", b(5, 5), {"src": b(2, 4), "value": True}),
        )
        for op, source in (
            ("scatter.src", (source["src"],)),
            ("scatter.value", (source["value"],)),
            ("scatter_add.default", (source["src"],)),
        )
    ),
    # Constants: coremltools would fold what is scattered to the last of it.
    accept("aten.scatter_add.default", w(5, 4), 0, _TWICE, w(3, 4), note="constants"),
    *(
        accept("aten.scatter.reduce", x(5, 4), 0, _TWICE, x(3, 4), reduce=reduce, note=reduce)
        for reduce in ("add", "multiply")
    ),
    *(
        accept("aten.scatter.value_reduce", x(5, 4), 0, _TWICE, 0.5, reduce=reduce, note=reduce)
        for reduce in ("add", "multiply")
    ),
    *(
        accept(_REDUCE, *operands, reduce, include_self=included, note=f"{reduce}-{note}")
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for note, included, operands in (
            ("self", True, (x(5, 4), 0, _TWICE, x(3, 4))),
            ("", False, (x(5, 4), 0, _TWICE, x(3, 4))),
            ("part", False, (x(4, 3, 5), -1, n(2, 3, 6, high=5), x(3, 3, 6))),
            ("int64", False, (i(5, 4), 0, _TWICE, i(3, 4))),
        )
    ),
    accept(_REDUCE, x(5, 4), 0, n(6, 4, high=5), x(6, 4), "amax", note="computed"),
    *(
        accept(
            _SEARCH, x(values=[0.0, 0.5, 0.5, 1.0]), x(values=[0.5, -1.0, 2.0]), note=note, **how
        )
        for note, how in (("", {}), ("right", {"right": True}), ("side", {"side": "right"}))
    ),
    accept(_SEARCH, x(values=[0.0, 0.5, 1.0]), x(2, 1, 3), note="one sequence"),
    accept(
        _SEARCH,
        x(values=[[0.0, 0.5, 1.0], [0.0, 0.25, 0.5]]),
        x(2, 4),
        out_int32=True,
        note="rows",
        fp16=False,
    ),
)

REJECTED = (
    reject(
        ReasonCode.SYMBOLIC,
        "'self' has dynamic shape",
        "aten.bucketize.Tensor",
        x(2, 3),
        w(values=[0.0, 1.0]),
        dynamic=True,
        note="dynamic",
    ),
    reject(
        ReasonCode.RANK,
        "'index' has rank 0, Core ML takes 1 here",
        "aten.index_select.default",
        x(4, 3),
        1,
        n(high=3),
        note="rank0",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "sparse_grad=True, Core ML takes False",
        "aten.gather.default",
        x(4, 3),
        1,
        n(4, 2, high=3),
        sparse_grad=True,
        note="sparse_grad",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "sparse=True, Core ML takes False",
        "aten.embedding.default",
        w(7, 3),
        n(4, high=7),
        -1,
        False,
        True,
        note="sparse",
    ),
    reject(
        ReasonCode.NO_RULE,
        "aten.nonzero.default is refused: the shape of the result depends on values",
        "aten.nonzero.default",
        x(values=[0.0, 1.0, 2.0]),
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the index spans a dynamic part of the data",
            f"aten.{op}",
            x(2, 5),
            0,
            w(values=[[0, 1]], dtype=torch.int64),
            *more,
            note="part-dynamic",
            dynamic=True,
        )
        for op, more in (
            ("gather.default", ()),
            ("scatter.src", (x(1, 2),)),
            ("scatter.value", (0.5,)),
            ("scatter_add.default", (x(1, 2),)),
            ("scatter_reduce.two", (x(1, 2), "amax")),
        )
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the index spans a dynamic part of the data",
            f"aten.scatter.{op}",
            x(2, 5),
            0,
            w(values=[[0, 1]], dtype=torch.int64),
            source,
            reduce="add",
            note="part-dynamic",
            dynamic=True,
        )
        for op, source in (("reduce", x(1, 2)), ("value_reduce", 0.5))
    ),
    reject(
        ReasonCode.ARGUMENT,
        "Core ML takes None",
        _SEARCH,
        x(values=[0.0, 0.5, 1.0]),
        x(3),
        sorter=w(values=[0, 1, 2], dtype=torch.int64),
        note="sorter",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "'sorted_sequence' has dynamic shape",
        _SEARCH,
        x(2, 3),
        x(2, 3),
        note="dynamic",
        dynamic=True,
    ),
)
