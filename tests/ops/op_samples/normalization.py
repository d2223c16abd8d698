"""Calls of normalizations."""

from __future__ import annotations

from ops.op_samples.sample import TensorArg, accept, reject, w, x

from coreml_delegate.ops import ReasonCode

P = {"low": 0.25, "high": 2.0}


def st(c):
    return (w(c), w(c), w(c), w(c, **P))


BN = "aten.batch_norm.default"
CBN = "aten._native_batch_norm_legit_no_training.default"
_LAYER_NORMS = (("layer_norm", None), ("native_layer_norm", (0,)))

_INSTANCE = "aten._native_batch_norm_legit.no_stats"

ACCEPTED = (
    *(
        accept(BN, x(*s), *st(3), False, 0.1, 1e-5, True, note=f"rank{len(s)}")
        for s in ((2, 3), (2, 3, 4), (2, 3, 4, 2), (1, 3, 2, 2, 2))
    ),
    accept(BN, x(2, 3, 4, 2), None, None, w(3), w(3, **P), False, 0.1, 1e-3, True, note="plain"),
    *(
        accept(CBN, x(*s), *st(3), 0.1, 1e-5, note=f"rank{len(s)}", takes=(0,))
        for s in ((2, 3), (2, 3, 4), (2, 3, 4, 2), (1, 3, 2, 2, 2))
    ),
    accept(CBN, x(2, 3, 4, 2), None, None, w(3), w(3, **P), 0.1, 1e-3, takes=(0,), note="plain"),
    accept(CBN, x(2, 3, 4, 2), w(3), None, w(3), w(3, **P), 0.1, 1e-3, takes=(0,), note="nobias"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], w(4), w(4)),
    accept("aten.layer_norm.default", x(2, 3, 4), [3, 4], w(3, 4), w(3, 4), 1e-3, note="two"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], note="plain"),
    accept("aten.layer_norm.default", x(2, 3, 4), [4], w(4), note="no-bias"),
    accept("aten.layer_norm.default", x(4), [4], w(4), w(4), note="rank1"),
    accept("aten.native_layer_norm.default", x(2, 3, 4), [4], w(4), w(4), 1e-5, takes=(0,)),
    accept(
        "aten.native_layer_norm.default",
        x(2, 3, 4),
        [4],
        None,
        None,
        1e-5,
        takes=(0,),
        note="plain",
    ),
    accept(
        "aten.native_layer_norm.default",
        x(2, 3, 4),
        [4],
        w(4),
        None,
        1e-5,
        takes=(0,),
        note="no-bias",
    ),
    accept("aten.group_norm.default", x(2, 4, 3), 2, w(4), w(4), note="rank3"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 2, w(4), w(4), 1e-3, note="rank4"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 4, None, None, note="plain"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 2, x(4), x(4), note="computed-affine"),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], x(4), note="computed-weight"),
    accept("aten.rms_norm.default", x(2, 3, 4, low=-400, high=400), [4], w(4), note="large"),
    accept("aten.rms_norm.default", w(values=[[0.0, 0.0], [1.0, 0.0]]), [2], w(2), note="zero"),
    accept("aten.layer_norm.default", x(1, 2, 2, 3, 4), [4], w(4), w(4), note="rank5-affine"),
    accept("aten.group_norm.default", x(2, 4, 3, 2), 1, w(4), None, note="no-bias"),
    accept("aten.group_norm.default", x(1, 4), 2, w(4), w(4), note="rank2"),
    accept(
        "aten.native_group_norm.default", x(2, 4, 3, 2), w(4), w(4), 2, 4, 6, 2, 1e-5, takes=(0,)
    ),
    accept(
        "aten.native_group_norm.default",
        x(2, 4, 3, 2),
        None,
        None,
        2,
        4,
        6,
        2,
        1e-5,
        takes=(0,),
        note="plain",
    ),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], w(4)),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], w(4), 1e-3, note="eps"),
    accept("aten.rms_norm.default", x(2, 3, 4), [4], None, 1e-3, note="plain"),
    accept("aten.rms_norm.default", x(2, 3, 4), [3, 4], w(3, 4), note="two"),
    accept("aten.rms_norm.default", x(2, 3, 4, low=-0.0002, high=0.0002), [4], w(4), note="tiny"),
    *(
        accept(f"aten.{op}.default", x(2, 3, 4), [4], weight, bias, 1e-5, takes=takes, note=note)
        for op, takes in _LAYER_NORMS
        for note, weight, bias in (
            ("weight", x(4), None),
            ("computed", w(4), x(4)),
            ("only-bias", None, w(4)),
        )
    ),
    accept("aten.group_norm.default", x(1, 4, 2, 3, 2), 2, w(4), w(4), note="rank5"),
    accept(
        "aten.native_group_norm.default",
        x(1, 4, 2, 3, 2),
        w(4),
        w(4),
        1,
        4,
        12,
        2,
        1e-5,
        takes=(0,),
        note="rank5",
    ),
    accept(_INSTANCE, x(2, 3, 4, 5), None, None, True, 0.1, 1e-5, takes=(0,)),
    accept(_INSTANCE, x(2, 3, 6), w(3), w(3), True, 0.1, 1e-5, takes=(0,), note="affine"),
)
_COMPUTED = "is computed, Core ML takes a constant"
_STATISTICS = ("weight", "bias", "running_mean", "running_var")


def _statistics(computed: str) -> list[TensorArg]:
    """The tensors after the input of batch norm, one of them no constant."""
    limits = {name: P if name == "running_var" else {} for name in _STATISTICS}
    return [(x if n == computed else w)(3, **limits[n]) for n in _STATISTICS]


REJECTED = (
    *(
        reject(
            ReasonCode.ARGUMENT,
            f"{n!r} {_COMPUTED}",
            BN,
            x(2, 3, 4),
            *_statistics(n),
            False,
            0.1,
            1e-5,
            True,
            note=n,
        )
        for n in _STATISTICS
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            f"{n!r} {_COMPUTED}",
            CBN,
            x(2, 3, 4),
            *_statistics(n),
            0.1,
            1e-5,
            takes=(0,),
            note=n,
        )
        for n in _STATISTICS
    ),
    reject(
        ReasonCode.ARGUMENT,
        "training=True, Core ML takes False",
        BN,
        x(2, 3, 4),
        w(3),
        w(3),
        None,
        None,
        True,
        0.1,
        1e-5,
        True,
        note="training",
    ),
    reject(
        ReasonCode.USE,
        "result 1 is used, Core ML has only result 0",
        "aten.native_layer_norm.default",
        x(2, 3, 4),
        [4],
        w(4),
        w(4),
        1e-5,
        takes=(0, 1),
        note="mean",
    ),
    reject(
        ReasonCode.USE,
        "result 1 is used, Core ML has only result 0",
        "aten.native_group_norm.default",
        x(2, 4, 3),
        w(4),
        w(4),
        2,
        4,
        3,
        2,
        1e-5,
        takes=(0, 1),
        note="mean",
    ),
    reject(
        ReasonCode.USE,
        "result 1 is used, Core ML has only result 0",
        _INSTANCE,
        x(2, 3, 4),
        None,
        None,
        True,
        0.1,
        1e-5,
        takes=(0, 1),
        note="mean",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "'input' has dynamic shape",
        "aten.group_norm.default",
        x(1, 4, 2, 3, 5),
        2,
        note="dynamic",
        dynamic=True,
    ),
)
