"""Calls of sliding windows."""

from __future__ import annotations

import functools

from ops.op_samples.sample import accept, i, reject, x

from coreml_delegate.ops import ReasonCode

_UNFOLD = "aten.im2col.default"
_FOLD = "aten.col2im.default"
_ALONG = "aten.unfold.default"
_ONE, _NONE = [1, 1], [0, 0]

# Kernel, dilation, padding and stride, of an image of 9 by 10 elements.
_WINDOWS = (
    ("", [3, 2], _ONE, _NONE, _ONE),
    ("stride", [3, 3], _ONE, _ONE, [2, 2]),
    ("dilation", [2, 3], [3, 2], [1, 2], [1, 2]),
    ("rest", [2, 2], _ONE, _NONE, [2, 3]),
    ("tiles", [3, 5], _ONE, _NONE, [3, 5]),
    ("gaps", [1, 1], _ONE, _NONE, [4, 4]),
)
_COUNTS = {"": 63, "stride": 25, "dilation": 40, "rest": 12, "tiles": 6, "gaps": 9}

# Decomposed, both index with tensors of rank 6.
_accept = functools.partial(accept, core=False)

ACCEPTED = (
    *(_accept(_UNFOLD, x(2, 3, 9, 10), *options, note=note) for note, *options in _WINDOWS),
    _accept(_UNFOLD, x(3, 9, 10), [3, 3], _ONE, _NONE, _ONE, note="unbatched"),
    *(
        _accept(
            _FOLD,
            x(2, 3 * kernel[0] * kernel[1], _COUNTS[note]),
            [9, 10],
            kernel,
            *options,
            note=note,
        )
        for note, kernel, *options in _WINDOWS
    ),
    _accept(_FOLD, x(12, 72), [9, 10], [2, 2], _ONE, _NONE, _ONE, note="unbatched"),
    accept(_ALONG, x(2, 3, 9), -1, 4, 2),
    accept(_ALONG, x(2, 9, 3), 1, 3, 1, note="inside"),
    accept(_ALONG, x(2, 9, 3), 1, 3, 3, note="tiles"),
    accept(_ALONG, i(8), 0, 2, 4, note="int64-gaps"),
)

_SHORT = (_ONE, _NONE, _ONE)

REJECTED = (
    *(
        reject(
            ReasonCode.ARGUMENT,
            "windows of more than 64 rows and columns",
            op,
            *options,
            *_SHORT,
            note="large",
        )
        for op, *options in (
            (_UNFOLD, x(1, 1, 40, 40), [33, 33]),
            (_FOLD, x(1, 33 * 33, 64), [40, 40], [33, 33]),
        )
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "several sizes, or that of windows, vary",
        _ALONG,
        x(3, 8),
        1,
        2,
        2,
        note="dynamic",
        dynamic=True,
    ),
    reject(
        ReasonCode.ARGUMENT,
        "windows of more than 64 elements",
        _ALONG,
        x(2, 80),
        1,
        65,
        5,
        note="large",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "the places of windows depend on a dynamic size",
        _UNFOLD,
        x(1, 2, 5, 6),
        [2, 2],
        *_SHORT,
        note="dynamic",
        dynamic=True,
    ),
)
