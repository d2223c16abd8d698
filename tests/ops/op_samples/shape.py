"""Calls of ops that move data."""

from __future__ import annotations

import torch
from ops.op_samples.sample import accept, b, i, reject, w, x

from coreml_delegate.ops import ReasonCode
from coreml_delegate.targets import Opset

END = 2**63 - 1

# Op, shape of the input, other arguments, note.
_MOVES = (
    ("view.default", (2, 6), ([3, 4],), ""),
    ("view.default", (2, 6), ([-1, 4],), "minus"),
    ("view.default", (1,), ([],), "torank0"),
    ("view.default", (), ([1, 1],), "fromrank0"),
    ("reshape.default", (2, 6), ([3, -1],), ""),
    ("permute.default", (2, 3, 4), ([2, 0, 1],), ""),
    ("permute.default", (2, 3, 4), ([-1, 0, -2],), "neg"),
    ("permute.default", (1, 2, 3, 2, 2), ([4, 2, 0, 1, 3],), "rank5"),
    ("transpose.int", (2, 3, 4), (0, -1), ""),
    ("clone.default", (2, 3), (), ""),
    ("clone.default", (), (), "rank0"),
    ("alias.default", (2, 3), (), ""),
    ("expand.default", (1, 3), ([4, 3],), ""),
    ("expand.default", (1, 3), ([2, 4, -1],), "newdim"),
    ("expand.default", (), ([2, 2],), "rank0"),
    ("select.int", (2, 3, 4), (1, -1), ""),
    ("select.int", (2, 3, 4), (-1, 2), "neg"),
    ("select.int", (3,), (0, 1), "rank1"),
    ("slice.Tensor", (5, 6), (0, 1, 4), ""),
    ("slice.Tensor", (5, 6), (1, 0, END, 2), "step"),
    ("slice.Tensor", (5, 6), (-1, -3, -1), "neg"),
    ("slice.Tensor", (5, 6), (1, None, 3), "none"),
    ("slice.Tensor", (5, 6), (1, 2, 100), "beyond"),
    ("split_with_sizes.default", (5, 6), ([1, 4],), ""),
    ("split_with_sizes.default", (5, 6), ([1, 2, 3], -1), "last"),
    ("split.Tensor", (5, 6), (2,), ""),
    ("split.Tensor", (5, 6), (3, -1), "last"),
    ("unbind.int", (3, 4), (), ""),
    ("unbind.int", (3, 4), (-1,), "last"),
    ("squeeze.dim", (2, 1, 3), (1,), ""),
    ("squeeze.dim", (2, 1, 3), (0,), "noop"),
    ("squeeze.dim", (1,), (0,), "torank0"),
    ("squeeze.dims", (1, 2, 1), ([0, -1],), ""),
    ("squeeze.dims", (1, 2, 1), ([0, 1],), "partial"),
    ("squeeze.default", (1, 2, 1), (), ""),
    ("squeeze.default", (2, 3), (), "noop"),
    ("unsqueeze.default", (2, 3), (1,), ""),
    ("unsqueeze.default", (2, 3), (-1,), "last"),
    ("unsqueeze.default", (), (0,), "rank0"),
    ("repeat.default", (2, 3), ([2, 1],), ""),
    ("repeat.default", (2, 3), ([2, 1, 2],), "newdim"),
    ("repeat.default", (2, 3), ([1, 1],), "noop"),
    ("repeat.default", (), ([3],), "rank0"),
    ("flip.default", (2, 3), ([0],), ""),
    ("flip.default", (2, 3, 4), ([0, -1],), "two"),
    ("select.int", (1, 2, 3, 2, 2), (1, -1), "rank5"),
    ("unsqueeze.default", (2, 3, 1, 2), (-1,), "rank5"),
)
_FLOAT_ONLY = (
    ("roll.default", (4, 5), ([1], [0]), ""),
    ("roll.default", (4, 5), ([-2, 1], [0, -1]), "two"),
    ("roll.default", (4, 5), ([7], [1]), "beyond"),
    ("constant_pad_nd.default", (2, 3), ([1, 2],), ""),
    ("constant_pad_nd.default", (2, 3), ([1, 2, 0, 1],), "two"),
    ("constant_pad_nd.default", (2, 3, 4, 2), ([1, 2, 0, 1, 2, 0, 1, 1],), "four"),
    ("constant_pad_nd.default", (3,), ([1, 1],), "rank1"),
    ("constant_pad_nd.default", (2, 3), ([1, 2], 0.75), "value"),
    ("constant_pad_nd.default", (2, 3), ([1, 2], 1), "intvalue"),
    ("pixel_shuffle.default", (1, 8, 3, 2), (2,), ""),
    ("pad.default", (2, 3), ([1, 2],), ""),
    ("pad.default", (2, 3), ([1, 2], "constant", 1.5), "value"),
    ("pad.default", (1, 2, 4, 5), ([1, 2, 2, 1], "reflect"), "reflect"),
    ("pad.default", (2, 4, 5), ([1, 2], "reflect"), "reflect1"),
    ("pad.default", (2, 5), ([1, 2], "reflect"), "reflect1rank2"),
    ("pad.default", (2, 4, 5), ([1, 2, 1, 0], "reflect"), "reflect2unbatched"),
    ("pad.default", (1, 2, 4, 5), ([1, 2, 2, 1], "replicate"), "replicate"),
    ("pad.default", (2, 4, 5), ([1, 2], "replicate"), "replicate1"),
)
_TO_COPY = "aten._to_copy.default"
_TO_DIM_ORDER_COPY = "dim_order_ops._to_dim_order_copy.default"
_CLONE = "aten.clone.default"
_CLONE_DIM_ORDER = "dim_order_ops._clone_dim_order.default"
_NARROW = (torch.uint8, torch.int16)
_DTYPES = {
    torch.float32: x(2, 3, low=-3.0, high=3.0),
    torch.int64: i(2, 3),
    torch.int32: i(2, 3, dtype=torch.int32),
    torch.bool: b(2, 3),
}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


ACCEPTED = (
    *(
        accept(f"aten.{op}", x(*shape), *args, note=note, core=op != "roll.default")
        for op, shape, args, note in (*_MOVES, *_FLOAT_ONLY)
    ),
    *(
        accept(f"aten.{op}", i(*shape), *args, note="int64")
        for op, shape, args, note in _MOVES
        if not note
    ),
    *(
        accept(f"aten.{op}", b(*shape), *args, note="bool")
        for op, shape, args, note in _MOVES
        if not note
    ),
    accept("aten.view.default", x(1, 1, 1), [], note="scalar"),
    accept("aten.pixel_unshuffle.default", x(1, 2, 4, 6), 2, target_opset=Opset.iOS16),
    accept("aten.cat.default", [x(2, 3), x(1, 3)]),
    accept("aten.cat.default", [x(2, 3), x(2, 1), x(2, 2)], -1, note="last"),
    accept("aten.cat.default", [i(2, 3), i(2, 1)], 1, note="int64"),
    accept("aten.cat.default", [b(2, 3), b(2, 1)], 1, note="bool"),
    accept("aten.cat.default", [x(2, 3)], 1, note="one"),
    accept("aten.stack.default", [x(2, 3), x(2, 3)]),
    accept("aten.stack.default", [x(2, 3), x(2, 3)], -1, note="last"),
    accept("aten.stack.default", [i(2, 3), i(2, 3)], 1, note="int64"),
    accept("aten.stack.default", [b(2, 3), b(2, 3)], 1, note="bool"),
    accept("aten.stack.default", [x(), x()], note="rank0"),
    *(
        accept(op, source, dtype=to, note=f"{_short(of)}-{_short(to)}")
        for op in (_TO_COPY, _TO_DIM_ORDER_COPY)
        for of, source in _DTYPES.items()
        for to in _DTYPES
    ),
    accept(_TO_COPY, x(), dtype=torch.int64, note="rank0"),
    *(
        accept(_TO_COPY, x(2, 3), dtype=to, note=f"float32-{_short(to)}")
        for to in (torch.float16, torch.float64)
    ),
    *(
        accept(op, i(2, 3, low=0, high=256, dtype=of), dtype=to, note=f"{_short(of)}-{_short(to)}")
        for op in (_TO_COPY, _TO_DIM_ORDER_COPY)
        for of in _NARROW
        for to in (*_DTYPES, *_NARROW)
    ),
    *(
        accept(op, i(2, 3, low=-70000, high=70000), dtype=to, note=f"wrapped-{_short(to)}")
        for op in (_TO_COPY, _TO_DIM_ORDER_COPY)
        for to in _NARROW
    ),
    accept(_TO_COPY, x(2, 3, low=0.0, high=9.0), dtype=torch.uint8, note="float32-uint8"),
    accept("aten.permute.default", i(2, 3, 4, low=0, dtype=torch.uint8), [2, 0, 1], note="uint8"),
    accept("aten.slice.Tensor", i(5, 4, low=0, dtype=torch.uint8), 0, 1, 4, 2, note="uint8"),
    accept("aten.split.Tensor", i(6, 4, dtype=torch.int16), 3, takes=(0, 1), note="int16"),
    accept(
        "aten.cat.default",
        [i(2, 3, low=0, dtype=torch.uint8), i(2, 3, dtype=torch.int16)],
        note="uint8-int16",
    ),
    accept(_CLONE_DIM_ORDER, x(2, 3)),
    accept(_CLONE_DIM_ORDER, x(1, 2, 2, 3), dim_order=[0, 1, 2, 3], note="row-major"),
    accept(_CLONE, x(2, 2), memory_format=torch.contiguous_format, note="contiguous"),
    *(accept(f"aten.{op}.default", [x(2, 3), i(2, 3)], note="mixed") for op in ("cat", "stack")),
    accept("aten.cat.default", [i(2, 3), b(2, 3)], 1, note="mixed-bool"),
    accept("aten.roll.default", x(4, 5), [3], note="flat"),
    accept("aten.pad.default", x(4, 5), [-1, -1], note="crop"),
    accept("aten.constant_pad_nd.default", x(4, 5), [-1, 2], note="crop"),
    accept("aten.constant_pad_nd.default", x(4, 5), [1, -2, 0, -1], 0.5, note="crop-two"),
    *(
        accept(f"aten.{name}", data, pads, *value, note=note)
        for name, value in (("constant_pad_nd.default", (3,)), ("pad.default", ("constant", 1.0)))
        for note, data, pads in (
            ("int64", i(2, 3), [1, 2, 0, 1]),
            ("int64-crop", i(2, 3), [-1, 2]),
            ("bool", b(2, 3), [2, 0]),
        )
    ),
    # Places inside, and far enough outside to be reflected twice.
    accept("aten.lift_fresh_copy.default", x(4, 5)),
    accept("aten.diagonal.default", x(4, 5)),
    accept("aten.diagonal.default", x(4, 5), 2, note="above"),
    accept("aten.diagonal.default", x(5, 3), -3, note="below"),
    accept("aten.diagonal.default", x(4, 2, 3, 5), 1, -1, 0, note="dims"),
    accept("aten.diagonal_scatter.default", x(4, 5), x(4)),
    accept("aten.diagonal_scatter.default", i(4, 5), i(3), 2, note="above"),
    accept("aten.diagonal_scatter.default", x(5, 3), x(2), -3, note="below"),
    accept("aten.diagonal_scatter.default", x(4, 2, 3, 5), x(2, 3, 3), 1, -1, 0, note="dims"),
)

_IMAGE = (1, 2, 3, 4)

REJECTED = (
    reject(
        ReasonCode.DTYPE,
        "argument 'self' is uint8, Core ML takes",
        "aten.add.Tensor",
        i(2, 3, low=0, dtype=torch.uint8),
        i(2, 3, low=0, dtype=torch.uint8),
        note="uint8",
    ),
    reject(
        ReasonCode.DTYPE,
        "argument 'self' is int16, Core ML takes float32 here",
        "aten.mm.default",
        i(2, 3, dtype=torch.int16),
        i(3, 2, dtype=torch.int16),
        note="int16",
    ),
    reject(
        ReasonCode.DTYPE,
        "argument 'self' is int8, Core ML takes",
        _TO_COPY,
        i(2, 3, dtype=torch.int8),
        dtype=torch.float32,
        note="int8",
    ),
    *(
        reject(
            ReasonCode.DTYPE,
            "a cast from int64 to float64 would pass through float32",
            op,
            i(2, 3),
            dtype=torch.float64,
            note="int64-float64",
        )
        for op in (_TO_COPY, _TO_DIM_ORDER_COPY)
    ),
    reject(
        ReasonCode.ARGUMENT,
        "mode='circular', Core ML has no such mode",
        "aten.pad.default",
        x(1, 2, 4, 5),
        [1, 2, 2, 1],
        "circular",
        note="circular",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "mode='replicate' with 3 padded dimensions",
        "aten.pad.default",
        x(1, 2, 3, 4, 5),
        [1, 2, 1, 1, 1, 0],
        "replicate",
        note="three",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "the result has dynamic shape",
        "aten.expand.default",
        x(2, 1, 2, 1, 2, 3),
        [2, 2, 2, 2, 2, -1],
        note="rank6",
        dynamic=True,
    ),
    reject(
        ReasonCode.OPSET,
        "aten.pixel_unshuffle.default needs iOS16, the deployment target is iOS15",
        "aten.pixel_unshuffle.default",
        x(1, 2, 4, 6),
        2,
        note="oldest",
        target_opset=Opset.iOS15,
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "'self' has dynamic shape",
            f"aten.{op}.default",
            x(4, 5),
            *more,
            note="dynamic",
            dynamic=True,
        )
        for op, more in (
            ("pad", ([-1, -1],)),
            ("constant_pad_nd", ([-1, 2],)),
            ("diagonal", ()),
            ("diagonal_scatter", (w(4),)),
        )
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "rolls a dynamic dimension of (4, s",
            "aten.roll.default",
            x(4, 5),
            *more,
            note=f"dynamic-{note}",
            dynamic=True,
        )
        for note, more in (("flat", ([3],)), ("last", ([1], [-1])))
    ),
    reject(
        ReasonCode.ARGUMENT,
        "negative padding with a mode other than 'constant'",
        "aten.pad.default",
        x(*_IMAGE),
        [-1, 1, 0, 0],
        "reflect",
        note="crop-reflect",
    ),
)
