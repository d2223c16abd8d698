"""Calls of ops that choose among boxes."""

from __future__ import annotations

from ops.op_samples.sample import Rejected, accept, i, reject, x

from coreml_delegate.ops import ReasonCode
from coreml_delegate.targets import Opset

_NMS = "coreml_delegate.nms.default"
# Two images: boxes that overlap much, a little and not at all.
_BOXES = x(
    values=[
        [[0.0, 0, 4, 4], [0, 1, 4, 5], [3, 3, 7, 7], [8, 8, 9, 9], [0, 0, 4, 3]],
        [[0.0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 4]],
    ]
)
_ONE_CLASS = x(values=[[[0.5], [0.9], [0.4], [0.1], [0.7]], [[0.3], [0.2], [0.1], [0.6], [0.5]]])
_CLASSES = x(
    values=[
        [[0.5, 0.1], [0.1, 0.9], [0.4, 0.3], [0.1, 0.0], [0.1, 0.7]],
        [[0.3, 0.1], [0.1, 0.2], [0.1, 0.0], [0.6, 0.1], [0.5, 0.1]],
    ]
)

ACCEPTED = (
    accept(_NMS, _BOXES, _ONE_CLASS, 0.5, 5, False),
    accept(_NMS, _BOXES, _ONE_CLASS, 0.5, 2, False, note="few"),
    accept(_NMS, _BOXES, _ONE_CLASS, 0.5, 8, False, note="more than boxes"),
    accept(_NMS, _BOXES, _ONE_CLASS, 0.0, 5, False, note="touching none"),
    accept(_NMS, _BOXES, _CLASSES, 0.5, 5, True, note="per class"),
    accept(_NMS, _BOXES, _CLASSES, 0.5, 5, False, note="best class"),
    accept(_NMS, _BOXES, _CLASSES, 0.5, 5, True, note="iOS17", target_opset=Opset.iOS17),
)

REJECTED: tuple[Rejected, ...] = (
    reject(
        ReasonCode.DTYPE,
        "argument 'boxes' is int64, Core ML takes float32 here",
        _NMS,
        i(1, 5, 4),
        x(1, 5, 1),
        0.5,
        5,
        False,
        note="whole",
    ),
)
