"""Calls of pooling."""

from __future__ import annotations

from ops.op_samples.sample import accept, reject, x

from coreml_delegate.ops import ReasonCode

MI = "aten.max_pool2d_with_indices.default"
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
    *(accept(op, x(2, *[4] * n), [2] * n, takes=takes, note="unbatched") for op, n, takes in _MAX),
    *(accept(op, x(2, *[4] * n), [2] * n, note="unbatched") for op, n in _AVG),
    *(
        accept(
            op, x(1, 2, *[6] * n), [2] * n, [1] * n, [1] * n, [2] * n, takes=takes, note="dilation"
        )
        for op, n, takes in _MAX
    ),
    *(
        accept(
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
        accept(
            op,
            x(1, 2, *[7] * n),
            [3] * n,
            [3] * n,
            [1] * n,
            [1] * n,
            True,
            takes=takes,
            note="ceil-end",
        )
        for op, n, takes in _MAX
    ),
    *(
        accept(
            op, x(2, *[8] * n), [2] * n, [3] * n, [1] * n, [3] * n, True, takes=takes, note="all"
        )
        for op, n, takes in _MAX
    ),
    *(
        accept(op, x(1, 2, *[6] * n), [1] * n, [2] * n, [0] * n, True, note="ceil-beyond")
        for op, n in _AVG
    ),
    *(
        accept(
            op,
            x(1, 2, *sizes[:n]),
            [3] * n,
            [2] * n,
            [1] * n,
            True,
            include,
            note=f"ceil-{include}",
        )
        for op, n in _AVG
        for include in (True, False)
        for sizes in ((6, 7, 8),)
    ),
    *(
        accept(op, x(1, 2, *[6] * n), [2] * n, [2] * n, [0] * n, False, True, 5, note="divisor")
        for op, n in _AVG[1:]
    ),
    *(
        accept(op, x(2, *[6] * n), [3] * n, [2] * n, [1] * n, True, False, 5, note="divisor-ceil")
        for op, n in _AVG[1:]
    ),
    *(
        accept(f"aten.{op}.default", x(*shape), sizes, note=note)
        for op in ("adaptive_avg_pool3d", "_adaptive_avg_pool3d")
        for note, shape, sizes in (
            ("", (1, 2, 4, 6, 8), [2, 3, 4]),
            ("one", (1, 2, 4, 6, 8), [1, 1, 1]),
            ("uneven", (1, 2, 4, 5, 7), [3, 5, 2]),
            ("unbatched", (2, 4, 6, 8), [2, 3, 1]),
        )
    ),
    *(
        accept(
            f"aten.adaptive_max_pool{len(sizes)}d.default", x(*shape), sizes, takes=(0,), note=note
        )
        for note, shape, sizes in (
            ("", (1, 2, 4, 6), [2, 3]),
            ("one", (1, 2, 4, 6), [1, 1]),
            ("uneven", (1, 2, 5, 7), [3, 2]),
            ("unbatched", (2, 4, 6), [2, 5]),
            ("", (1, 2, 4, 6, 8), [2, 3, 4]),
            ("uneven", (1, 2, 4, 5, 7), [3, 5, 2]),
        )
    ),
)
_MANY = "more than 64 windows along the dimensions, an op each"
_HOLES = "a dilated window has more than 64 elements, an op each"
_KERNELS = {1: (65, 129), 2: (33, 65), 3: (22, 43)}  # size, extent with holes

REJECTED = (
    *(
        reject(
            ReasonCode.ARGUMENT,
            _HOLES,
            op,
            x(1, 1, *[_KERNELS[n][1]] * n),
            [_KERNELS[n][0]] * n,
            [1] * n,
            [0] * n,
            [2] * n,
            takes=takes,
            note="dilation-wide",
        )
        for op, n, takes in _MAX
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "where windows lie depends on a size that is dynamic",
            op,
            x(1, 2, *[6] * n),
            [2] * n,
            [2] * n,
            [0] * n,
            [2] * n,
            takes=takes,
            note="dilation-dynamic",
            dynamic=True,
        )
        for op, n, takes in _MAX
        if n > 1  # exporting max_pool1d fixes every size
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "how many elements a window has depends on a dynamic size",
            op,
            x(1, 2, *[6] * n),
            [2] * n,
            [2] * n,
            [0] * n,
            True,
            note="ceil-dynamic",
            dynamic=True,
        )
        for op, n in _AVG
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            _MANY,
            f"aten.{op}.default",
            x(1, 1, 24, 24, 24),
            [23, 23, 23],
            note="many",
        )
        for op in ("adaptive_avg_pool3d", "_adaptive_avg_pool3d")
    ),
    *(
        reject(
            ReasonCode.ARGUMENT,
            _MANY,
            f"aten.adaptive_max_pool{n}d.default",
            x(1, 1, *[40] * n),
            [39] * n,
            takes=(0,),
            note="many",
        )
        for n in (2, 3)
    ),
    *(
        reject(
            ReasonCode.USE,
            "result 1 is used, Core ML has only result 0",
            f"aten.adaptive_max_pool{n}d.default",
            x(1, 2, *[4] * n),
            [2] * n,
            takes=(0, 1),
            note="indices",
        )
        for n in (2, 3)
    ),
    *(
        reject(
            ReasonCode.SYMBOLIC,
            "the input size is dynamic",
            f"aten.adaptive_max_pool{n}d.default",
            x(1, 2, *[9] * n),
            [3] * n,
            takes=(0,),
            note="dynamic",
            dynamic=True,
        )
        for n in (2, 3)
    ),
    *(
        reject(
            ReasonCode.USE,
            "result 1 is used, Core ML has only result 0",
            op,
            x(1, 2, *[4] * n),
            [2] * n,
            takes=(0, 1),
            note="indices",
        )
        for op, n in ((MI, 2), ("aten.max_pool3d_with_indices.default", 3))
    ),
)
