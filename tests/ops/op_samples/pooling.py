"""Calls of pooling."""

from __future__ import annotations

from ops.op_samples.sample import accept, reject, x

from coreml_delegate.op_rules import ReasonCode

MI = "aten.max_pool2d_with_indices.default"
ACCEPTED = (
    accept("aten.max_pool1d.default", x(1, 2, 9), [3]),
    accept("aten.max_pool1d.default", x(1, 2, 9), [3], [2], [1], note="stride"),
    accept("aten.max_pool1d.default", x(1, 2, 9), [2], [2], [0], [1], True, note="ceil"),
    accept("aten.max_pool2d.default", x(1, 2, 8, 9), [3, 2]),
    accept("aten.max_pool2d.default", x(1, 2, 8, 9), [2], note="short"),
    accept("aten.max_pool2d.default", x(1, 2, 8, 9), [3, 2], [2, 1], [1, 0], note="stride"),
    accept(
        "aten.max_pool2d.default", x(1, 2, 8, 9), [3, 3], [2, 2], [1, 1], [1, 1], True, note="ceil"
    ),
    accept("aten.max_pool3d.default", x(1, 2, 4, 5, 6), [2, 2, 2]),
    accept(
        "aten.max_pool3d.default", x(1, 2, 4, 5, 6), [2, 2, 2], [1, 2, 1], [1, 0, 1], note="stride"
    ),
    accept(MI, x(1, 2, 8, 9), [3, 2], takes=(0,)),
    accept(MI, x(1, 2, 8, 9), [3, 3], [2, 2], [1, 1], takes=(0,), note="stride"),
    accept(MI, x(1, 2, 8, 9), [3, 3], [2, 2], [1, 1], [1, 1], True, takes=(0,), note="ceil"),
    accept("aten.max_pool3d_with_indices.default", x(1, 2, 4, 5, 6), [2, 2, 2], takes=(0,)),
    accept("aten.avg_pool1d.default", x(1, 2, 9), [3]),
    accept("aten.avg_pool1d.default", x(1, 2, 9), [3], [2], [1], note="stride"),
    accept("aten.avg_pool1d.default", x(1, 2, 9), [3], [2], [1], False, False, note="exclude"),
    accept("aten.avg_pool1d.default", x(1, 2, 8), [3], [2], [0], True, note="ceil"),
    accept("aten.avg_pool1d.default", x(1, 2, 8), [3], [2], [1], True, note="ceilpad"),
    accept("aten.avg_pool2d.default", x(1, 2, 8, 9), [3, 2]),
    accept("aten.avg_pool2d.default", x(1, 2, 8, 9), [2], note="short"),
    accept("aten.avg_pool2d.default", x(1, 2, 8, 9), [3, 3], [2, 2], [1, 1], note="stride"),
    accept(
        "aten.avg_pool2d.default",
        x(1, 2, 8, 9),
        [3, 3],
        [2, 2],
        [1, 1],
        False,
        False,
        note="exclude",
    ),
    accept("aten.avg_pool2d.default", x(1, 2, 8, 8), [3, 3], [2, 2], [0, 0], True, note="ceil"),
    accept("aten.avg_pool2d.default", x(1, 2, 8, 8), [3, 3], [2, 2], [1, 1], True, note="ceil-pad"),
    accept(
        "aten.avg_pool2d.default",
        x(1, 2, 8, 8),
        [3, 3],
        [2, 2],
        [1, 1],
        True,
        False,
        note="ceil-exclude",
    ),
    accept(
        "aten.avg_pool2d.default",
        x(1, 2, 9, 9),
        [3, 3],
        [2, 2],
        [1, 1],
        True,
        False,
        note="ceil-exact-exclude",
    ),
    accept(
        "aten.avg_pool2d.default",
        x(1, 2, 9, 9),
        [3, 3],
        [2, 2],
        [1, 1],
        True,
        True,
        note="ceil-exact",
    ),
    accept("aten.avg_pool3d.default", x(1, 2, 4, 5, 6), [2, 2, 2]),
    accept(
        "aten.avg_pool3d.default", x(1, 2, 4, 5, 6), [3, 3, 3], [1, 2, 1], [1, 1, 1], note="pad"
    ),
    accept(
        "aten.avg_pool3d.default",
        x(1, 2, 4, 5, 6),
        [3, 3, 3],
        [1, 2, 1],
        [1, 1, 1],
        False,
        False,
        note="exclude",
    ),
    accept("aten.adaptive_avg_pool1d.default", x(1, 2, 9), [3]),
    accept("aten.adaptive_avg_pool1d.default", x(1, 2, 9), [1], note="one"),
    accept("aten.adaptive_avg_pool1d.default", x(1, 2, 9), [4], note="uneven"),
    accept("aten.adaptive_avg_pool2d.default", x(1, 2, 8, 9), [4, 3]),
    accept("aten.adaptive_avg_pool2d.default", x(1, 2, 8, 9), [1, 1], note="one"),
    accept("aten.adaptive_avg_pool2d.default", x(1, 2, 8, 9), [3, 4], note="uneven"),
    accept("aten._adaptive_avg_pool2d.default", x(1, 2, 8, 9), [4, 3]),
    accept("aten._adaptive_avg_pool2d.default", x(1, 2, 8, 9), [1, 1], note="one"),
    accept("aten._adaptive_avg_pool2d.default", x(1, 2, 8, 9), [3, 4], note="uneven"),
)
_BEYOND = "ceil_mode makes a window beyond the input"
_NO_CEIL = "ceil_mode=True, Core ML takes False"
_MAX = (
    ("aten.max_pool3d_with_indices.default", 3, (0,)),
    ("aten.max_pool1d.default", 1, None),
    ("aten.max_pool2d.default", 2, None),
    (MI, 2, (0,)),
    ("aten.max_pool3d.default", 3, None),
)
_AVG = (
    ("aten.avg_pool1d.default", 1),
    ("aten.avg_pool2d.default", 2),
    ("aten.avg_pool3d.default", 3),
)


def _rank(dims: int) -> str:
    return f"'self' has rank {dims + 1}, Core ML takes {dims + 2} here"


REJECTED = (
    *(
        reject(
            ReasonCode.RANK, _rank(n), op, x(2, *[4] * n), [2] * n, takes=takes, note="unbatched"
        )
        for op, n, takes in _MAX
    ),
    *(
        reject(ReasonCode.RANK, _rank(n), op, x(2, *[4] * n), [2] * n, note="unbatched")
        for op, n in _AVG
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            "dilation=[2",
            op,
            x(1, 2, *[6] * n),
            [2] * n,
            [1] * n,
            [0] * n,
            [2] * n,
            takes=takes,
            note="dilation",
        )
        for op, n, takes in _MAX
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            _BEYOND if n < 3 else _NO_CEIL,
            op,
            x(1, 2, *[6] * n),
            [1] * n,
            [2] * n,
            [0] * n,
            [1] * n,
            True,
            takes=takes,
            note="ceil-beyond",
        )
        for op, n, takes in _MAX
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            _BEYOND if n < 3 else _NO_CEIL,
            op,
            x(1, 2, *[6] * n),
            [1] * n,
            [2] * n,
            [0] * n,
            True,
            note="ceil-beyond",
        )
        for op, n in _AVG
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            "divisor_override=5, Core ML takes None",
            op,
            x(1, 2, *[6] * n),
            [2] * n,
            [2] * n,
            [0] * n,
            False,
            True,
            5,
            note="divisor",
        )
        for op, n in _AVG[1:]
    ),
    *(
        reject(
            ReasonCode.USE,
            "result 1 is used, Core ML has 0 alone",
            op,
            x(1, 2, *[4] * n),
            [2] * n,
            takes=(0, 1),
            note="indices",
        )
        for op, n in ((MI, 2), ("aten.max_pool3d_with_indices.default", 3))
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the input size is dynamic",
            f"aten.{op}.default",
            x(1, 2, *size),
            [3] * len(size),
            note="dynamic",
            dynamic=True,
        )
        for op, size in (
            ("adaptive_avg_pool1d", (9,)),
            ("adaptive_avg_pool2d", (6, 9)),
            ("_adaptive_avg_pool2d", (6, 9)),
        )
    ),
)
