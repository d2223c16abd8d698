"""Calls of ops that gather and scatter by index."""

from __future__ import annotations

import torch

from coreml_delegate.op_rules import ReasonCode
from ops.op_samples.sample import accept, b, i, reject, w, x

def n(*shape, high=2, **o):
    return i(*shape, low=0, high=high, **o)

ACCEPTED = (
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4)], note="first"),
    accept("aten.index.Tensor", x(4, 3), [None, n(5, high=3)], note="second"),
    accept("aten.index.Tensor", x(4, 3), [n(2,2, high=4)], note="2d"),
    accept("aten.index.Tensor", x(4, 3,2), [None, n(2,2, high=3)], note="2d-second"),
    accept("aten.index.Tensor", x(4, 3), [i(5,low=-4,high=4)], note="negative"),
    accept("aten.index.Tensor", i(4, 3), [n(5, high=4)], note="int64"),
    accept("aten.index.Tensor", b(4, 3), [n(5, high=4)], note="bool"),
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4, dtype=torch.int32)], note="int32"),
    accept("aten.index.Tensor", x(4, 3), [w(3,values=[0,2,1],dtype=torch.int64)], note="constant"),
    accept("aten.index.Tensor", x(4, 3), [n(5, high=4),n(5,high=3)], note="two"),
    accept("aten.index.Tensor", x(4, 3), [n(5,1, high=4),n(1,2,high=3)], note="two-broadcast"),
    accept("aten.index.Tensor", x(4, 3,2), [None,n(5, high=3),n(5,high=2)], note="two-last"),
    accept("aten.index.Tensor", x(4, 3,2), [n(5, high=4),None,n(5,high=2)], note="apart"),
    accept("aten.index_select.default", x(4, 3), 0, n(5, high=4)),
    accept("aten.index_select.default", x(4, 3), -1, n(5, high=3), note="last"),
    accept("aten.index_select.default", x(4, 3), 1, n(5, high=3,dtype=torch.int32), note="int32"),
    accept("aten.index_select.default", i(4, 3), 1, n(5, high=3), note="int64"),
    accept("aten.index_select.default", x(4, 3), 1, n(high=3), note="rank0"),
    accept("aten.gather.default", x(4, 3), 1, n(4, 2, high=3)),
    accept("aten.gather.default", x(4, 3), 0, n(2, 3, high=4), note="first"),
    accept("aten.gather.default", x(4, 3), 0, n(2, 2, high=4), note="smaller"),
    accept("aten.gather.default", x(4, 3, 2), -1, n(4, 3, 5), note="rank3"),
    accept("aten.gather.default", x(4, 3, 2), -1, n(2, 3, 5), note="rank3smaller"),
    accept("aten.gather.default", i(4, 3), 1, n(4, 2, high=3), note="int64"),
    accept("aten.embedding.default", w(7, 3), n(2, 4, high=7)),
    accept("aten.embedding.default", w(7, 3), n(4, high=7, dtype=torch.int32), note="int32"),
    accept("aten.embedding.default", w(7, 3), n(4, high=7), 2, note="padding_idx"),
    accept("aten.embedding.default", x(7, 3), n(4, high=7), note="computed"),
    accept("aten.embedding.default", w(7, 3), n(high=7), note="rank0"),
    accept("aten.slice_scatter.default", x(5, 4), x(2, 4), 0, 1, 3),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 2), 1, 0, 4, 2, note="step"),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 2), -1, -2, note="negative"),
    accept("aten.slice_scatter.default", x(5, 4), x(2, 4), 0, 1, 3, note="neg"),
    accept("aten.slice_scatter.default", i(5, 4), i(2, 4), 0, 1, 3, note="int64"),
    accept("aten.slice_scatter.default", b(5, 4), b(2, 4), 0, 1, 3, note="bool"),
    accept("aten.slice_scatter.default", x(5, 4), x(2, 4), 0, 3, 9223372036854775807, note="end"),
    accept("aten.slice_scatter.default", x(5, 4), x(5, 4), note="all"),
    accept("aten.select_scatter.default", x(5, 4), x(4), 0, 1),
    accept("aten.select_scatter.default", x(5, 4), x(5), -1, -1,note='neg'),
    accept("aten.index_put.default", x(5, 4), [n(2,high=5)], x(2,4)),
    accept("aten.index_put.default", x(5, 4), [w(values=[0,3],dtype=torch.int64)], x(2,4),note='const'),
    accept("aten.index_put.default", x(5, 4), [w(values=[0,3],dtype=torch.int64)], x(2,4),True,note='accum'),
    accept("aten.index_put.default", x(5, 4), [None,w(values=[0,3],dtype=torch.int64)], x(5,2),note='second'),
    accept("aten.index_put.default", x(1,2,5, 4), [None,None,w(values=[0,3],dtype=torch.int64)], x(1,2,2,4),note='cache'),
    accept("aten.index_put.default", x(5, 4), [b(5,4)], x(),note='mask'),
    accept("aten.index_copy.default", x(5, 4), 0,w(values=[0,3],dtype=torch.int64), x(2,4)),
    accept("aten.scatter.src", x(5, 4), 0, w(values=[[0,3,1,2],[1,4,0,1]],dtype=torch.int64), x(2,4)),
    accept("aten.scatter.value", x(5, 4), 0, w(values=[[0,3,1,2],[1,4,0,1]],dtype=torch.int64), 0.5),
    accept("aten.scatter_add.default", x(5, 4), 0, w(values=[[0,3,1,2],[1,4,0,1]],dtype=torch.int64), x(2,4)),
    accept("aten.topk.default", x(3, 7), 3, takes=(0,1)),
    accept("aten.topk.default", x(3, 7), 3, 0,False, takes=(0,1),note='first-smallest'),
    accept("aten.topk.default", x(3, 7), 3, -1,True,False, takes=(0,1),note='unsorted'),
    accept("aten.topk.default", i(3, 7,low=-100,high=100), 3, takes=(0,1),note='int64'),
    accept("aten.sort.default", x(3, 7), takes=(0,1)),
    accept("aten.sort.default", x(3, 7),0,True, takes=(0,1),note='desc'),
    accept("aten.argsort.default", x(3, 7)),
)
REJECTED=()
