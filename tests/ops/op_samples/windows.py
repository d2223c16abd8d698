"""Calls of sliding windows."""

from __future__ import annotations

import functools

from ops.op_samples.sample import accept, b, i, reject, x

from coreml_delegate.ops import ReasonCode

_UNFOLD = "aten.im2col.default"
_FOLD = "aten.col2im.default"
_ALONG = "aten.unfold.default"
_STRIDED = "aten.as_strided.default"
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
    accept(_ALONG, x(2, 200), 1, 65, 5, note="large"),
    accept(_ALONG, b(90, 2), 0, 70, 3, note="large-bool"),
    _accept(_UNFOLD, x(1, 2, 3, 99), [2, 66], [1, 1], [0, 3], [1, 2], note="large"),
    _accept(_UNFOLD, x(1, 1, 150, 3), [66, 2], [2, 1], _NONE, [3, 1], note="large-dilation"),
    # Overlapping frames of sound, added up.
    _accept(_FOLD, x(2, 100, 4), [1, 220], [1, 100], _ONE, _NONE, [1, 40], note="frames"),
    accept(_STRIDED, x(99), [5, 70], [5, 1], 2, note="frames"),
    accept(_STRIDED, x(4, 6), [3, 2, 4], [4, 0, 1], 1, note="any"),
    accept(_STRIDED, x(4, 6), [2, 1, 6], [6, 9, 1], 6, note="rows"),
    accept(_STRIDED, b(4, 6), [4], [7], note="diagonal"),
    accept(_STRIDED, i(4, 6), [6, 4], [1, 6], note="int64-transposed"),
    accept(_STRIDED, x(3), [1, 1], [1, 1], 2, note="one"),
)

_SHORT = (_ONE, _NONE, _ONE)

REJECTED = (
    reject(
        ReasonCode.ARGUMENT,
        "windows of more than 64 strides",
        _FOLD,
        x(1, 33 * 33, 64),
        [40, 40],
        [33, 33],
        *_SHORT,
        note="large",
    ),
    reject(
        ReasonCode.ARGUMENT,
        "more than 1048576 elements",
        _STRIDED,
        x(2000),
        [1025, 1024],
        [0, 1],
        note="large",
    ),
    reject(
        ReasonCode.SYMBOLIC,
        "'self' has dynamic shape",
        _STRIDED,
        x(3, 8),
        [2, 3],
        [1, 2],
        note="dynamic",
        dynamic=True,
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
