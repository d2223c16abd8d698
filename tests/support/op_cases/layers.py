"""Non-maximum suppression and quantization."""

from __future__ import annotations

import numpy as np
import torch

from coreml_delegate.targets import Opset
from support.op_cases.case import OpCase, normal

_I16, _I17 = Opset.iOS16, Opset.iOS17


# Two boxes that overlap by 9 of 11 tenths, one apart from both.
_BOXES = np.array([[[0, 0, 2, 2], [0.2, 0, 2, 2], [5, 5, 2, 2]]], np.float32)
_SCORES = np.array([[[0.5, 0.1], [0.9, 0.2], [0.1, 0.3]]], np.float32)
_NMS = {"iou_threshold": np.float32(0.5)}


def _select(boxes, scores, order, count, width):
    indices = torch.full((width,), -1)
    indices[:count] = torch.tensor(order)
    rows = [boxes[0, i] if i >= 0 else torch.zeros(4) for i in indices]
    values = [scores[0, i] if i >= 0 else torch.zeros(2) for i in indices]
    return [torch.stack(rows)[None], torch.stack(values)[None], indices[None].int()]


DETECTION = [
    OpCase(
        "non_maximum_suppression",
        note,
        {"boxes": _BOXES, "scores": scores},
        {**_NMS, "score_threshold": np.float32(0.05)},
        {"max_boxes": 4, "per_class_suppression": per_class},
        _I16,
        expected=lambda boxes, scores, o=order, **_: [
            *_select(boxes, scores, o, len(o), 4),
            torch.tensor([len(o)], dtype=torch.int32),
        ],
    )
    for note, scores, per_class, order in (
        ("all-classes", _SCORES, False, [1, 2]),
        ("per-class-same", _SCORES, True, [1, 2]),
        (
            "per-class-other",
            np.array([[[0.5, 0.1], [0.2, 0.9], [0.1, 0.3]]], np.float32),
            True,
            [1, 0, 2],
        ),
        ("threshold-keeps-best", np.full((1, 3, 2), 0.01, np.float32), False, [0]),
    )
] + [
    OpCase(
        "non_maximum_suppression",
        "boxes-last",
        {"boxes": _BOXES.swapaxes(1, 2).copy(), "scores": _SCORES.swapaxes(1, 2).copy()},
        _NMS,
        {"max_boxes": 2},
        _I17,
        expected=lambda boxes, scores, **_: [
            r.mT if r.is_floating_point() else r for r in _select(boxes.mT, scores.mT, [1, 2], 2, 2)
        ],
    ),
]

_LEVELS = np.array([[0, 5, -7], [100, 127, -128]], np.int8)

QUANTIZE = [
    OpCase(
        "quantize",
        "channel",
        {"input": normal(2, 3, scale=20)},
        {"scale": np.array([0.25, 0.5, 0.125], np.float32)},
        {"zero_point": np.array([1, -2, 3], np.int8), "axis": 1, "output_dtype": "int8"},
        _I17,
    ),
    OpCase(
        "quantize",
        "scalar-saturates",
        {"input": np.array([-9.0, 0.25, 0.75, 300.0], np.float32)},
        {"scale": np.float32(0.5)},
        {"output_dtype": "uint8"},
        _I17,
    ),
    OpCase(
        "dequantize",
        "channel",
        {"input": _LEVELS},
        {"scale": np.array([0.5, 0.25], np.float32)},
        {"zero_point": np.array([3, -100], np.int8), "axis": 0},
        _I17,
        expected=lambda input, scale: (
            (input.float() - torch.tensor([[3], [-100]])) * scale[:, None]
        ),
    ),
    OpCase(
        "dequantize",
        "scalar",
        {"input": _LEVELS},
        {"scale": np.float32(0.5)},
        {},
        _I17,
        expected=lambda input, scale: input.float() * 0.5,
    ),
]

CASES = [*DETECTION, *QUANTIZE]
