"""Resizing, recurrence, detection, compressed weights and quantization."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.runtime.mil.opset import Opset
from support.op_cases.case import OpCase, normal, uniform

_I15, _I16, _I17 = Opset.iOS15, Opset.iOS16, Opset.iOS17
_IMAGE = normal(2, 3, 5, 4)


def _interpolate(mode: str = "bilinear", **options):
    return lambda x, **_: F.interpolate(x, mode=mode, **options)


# Positions at which a row of two pixels, 0 and 1, is sampled five times: the table in the
# documentation of resize_bilinear.
_FIVE_OF_TWO = {
    "STRICT_ALIGN_CORNERS": [0, 0.25, 0.5, 0.75, 1],
    "ALIGN_CORNERS": [0, 0.25, 0.5, 0.75, 1],
    "DEFAULT": [0, 0.4, 0.8, 1, 1],
    "OFFSET_CORNERS": [0.1, 0.3, 0.5, 0.7, 0.9],
    "UNALIGN_CORNERS": [0, 0.1, 0.5, 0.9, 1],
}
_ROW = np.array([[[0, 1]]], dtype=np.float32)

RESIZE = [
    *(
        OpCase(
            "upsample_bilinear",
            f"align-{align}",
            {"x": _IMAGE},
            {},
            {"scale_factor_height": 2, "scale_factor_width": 3, "align_corners": align},
            opset,
            expected=_interpolate(scale_factor=(2, 3), align_corners=align),
        )
        for align in (True, False)
        for opset in (_I15, _I16)
    ),
    OpCase(
        "upsample_bilinear",
        "fractional",
        {"x": _IMAGE},
        {},
        {
            "scale_factor_height": np.float32(2.5),
            "scale_factor_width": np.float32(1.5),
            "align_corners": False,
        },
        expected=_interpolate(size=(12, 6), align_corners=False),
    ),
    OpCase(
        "upsample_bilinear",
        "corners",
        {"x": np.array([[[[1, 2]]]], dtype=np.float32)},
        {},
        {"scale_factor_width": 3, "align_corners": False, "half_pixel_centers": False},
        expected=lambda x: torch.tensor([[[[1, 4 / 3, 5 / 3, 2, 2, 2]]]]),
    ),
    OpCase(
        "upsample_nearest_neighbor",
        "2x3",
        {"x": _IMAGE},
        {},
        {"scale_factor_height": 2, "scale_factor_width": 3},
        expected=_interpolate("nearest", scale_factor=(2, 3)),
    ),
    OpCase(
        "resize_nearest_neighbor",
        "down-up",
        {"x": _IMAGE},
        {},
        {"target_size_height": 3, "target_size_width": 7},
        expected=_interpolate("nearest", size=(3, 7)),
    ),
    *(
        OpCase(
            "resize_bilinear",
            mode.lower(),
            {"x": _ROW},
            {},
            {"target_size_height": 1, "target_size_width": 5, "sampling_mode": mode},
            expected=lambda x, p=positions: torch.tensor([[p]]),
        )
        for mode, positions in _FIVE_OF_TWO.items()
    ),
    OpCase(
        "resize_bilinear",
        "align-one",
        {"x": _ROW},
        {},
        {"target_size_height": 1, "target_size_width": 1, "sampling_mode": "ALIGN_CORNERS"},
        expected=lambda x: torch.tensor([[[0.5]]]),
    ),
    OpCase(
        "resize",
        "linear",
        {"x": _IMAGE},
        {},
        {"shape": [9, 0, 7], "resized_dims": np.uint32(2), "sampling_mode": "UNALIGN_CORNERS"},
        expected=_interpolate(size=(5, 7), align_corners=False),
    ),
    *(
        OpCase(
            "resize",
            f"nearest-{mode.lower()}",
            {"x": _IMAGE},
            {},
            {
                "shape": [3, 7],
                "resized_dims": np.uint32(2),
                "interpolation_mode": "NEAREST_NEIGHBOR",
                "sampling_mode": mode,
            },
            expected=_interpolate(torch_mode, size=(3, 7)),
        )
        for mode, torch_mode in (("DEFAULT", "nearest"), ("UNALIGN_CORNERS", "nearest-exact"))
    ),
]

_GRID_IMAGE = normal(2, 3, 4, 5)
_GRID = uniform(2, 6, 7, 2, low=-1.6, high=1.6, seed=1)
_PADDING = {"constant": "zeros", "border": "border", "reflection": "reflection"}


def _resample(note: str, coordinates, expected, **attributes) -> OpCase:
    return OpCase(
        "resample",
        note,
        {"x": _GRID_IMAGE, "coordinates": coordinates},
        {"padding_value": np.float32(attributes.pop("padding_value", 0))},
        {
            "sampling_mode": "bilinear",
            "padding_mode": "constant",
            "coordinates_mode": "normalized_minus_one_to_one",
            "align_corners": True,
            **attributes,
        },
        _I16,
        expected=lambda x, coordinates, padding_value: expected(x, coordinates),
    )


RESAMPLE = [
    *(
        _resample(
            f"{padding}-{mode}-align-{align}",
            _GRID,
            lambda x, c, m=mode, p=torch_padding, a=align: F.grid_sample(
                x, c, mode=m, padding_mode=p, align_corners=a
            ),
            padding_mode=padding,
            sampling_mode=mode,
            align_corners=align,
        )
        for padding, torch_padding in _PADDING.items()
        for mode in ("bilinear", "nearest")
        for align in (True, False)
        # MIL reflects about pixel centres whatever align_corners says; torch only if it is set.
        if padding != "reflection" or align
    ),
    _resample(
        "symmetric",
        _GRID,
        lambda x, c: F.grid_sample(x, c, padding_mode="reflection", align_corners=False),
        padding_mode="symmetric",
        align_corners=False,
    ),
    _resample(
        "padding-value",
        _GRID,
        lambda x, c: F.grid_sample(x - 2, c, align_corners=True) + 2,
        padding_value=2,
    ),
    _resample(
        "zero-to-one",
        _GRID,
        lambda x, c: F.grid_sample(x, 2 * c - 1, align_corners=True),
        coordinates_mode="normalized_zero_to_one",
    ),
    _resample(
        "unnormalized",
        np.array([[[[0, 0], [4, 3]]], [[[1, 2], [2, 1]]]], dtype=np.int32),
        lambda x, c: torch.stack(
            [x[n][:, c[n, :, :, 1].long(), c[n, :, :, 0].long()] for n in range(2)]
        ),
        coordinates_mode="unnormalized",
    ),
    OpCase(
        "affine",
        "map",
        {"x": _GRID_IMAGE, "transform_matrix": normal(2, 6, seed=2)},
        {"padding_value": np.float32(0)},
        {
            "output_height": 3,
            "output_width": 6,
            "sampling_mode": "bilinear",
            "padding_mode": "constant",
            "coordinates_mode": "normalized_minus_one_to_one",
            "align_corners": True,
        },
        expected=lambda x, transform_matrix, padding_value: F.grid_sample(
            x,
            F.affine_grid(transform_matrix.reshape(2, 2, 3), [2, 3, 3, 6], align_corners=True),
            align_corners=True,
        ),
        fp16=False,  # sampling positions rounded to fp16 are other positions
    ),
]

_SQUARE = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
_CROP = {"target_height": 2, "target_width": 2, "sampling_mode": "ALIGN_CORNERS"}


def _corners(x, top, left, bottom, right):
    return x[..., [top, top, bottom, bottom], [left, right, left, right]].reshape(-1, 1, 2, 2)


CROP_RESIZE = [
    *(
        OpCase(
            "crop_resize",
            note,
            {"x": _SQUARE, "roi": np.array(roi, np.float32).reshape(1, 1, -1, 1, 1)},
            {},
            {**_CROP, **attributes},
            opset,
            expected=lambda x, roi: _corners(x, 1, 0, 2, 3)[None],
        )
        for opset in (_I15, _I16)
        for note, roi, attributes in (
            ("corners", [1, 0, 2, 3], {}),
            ("width-first", [0, 1, 3, 2], {"box_coordinate_mode": "CORNERS_WIDTH_FIRST"}),
            ("centre", [1.5, 1.5, 1, 3], {"box_coordinate_mode": "CENTER_SIZE_HEIGHT_FIRST"}),
            ("scaled", [2, 0, 4, 6], {"spatial_scale": np.float32(0.5)}),
            ("indexed", [0, 1, 0, 2, 3], {}),
        )
    ),
    OpCase(
        "crop_resize",
        "outside",
        {"x": _SQUARE, "boxes": np.array([[-1, 0, 2, 3], [0, 0, 1, 1]], np.float32)},
        {"pad_value": np.float32(9)},
        {**_CROP, "box_indices": np.array([0, 0], np.int32)},
        expected=lambda x, boxes, pad_value: torch.cat(
            [
                torch.tensor([9.0, 9, float(x[0, 0, 2, 0]), float(x[0, 0, 2, 3])]).reshape(
                    1, 1, 2, 2
                ),
                _corners(x, 0, 0, 1, 1),
            ]
        ),
    ),
]


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

CASES = [*RESIZE, *RESAMPLE, *CROP_RESIZE, *RECURRENT, *DETECTION, *QUANTIZE]
