"""Calls of normalizations."""

from __future__ import annotations

import torch

from coreml_delegate.op_rules import ReasonCode
from ops.op_samples.sample import accept, b, i, reject, w, x
P={"low":0.25,"high":2.0}
def st(c): return (w(c),w(c),w(c),w(c,**P))
BN="aten.batch_norm.default"; CBN="aten._native_batch_norm_legit_no_training.default"
ACCEPTED = (
    *(accept(BN, x(*s), *st(3), False, 0.1, 1e-5, True, note=f"rank{len(s)}") for s in ((2,3),(2,3,4),(2,3,4,2),(1,3,2,2,2))),
    accept(BN, x(2,3,4,2), None, None, w(3), w(3,**P), False, 0.1, 1e-3, True, note="plain"),
    *(accept(CBN, x(*s), *st(3), 0.1, 1e-5, note=f"rank{len(s)}", takes=(0,)) for s in ((2,3),(2,3,4),(2,3,4,2),(1,3,2,2,2))),
    accept(CBN, x(2,3,4,2), None, None, w(3), w(3,**P), 0.1, 1e-3, takes=(0,), note="plain"),
    accept(CBN, x(2,3,4,2), w(3), None, w(3), w(3,**P), 0.1, 1e-3, takes=(0,), note="nobias"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], w(4), w(4)),
    accept("aten.layer_norm.default", x(2, 3, 4), [3, 4], w(3, 4), w(3, 4), 1e-3, note="two"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], note="plain"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], w(4), note="no-bias"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], None,w(4), note="only-bias"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], x(4), x(4), note="computed"),
    accept("aten.layer_norm.default", x(4), [4], w(4), w(4), note="rank1"),
    accept("aten.layer_norm.default", x(1,2,2,3,4), [4], w(4), w(4), note="rank5"),
    accept("aten.native_layer_norm.default", x(2, 3, 4), [4], w(4), w(4), 1e-5, takes=(0,)),
    accept("aten.native_layer_norm.default", x(2, 3, 4), [4], None, None, 1e-5, takes=(0,), note="plain"),
    accept("aten.native_layer_norm.default", x(2, 3, 4), [4], w(4), None, 1e-5, takes=(0,), note="no-bias"),
    accept("aten.native_layer_norm.default", x(2, 3, 4), [4], x(4), x(4), 1e-5, takes=(0,), note="computed"),
    accept("aten.group_norm.default", x(2, 4, 3), 2, w(4), w(4), note="rank3"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 2, w(4), w(4), 1e-3, note="rank4"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 4, None, None, note="plain"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 1, w(4), None, note="no-bias"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 2, x(4), x(4), note="computed"),
    accept("aten.group_norm.default", x(1, 4, 2,3, 2), 2, w(4), w(4), note="rank5"),
    accept("aten.group_norm.default", x(1, 4), 2, w(4), w(4), note="rank2"),
    accept("aten.native_group_norm.default", x(2, 4, 3, 2), w(4), w(4), 2,4,6,2,1e-5,takes=(0,)),
    accept("aten.native_group_norm.default", x(2, 4, 3, 2), None,None, 2,4,6,2,1e-5,takes=(0,),note='plain'),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], w(4)),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], w(4), 1e-3, note="eps"),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], None, 1e-3, note="plain"),
    accept("aten.rms_norm.default", x(2, 3, 4), [3, 4], w(3, 4), note="two"),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], x(4), note="computed"),
    accept("aten.rms_norm.default", x(2, 3, 4,low=-.0002,high=.0002), [4], w(4), note="tiny"),
    accept("aten.instance_norm.default", x(2, 3, 4,2), w(3),w(3),None,None,True,0.1,1e-5,True),
    accept("aten.instance_norm.default", x(2, 3, 4), w(3),w(3),None,None,True,0.1,1e-5,True,note='rank3'),
)
REJECTED=()
