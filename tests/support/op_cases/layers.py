"""Recurrent layers, non-maximum suppression and quantization."""

from __future__ import annotations

import numpy as np
import torch

from coreml_delegate.runtime.mil.opset import Opset
from support.op_cases.case import OpCase, normal

_I16, _I17 = Opset.iOS16, Opset.iOS17


def _gates(cell: torch.nn.RNNBase, order: list[int]) -> dict[str, np.ndarray]:
    """Weights of a torch layer with its gates in MIL's order, biases as they are there."""

    def reordered(tensor: torch.Tensor) -> np.ndarray:
        parts = tensor.detach().chunk(len(order))
        return torch.cat([parts[i] for i in order]).numpy()

    return {name: reordered(p) for name, p in cell.named_parameters()}


def _layer(kind: type[torch.nn.RNNBase], **options) -> torch.nn.RNNBase:
    torch.manual_seed(0)
    return kind(3, 4, **options)


_LSTM, _BOTH = _layer(torch.nn.LSTM), _layer(torch.nn.LSTM, bidirectional=True)
_GRU, _RNN = _layer(torch.nn.GRU), _layer(torch.nn.RNN)
_SEQUENCE, _H, _C = normal(5, 2, 3), normal(2, 4, seed=1), normal(2, 4, seed=2)
_H2, _C2 = normal(2, 8, seed=1), normal(2, 8, seed=2)


def _last(sequence: torch.Tensor, every: bool) -> torch.Tensor:
    return sequence if every else sequence[-1:]


def _run_lstm(x, initial_h, initial_c, every, direction, **_):
    x = x.flip(0) if direction == "reverse" else x
    sequence, (h, c) = _LSTM(x, (initial_h[None], initial_c[None]))
    return [t.detach() for t in (_last(sequence, every), h[0], c[0])]


def _run_both(x, initial_h, initial_c, every, **_):
    def split(state):
        return torch.stack(state.split(4, dim=1))

    sequence, (h, c) = _BOTH(x, (split(initial_h), split(initial_c)))
    joined = torch.cat([*h], dim=1)
    return [
        t.detach() for t in (sequence if every else joined[None], joined, torch.cat([*c], dim=1))
    ]


def _lstm_weights(cell: torch.nn.RNNBase, suffix: str = "") -> dict[str, np.ndarray]:
    gates = _gates(cell, [0, 1, 3, 2])
    back = "_back" if suffix else ""
    return {
        f"weight_ih{back}": gates[f"weight_ih_l0{suffix}"],
        f"weight_hh{back}": gates[f"weight_hh_l0{suffix}"],
        f"bias{back}": gates[f"bias_ih_l0{suffix}"] + gates[f"bias_hh_l0{suffix}"],
    }


def _run_gru(x, initial_h, **_):
    sequence, h = _GRU(x, initial_h[None])
    return [sequence.detach(), h[0].detach()]


def _reset_before(x, initial_h, weight_ih, weight_hh, bias):
    h = initial_h
    for step in x:
        reset, new, update = (step @ weight_ih.T + bias).chunk(3, dim=1)
        by_reset, by_new, by_update = weight_hh.chunk(3)
        r, z = torch.sigmoid(reset + h @ by_reset.T), torch.sigmoid(update + h @ by_update.T)
        h = (1 - z) * torch.tanh(new + (r * h) @ by_new.T) + z * h
    return [h[None], h]


def _run_rnn(x, initial_h, **_):
    sequence, h = _RNN(x, initial_h[None])
    return [_last(sequence, False).detach(), h[0].detach()]


_GRU_GATES = _gates(_GRU, [0, 2, 1])
_RNN_GATES = _gates(_RNN, [0])

RECURRENT = [
    *(
        OpCase(
            "lstm",
            f"{direction}-{every}",
            {"x": _SEQUENCE, "initial_h": _H, "initial_c": _C},
            _lstm_weights(_LSTM),
            {"direction": direction, "output_sequence": every},
            expected=lambda e=every, d=direction, **v: _run_lstm(every=e, direction=d, **v),
        )
        for direction in ("forward", "reverse")
        for every in (True, False)
    ),
    *(
        OpCase(
            "lstm",
            f"bidirectional-{every}",
            {"x": _SEQUENCE, "initial_h": _H2, "initial_c": _C2},
            {**_lstm_weights(_BOTH), **_lstm_weights(_BOTH, "_reverse")},
            {"direction": "bidirectional", "output_sequence": every},
            expected=lambda e=every, **v: _run_both(every=e, **v),
        )
        for every in (True, False)
    ),
    OpCase(
        "gru",
        "reset-after",
        {"x": _SEQUENCE, "initial_h": _H},
        {
            "weight_ih": _GRU_GATES["weight_ih_l0"],
            "weight_hh": _GRU_GATES["weight_hh_l0"],
            "bias": _GRU_GATES["bias_hh_l0"],
            "input_bias": _GRU_GATES["bias_ih_l0"],
        },
        {"reset_after": True, "output_sequence": True},
        expected=_run_gru,
    ),
    OpCase(
        "gru",
        "reset-before",
        {"x": _SEQUENCE, "initial_h": _H},
        {
            "weight_ih": _GRU_GATES["weight_ih_l0"],
            "weight_hh": _GRU_GATES["weight_hh_l0"],
            "bias": _GRU_GATES["bias_hh_l0"],
        },
        opset=_I17,
        expected=_reset_before,
    ),
    OpCase(
        "rnn",
        "last",
        {"x": _SEQUENCE, "initial_h": _H},
        {
            "weight_ih": _RNN_GATES["weight_ih_l0"],
            "weight_hh": _RNN_GATES["weight_hh_l0"],
            "bias": _RNN_GATES["bias_ih_l0"] + _RNN_GATES["bias_hh_l0"],
        },
        expected=_run_rnn,
    ),
]

# Two boxes that overlap by 9 of 11 tenths, one apart from both.
_BOXES = np.array([[[0, 0, 2, 2], [0.2, 0, 2, 2], [5, 5, 2, 2]]], np.float32)
_SCORES = np.array([[[0.5, 0.1], [0.9, 0.2], [0.1, 0.3]]], np.float32)
_NMS = {"iou_threshold": np.float32(0.5)}


def _kept(boxes, scores, order, count, width):
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
            *_kept(boxes, scores, o, len(o), 4),
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
            r.mT if r.is_floating_point() else r for r in _kept(boxes.mT, scores.mT, [1, 2], 2, 2)
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

CASES = [*RECURRENT, *DETECTION, *QUANTIZE]
