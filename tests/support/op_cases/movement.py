"""Reshaping, rearranging, joining and slicing."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.targets import Opset
from support.mil import mb
from support.op_cases.case import OpCase, normal, together

_X = normal(2, 3, 4)
_MATRIX = normal(4, 5)
_IMAGE = normal(2, 8, 4, 6)
_I15, _I16, _I17, _I18 = Opset.iOS15, Opset.iOS16, Opset.iOS17, Opset.iOS18

SHAPE = [
    *(
        OpCase("reshape", f"{note}", {"x": _X}, {}, {"shape": shape}, opset)
        for opset in (_I15, _I17)
        for note, shape in (("minus-one", [4, -1]), ("plain", [3, 8]), ("zero", [0, -1, 2]))
    ),
    OpCase("reshape", "zero-right-aligned", {"x": normal(2, 50)}, {}, {"shape": [1, 0, -1, 0]}),
    OpCase(
        "reshape_like",
        "two-references",
        {"x": normal(60), "a": normal(2, 3, 4), "b": normal(1, 5, 2)},
        {},
        {"begins": [0, 1], "ends": [2, 0], "end_masks": [False, True]},
        arrange=lambda x, a, b: {"x": x, "ref_tensors": (a, b)},
        expected=lambda x, a, b: x.reshape(2, 3, 5, 2),
    ),
    *(OpCase("flatten2d", f"axis{a}", {"x": _X}, {}, {"axis": a}) for a in (1, 2, -1)),
    OpCase("expand_dims", "several", {"x": _X}, {}, {"axes": [0, -1, 2]}),
    OpCase("squeeze", "axes", {"x": normal(1, 2, 1, 3)}, {}, {"axes": [0, -2]}),
    OpCase("squeeze", "all", {"x": normal(1, 2, 1, 3)}),
    OpCase("transpose", "negative", {"x": _X}, {}, {"perm": [-1, 0, 1]}),
    OpCase("reverse", "axes", {"x": _X}, {}, {"axes": [0, -1]}),
    OpCase("reverse", "all", {"x": _X}),
    OpCase("identity", "plain", {"x": _X}),
    OpCase("shape", "plain", {"x": _X}),
    OpCase(
        "reverse_sequence",
        "batch-after-sequence",
        {"x": normal(4, 2, 3), "lengths": np.array([3, 0], dtype=np.int32)},
        {},
        {"seq_axis": 0, "batch_axis": 1},
        expected=lambda x, lengths: torch.stack([x[[2, 1, 0, 3], 0], x[:, 1]], dim=1),
    ),
    OpCase(
        "sliding_windows",
        "strided",
        {"x": normal(2, 9, 3)},
        {},
        {"axis": 1, "size": 4, "stride": 2},
        expected=lambda x: torch.stack([x[:, i : i + 4] for i in (0, 2, 4)], dim=1),
    ),
]


def _space_to_batch(x: torch.Tensor, block: int) -> torch.Tensor:
    return torch.cat([x[:, :, i::block, j::block] for i in range(block) for j in range(block)])


def _space_to_depth(x: torch.Tensor, block: int) -> torch.Tensor:
    parts = [x[:, :, i::block, j::block] for i in range(block) for j in range(block)]
    return torch.cat(parts, dim=1)


def _depth_to_space(x: torch.Tensor, block: int) -> torch.Tensor:
    n, c, h, w = x.shape
    result = x.new_zeros(n, c // block**2, h * block, w * block)
    for k, part in enumerate(x.chunk(block**2, dim=1)):
        result[:, :, k // block :: block, k % block :: block] = part
    return result


BLOCKS = [
    OpCase(
        "depth_to_space",
        "2",
        {"x": _IMAGE},
        {},
        {"block_size": 2},
        expected=lambda x: _depth_to_space(x, 2),
    ),
    OpCase(
        "space_to_depth",
        "2",
        {"x": _IMAGE},
        {},
        {"block_size": 2},
        expected=lambda x: _space_to_depth(x, 2),
    ),
    OpCase(
        "pixel_shuffle",
        "2",
        {"x": _IMAGE},
        {},
        {"upscale_factor": 2},
        expected=lambda x: F.pixel_shuffle(x, 2),
    ),
    OpCase(
        "pixel_unshuffle",
        "2",
        {"x": _IMAGE},
        {},
        {"downscale_factor": np.uint32(2)},
        expected=lambda x: F.pixel_unshuffle(x, 2),
    ),
    OpCase(
        "space_to_batch",
        "padded",
        {"x": _IMAGE},
        {},
        {"block_shape": [2, 2], "paddings": [[1, 1], [0, 2]]},
        expected=lambda x: _space_to_batch(F.pad(x, (0, 2, 1, 1)), 2),
    ),
    OpCase(
        "batch_to_space",
        "cropped",
        {"x": normal(8, 3, 2, 3)},
        {},
        {"block_shape": [2, 2], "crops": [[1, 0], [0, 2]]},
        expected=lambda x: torch.cat(
            [_depth_to_space(x[n::2].reshape(1, 12, 2, 3), 2) for n in range(2)]
        )[:, :, 1:, :-2],
    ),
]

JOINS = [
    OpCase(
        "concat",
        "axis",
        {"a": _X, "b": normal(2, 1, 4)},
        {},
        {"axis": -2},
        arrange=together,
    ),
    OpCase(
        "concat",
        "interleave",
        {"a": normal(3, 2), "b": normal(3, 2, seed=1)},
        {},
        {"axis": 0, "interleave": True},
        arrange=together,
        expected=lambda a, b: torch.stack([a, b], dim=1).reshape(6, 2),
    ),
    OpCase("stack", "axis", {"a": _X, "b": _X + 1}, {}, {"axis": -1}, arrange=together),
    OpCase(
        "split",
        "equal",
        {"x": normal(2, 6)},
        {},
        {"num_splits": 3, "axis": -1},
        expected=lambda x: x.split(2, dim=-1),
    ),
    OpCase(
        "split",
        "sizes",
        {"x": normal(6, 2)},
        {},
        {"split_sizes": [1, 3, 2], "axis": 0},
        expected=lambda x: x.split([1, 3, 2]),
    ),
    OpCase("tile", "all", {"x": _X}, {}, {"reps": [2, 1, 3]}),
    *(
        OpCase("pad", f"{mode}", {"x": _X}, {}, {"pad": [1, 0, 2, 1], "mode": mode})
        for mode in ("constant", "reflect", "replicate")
    ),
    OpCase(
        "pad",
        "value-all-dimensions",
        {"x": _X},
        {"constant_val": np.float32(1.5)},
        {"pad": [0, 1, 2, 0, 1, 1]},
    ),
    OpCase("pad", "reflect-far", {"x": normal(1, 5)}, {}, {"pad": [4, 4], "mode": "reflect"}),
    OpCase(
        "crop",
        "both",
        {"x": _IMAGE},
        {},
        {"crop_height": [1, 0], "crop_width": [2, 1]},
        expected=lambda x: x[:, :, 1:, 2:-1],
    ),
]

_BEGIN_END = {"begin": [1, -4, 0], "end": [2, -1, 9]}

SLICES = [
    OpCase("slice_by_index", "plain", {"x": _X}, {}, _BEGIN_END),
    OpCase(
        "slice_by_index",
        "masks",
        {"x": _X},
        {},
        {
            "begin": [0, 2, 1],
            "end": [0, 0, -1],
            "stride": [1, 2, 1],
            "begin_mask": [True, False, False],
            "end_mask": [True, True, False],
        },
    ),
    OpCase(
        "slice_by_index",
        "negative-strides",
        {"x": normal(5, 6)},
        {},
        {"begin": [-1, 4], "end": [0, 0], "stride": [-2, -1], "end_mask": [True, False]},
        expected=lambda x: x.flip(0)[::2].flip(1)[:, 1:5],
    ),
    OpCase(
        "slice_by_index",
        "squeeze",
        {"x": _X},
        {},
        {
            "begin": [0, -1, 0],
            "end": [0, 0, 0],
            "end_mask": [True, False, True],
            "squeeze_mask": [False, True, False],
        },
    ),
    OpCase(
        "slice_by_index",
        "int16-bounds",
        {"x": _X, "begin": np.array([0, 1, 2], np.int16), "end": np.array([2, 3, 4], np.int16)},
        opset=_I17,
        expected=lambda x, begin, end: x[0:2, 1:3, 2:4],
    ),
    OpCase("slice_by_size", "rest", {"x": _X}, {}, {"begin": [0, 1, -2], "size": [1, -1, 2]}),
    OpCase(
        "slice_update",
        "negative-stride",
        {"x": normal(5, 6), "update": normal(3, 2, seed=1)},
        {},
        {"begin": [-1, 1], "end": [0, 3], "stride": [-2, 1], "end_mask": [True, False]},
        expected=lambda x, update: (
            x.flip(0)
            .slice_scatter(x.flip(0)[::2].slice_scatter(update, 1, 1, 3), 0, step=2)
            .flip(0)
        ),
    ),
    OpCase(
        "slice_update",
        "squeeze",
        {"x": _X, "update": normal(2, 4, seed=1)},
        {},
        {"begin": [0, 1, 0], "end": [2, 2, 4], "squeeze_mask": [False, True, False]},
        expected=lambda x, update: x.select_scatter(update, 1, 1),
    ),
    OpCase(
        "slice_update",
        "by-a-slice-at-a-place-known-at-run-time",
        {"x": _X, "begin": np.array([1, 0, 0], np.int32)},
        {},
        {"begin": [0, 0, 0], "end": [1, 3, 4]},
        arrange=lambda x, begin: {
            "x": x,
            "update": mb.slice_by_size(x=x, begin=begin, size=[1, 3, 4]),
        },
        expected=lambda x, begin: x[[1, 1]],
    ),
]

CASES = [*SHAPE, *BLOCKS, *JOINS, *SLICES]
