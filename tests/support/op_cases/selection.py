"""Gathering, scattering, sorting and creating values."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.targets import Opset
from support.mil import mb
from support.op_cases.case import OpCase, integers, normal

_X = normal(2, 3, 4)
_I15, _I16, _I17 = Opset.iOS15, Opset.iOS16, Opset.iOS17

_INDICES = np.array([[2, 0], [1, 1]], dtype=np.int32)
_ALONG = np.array([[0, 1, 2, 0], [2, 2, 1, 1]], dtype=np.int32)

GATHER = [
    *(
        OpCase("gather", f"axis{axis}", {"x": _X, "indices": _INDICES}, {}, {"axis": axis}, opset)
        for axis in (1, -1)
        for opset in (_I15, _I16, _I17)
    ),
    OpCase("gather", "scalar", {"x": _X}, {}, {"indices": np.int32(1), "axis": 1}),
    OpCase(
        "gather",
        "negative",
        {"x": _X, "indices": np.array([-1, 0], np.int32)},
        {},
        {"axis": 2},
        _I15,
    ),
    *(
        OpCase(
            "gather",
            f"batched-axis{axis}",
            {"x": normal(2, 3, 4), "indices": np.array([[0, 2], [1, 1]], np.int32)},
            {},
            {"axis": axis, "batch_dims": 1},
            opset,
        )
        for axis in (1, 2)
        for opset in (_I16, _I17)
    ),
    *(
        OpCase(
            "gather", dtype.__name__, {"x": _X, "indices": _INDICES.astype(dtype)}, {}, {"axis": 1}
        )
        for dtype in (np.uint16, np.int16, np.uint8, np.int8)
    ),
    *(
        OpCase(
            "gather_along_axis",
            "axis",
            {"x": normal(3, 4), "indices": _ALONG},
            {},
            {"axis": 0},
            opset,
        )
        for opset in (_I15, _I17)
    ),
    OpCase(
        "gather_along_axis",
        "negative",
        {"x": normal(3, 4), "indices": _ALONG - 3},
        {},
        {"axis": 0},
        _I15,
    ),
    *(
        OpCase(
            "gather_nd",
            "coordinates",
            {"x": _X, "indices": np.array([[[0, 2], [1, 0]]], np.int32)},
            opset=opset,
            expected=lambda x, indices: torch.stack([x[0, 2], x[1, 0]])[None],
        )
        for opset in (_I15, _I16, _I17)
    ),
    OpCase(
        "gather_nd",
        "batched",
        {"x": _X, "indices": np.array([[[2, 0], [1, 3]], [[0, 0], [2, 2]]], np.int32)},
        {},
        {"batch_dims": 1},
        expected=lambda x, indices: torch.stack(
            [torch.stack([x[0, 2, 0], x[0, 1, 3]]), torch.stack([x[1, 0, 0], x[1, 2, 2]])]
        ),
    ),
]

_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
_TWICE = np.array([0, 2, 0], dtype=np.int32)


def _scattered(mode: str, data, axis, index, updates):
    """Apply one update after the other."""
    result = data.clone()
    for position in np.ndindex(*updates.shape):
        target = list(position)
        target[axis] = int(index[position])
        old, new = result[tuple(target)], updates[position]
        result[tuple(target)] = {
            "update": new,
            "add": old + new,
            "sub": old - new,
            "mul": old * new,
            "div": old / new,
            "max": torch.maximum(old, new),
            "min": torch.minimum(old, new),
        }[mode]
    return result


SCATTER = [
    *(
        OpCase(
            "scatter",
            mode,
            {"data": normal(4, 3), "indices": _TWICE, "updates": normal(4, 3, seed=1) + 2},
            {},
            {"axis": 1, "mode": mode},
            opset,
            expected=lambda data, indices, updates, m=mode: _scattered(
                m, data, 1, indices.expand(4, 3), updates
            ),
        )
        for mode in ("update", "add", "sub", "mul", "div", "max", "min")
        for opset in (_I15, _I17)
        if mode != "update" or opset is _I15
    ),
    *(
        OpCase(
            "scatter_along_axis",
            mode,
            {"data": normal(3, 4), "indices": _ALONG, "updates": normal(2, 4, seed=1)},
            {},
            {"axis": 0, "mode": mode},
            opset,
            expected=lambda data, indices, updates, m=mode: _scattered(
                m, data, 0, indices, updates
            ),
        )
        for mode in ("update", "add", "mul")
        for opset in (_I15, _I17)
        if mode != "update"
    ),
    *(
        OpCase(
            "scatter_nd",
            mode,
            {
                "data": _X,
                "indices": np.array([[0, 2], [1, 1]], np.int32),
                "updates": normal(2, 4, seed=1),
            },
            {},
            {"mode": mode},
            opset,
            expected=lambda data, indices, updates, m=mode: _scattered(
                m,
                data.reshape(6, 4),
                0,
                torch.tensor([2, 4])[:, None].expand(2, 4),
                updates,
            ).reshape(2, 3, 4),
        )
        for mode in ("update", "add", "min")
        for opset in (_I15, _I17)
    ),
    OpCase(
        "scatter_nd",
        "int-div",
        {
            "data": np.array([7, -7, 9], np.int32),
            "indices": np.array([[0], [1]], np.int32),
            "updates": np.array([2, 2], np.int32),
        },
        {},
        {"mode": "div"},
        expected=lambda data, indices, updates: torch.tensor([3, -3, 9], dtype=torch.int32),
    ),
]

_DISTINCT = np.random.default_rng(3).permutation(24).reshape(4, 6)

ORDER = [
    *(
        OpCase(
            op,
            f"ascending-{a}-{label}",
            {"x": _DISTINCT.astype(dtype)},
            {},
            {"axis": axis, "ascending": a},
        )
        for op in ("argsort",)
        for a in (True, False)
        for axis in (0, -1)
        for label, dtype in ((f"float{axis}", np.float32), (f"int{axis}", np.int32))
    ),
    *(
        OpCase(
            "topk",
            f"ascending-{a}",
            {"x": _DISTINCT.astype(np.float32)},
            {},
            {"k": 3, "axis": 1, "ascending": a},
            opset,
        )
        for a in (True, False)
        for opset in (_I15, _I16, _I17)
    ),
    OpCase(
        "topk",
        "values",
        {"x": _DISTINCT.astype(np.float32)},
        {},
        {"k": 2, "return_indices": False},
        _I16,
    ),
    OpCase(
        "topk",
        "uint16",
        {"x": _DISTINCT.astype(np.float32)},
        {},
        {"k": 2, "output_indices_dtype": "uint16"},
    ),
    OpCase("argsort", "default", {"x": _DISTINCT.astype(np.float32)}),
]

MAKE = [
    OpCase("fill", "int", {"shape": np.array([2, 3], np.int32)}, {}, {"value": 7}),
    OpCase("fill", "bool", {"shape": np.array([2, 3], np.int32)}, {}, {"value": True}),
    OpCase("fill", "float", {"shape": np.array([2], np.int32)}, {"value": np.float32(0.5)}),
    OpCase("fill_like", "float", {"ref_tensor": _X}, {"value": np.float32(0.5)}),
    *(
        OpCase(
            "range_1d",
            note,
            {"end": np.array([end])},
            {"start": start, "step": step},
            arrange=lambda end: {"end": mb.squeeze(x=end, axes=[0])},
            expected=lambda end, start, step: torch.arange(
                float(start), float(end), float(step)
            ).to(end.dtype),
        )
        for note, end, start, step in (
            ("int", np.int32(9), np.int32(1), np.int32(3)),
            ("down", np.int32(-4), np.int32(5), np.int32(-2)),
            ("empty", np.int32(3), np.int32(3), np.int32(1)),
            ("float", np.float32(2), np.float32(0.5), np.float32(0.25)),
        )
    ),
    *(
        OpCase(
            "one_hot",
            f"axis{axis}",
            {"indices": np.array([1, 3, 0], np.int32)},
            {},
            {"one_hot_vector_size": 4, "axis": axis, "on_value": 5, "off_value": -1},
            expected=lambda indices, a=axis: torch.where(
                F.one_hot(indices.long(), 4).bool(), 5, -1
            ).movedim(-1, a),
        )
        for axis in (0, -1)
    ),
    OpCase("non_zero", "float", {"x": np.array([[0.0, 1.5], [0.0, -2.0]], np.float32)}),
    *(
        OpCase("band_part", f"{low},{up}", {"x": normal(2, 4, 5)}, {}, {"lower": low, "upper": up})
        for low, up in ((-1, 0), (0, -1), (1, 2), (-1, -1))
    ),
    OpCase("cumsum", "plain", {"x": _X}, {}, {"axis": 1}),
    OpCase("cumsum", "int-reverse", {"x": integers(3, 4)}, {}, {"axis": -1, "reverse": True}),
    *(
        OpCase(
            "cumsum",
            f"exclusive-{reverse}",
            {"x": _X},
            {},
            {"axis": 1, "exclusive": True, "reverse": reverse},
            expected=lambda x, r=reverse: x.flip(1).cumsum(1).flip(1) - x if r else x.cumsum(1) - x,
        )
        for reverse in (False, True)
    ),
    OpCase(
        "select",
        "broadcast",
        {"cond": np.array([True, False, True, False]), "a": _X, "b": -_X},
    ),
]

CASES = [*GATHER, *SCATTER, *ORDER, *MAKE]
