"""Calls of ops that write to the elements that indices or a mask select."""

from __future__ import annotations

import torch
from ops.op_samples.indexing import n
from ops.op_samples.sample import accept, b, i, reject, w, x

from coreml_delegate.ops import ReasonCode

_ROWS = w(values=[0, 3], dtype=torch.int64)
_PAIRS = w(values=[[0, 3], [4, 1]], dtype=torch.int64)
_FIRST = w(values=[1, 0], dtype=torch.int64)
_BOTH = w(values=[True, True], dtype=torch.bool)
_THREE = w(values=[[False, True, False, False, True], [True] + 4 * [False]], dtype=torch.bool)

ACCEPTED = (
    accept("aten.index_put.default", x(5, 4), [n(2, high=5)], x(2, 4)),
    accept("aten.index_put.default", x(5, 4), [_ROWS], x(2, 4), note="const"),
    accept("aten.index_put.default", x(5, 4), [_ROWS], x(2, 4), True, note="accum"),
    accept("aten.index_put.default", x(5, 4), [None, _ROWS], x(5, 2), note="second"),
    accept("aten.index_put.default", x(5, 4), [_ROWS, None], x(2, 4), note="first"),
    accept("aten.index_put.default", x(5, 4), [_ROWS, None], x(2, 4), True, note="first, accum"),
    accept("aten.index_put.default", x(2, 5, 4), [None, _ROWS, None], x(2, 2, 4), note="middle"),
    accept(
        "aten.index_put.default", x(1, 2, 5, 4), [None, None, _ROWS], x(1, 2, 2, 4), note="cache"
    ),
    *(
        accept("aten.index_put.default", x(2, 5, 4), indices, values, *accumulate, note=note)
        for note, indices, values, *accumulate in (
            ("two, broadcast", [_FIRST, _PAIRS], x(2, 2, 4)),
            ("inner rank 2", [None, _PAIRS], x(2, 2, 2, 4)),
            ("inner rank 2, accum", [None, _PAIRS], x(2, 1), True),
            ("inner two", [None, _ROWS, _ROWS], x(2, 2)),
            ("inner two, broadcast", [None, _PAIRS, _ROWS], x(2)),
            ("apart", [_FIRST, None, _ROWS], x(2, 5)),
            ("rank 0", [n(high=2)], x(4)),
            ("rank 0, inner", [None, n(high=5)], x(2, 4), True),
            ("rank 0, apart", [n(high=2), None, n(high=4)], x(5)),
            ("rank 0, all", [n(high=2), n(high=5), n(high=4)], x()),
            ("rank 0 and 1", [n(high=2), None, _ROWS], x(2, 1)),
            ("mask", [b(2, 5, 4)], x()),
            ("mask, accum", [b(2, 5, 4)], x(1), True),
            ("mask of rows", [b(2, 5)], x(4)),
            ("mask of rows, one row", [b(2, 5), None], x(1, 4)),
            ("mask of rows, accum", [b(2, 5)], x(1, 1), True),
            ("inner mask", [None, b(5)], x(2, 1, 4)),
            ("inner mask of two", [None, b(5, 4)], x(2, 1)),
            ("last mask", [None, None, b(4)], x(5, 1)),
            ("mask of known number", [_BOTH], x(2, 5, 4)),
            ("mask of known rows", [_THREE], x(3, 4)),
            ("mask of known rows, one column", [_THREE], x(3, 1)),
            ("mask of known rows, accum", [_THREE], x(3, 4), True),
        )
    ),
    *(
        accept("aten.masked_scatter.default", x(2, 3), mask, x(3, 3), note=note)
        for note, mask in (("", b(2, 3)), ("rows", b(2, 1)), ("columns", b(3)))
    ),
    accept("aten.masked_scatter.default", x(3), b(2, 3), x(8), note="broadcast"),
    accept("aten.masked_scatter.default", i(2, 3), b(2, 3), i(2, 3), note="int64"),
    accept("aten.masked_scatter.default", b(2, 3), b(2, 3), b(2, 3), note="bool"),
    accept("aten.masked_scatter.default", x(), b(), x(2), note="rank0"),
    accept("aten.index_put.default", i(5, 4), [n(2, high=5)], i(2, 4), note="int64"),
    accept("aten.index_put.default", b(5, 4), [None, _ROWS], b(5, 2), note="bool"),
    accept("aten.index_put.default", i(5, 4), [b(5)], i(4), note="int64, mask"),
    accept("aten.index_put.default", b(5, 4), [b(5, 4)], b(), note="bool, mask"),
    accept("aten.index_put.default", b(5, 4), [b(5, 4)], b(), True, note="bool, mask, accum"),
)

REJECTED = (
    reject(
        ReasonCode.SYMBOLIC,
        "or the mask is broadcast along one",
        "aten.masked_scatter.default",
        x(2, 3),
        b(2, 1),
        x(2, 3),
        dynamic=True,
        note="dynamic",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "a mask is one of several indices",
        "aten.index_put.default",
        x(2, 4),
        [_BOTH, n(2, high=4)],
        x(),
        note="mask and index",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "indices of inner dimensions have dynamic shapes",
        "aten.index_put.default",
        w(5, 4, 3),
        [None, n(2, 3, high=4)],
        x(1),
        note="inner indices of dynamic shapes",
        dynamic=True,
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "the number of elements that the mask selects is dynamic",
        "aten.index_put.default",
        x(5, 2, 4),
        [None, _BOTH],
        x(5, 2, 4),
        note="inner mask of known number",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "'self' has dynamic shape",
        "aten.index_put.default",
        x(5, 4),
        [_ROWS],
        x(1, 1),
        note="dynamic",
        dynamic=True,
    ),
)
