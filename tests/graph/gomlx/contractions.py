"""Cases of products of tensors and of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from graph.gomlx.case import Case, called, case, counted, f16, f32

Axes = Sequence[int]


def _dot(first: Axes, second: Axes, batch: tuple[Axes, Axes] = ((), ()), **keywords: Any) -> Any:
    return called("dot_general", contracting=(first, second), batching=batch, **keywords)


_ROW = [[1, 2, 3]]
_COLUMN = [[10], [11], [12]]
_DOTS = [
    case(
        "DotGeneral/Shape",
        _dot((1,), (3,), ((3, 0), (0, 2))),
        [np.zeros((2, 3, 4, 5), np.float32), np.zeros((5, 1, 2, 3), np.float32)],
        np.zeros((5, 2, 4, 1), np.float32),
    ),
    case(
        "DotGeneral/shuffled-axes",
        _dot((1,), (1,), ((3, 0), (0, 2))),
        [counted(np.float32, 2, 3, 1, 5, first=1), counted(np.float32, 5, 3, 2, 4, first=1)],
        f32(
            [
                [[[242, 260, 278, 296]], [[899, 962, 1025, 1088]]],
                [[[773, 794, 815, 836]], [[2522, 2588, 2654, 2720]]],
                [[[1448, 1472, 1496, 1520]], [[4289, 4358, 4427, 4496]]],
                [[[2267, 2294, 2321, 2348]], [[6200, 6272, 6344, 6416]]],
                [[[3230, 3260, 3290, 3320]], [[8255, 8330, 8405, 8480]]],
            ]
        ),
    ),
    case(
        "DotGeneral/AxisTransposition",
        _dot((1,), (0,), ((2, 0), (1, 2))),
        [f32([[[1, 2, 3]], [[4, 5, 6]]]), np.ones((1, 3, 2), np.float32)],
        f32([[1, 4], [2, 5], [3, 6]]),
    ),
    case(
        "DotGeneral/float64/VeryLarge",
        lambda b, x, y: b.slice(
            b.dot_general(x, y, contracting=((2,), (0,))), (0, 0, 0), (1, 1, 1)
        ),
        [counted(np.float64, 16, 13, 384, first=1) * 1e-5, np.ones((384, 1536))],
        np.array([[[0.7392]]]),
        tolerance=(1e-4, 0.0),
    ),
    case(
        "DotGeneral/bfloat16/DotProduct-with-f32-acc",
        _dot((1,), (0,), preferred_dtype="float32"),
        [f16(_ROW), f16(_COLUMN)],
        f32([[68]]),
        about="with float16",
    ),
    case(
        "DotGeneral/float16/DotProduct-with-f32-acc",
        lambda b, x, y: b.convert(b.dot(x, y, preferred_dtype="float32"), "float16"),
        [f16(_ROW), f16(_COLUMN)],
        f16([[68]]),
    ),
    case("DotGeneral/float16/DotProduct", "dot", [f16(_ROW), f16(_COLUMN)], f16([[68]])),
    case("DotGeneral/Dot", _dot((0,), (0,)), [f32(_ROW[0]), f32([10, 11, 12])], f32(68)),
    case(
        "DotGeneral/Dot",
        _dot((1,), (0,)),
        [f32([[1, 2, 3], [2, 4, 6]]), f32([10, 11, 12])],
        f32([68, 136]),
        about="a matrix and a vector",
    ),
]


def _small(dtype: str, test: str, about: str = "") -> list[Case]:
    x, y = np.array([[1, 2], [3, 4]], dtype), np.array([[10, 11], [12, 13]], dtype)
    name = f"DotGeneral/{test}/small-matmul"
    plain = np.array([[34, 37], [78, 85]], dtype)
    turned = np.array([[32, 38], [74, 88]], dtype)
    return [
        case(f"{name}/LayoutNonTransposed", _dot((1,), (0,)), [x, y], plain, about=about),
        case(f"{name}/LayoutTransposed", _dot((1,), (1,)), [x, y], turned, about=about),
    ]


def _typed() -> list[Case]:
    """Return a product of 0 to 15 with itself for each pair of element types."""
    numbers, dtypes = np.arange(16), ("float16", "float32", "float64")
    return [
        case(
            "DotGeneral/DTypes",
            _dot((0,), (0,), preferred_dtype=result),
            [numbers.astype(given), numbers.astype(given)],
            np.array(1240, result),
            about=f"{given} to {result}",
        )
        for given in dtypes
        for result in dtypes
    ]


def _configured(test: str) -> Case:
    return case(
        f"DotGeneral/ConfigDTypes/{test}",
        _dot((1,), (0,), preferred_dtype="float32"),
        [counted(np.float16, 2, 3, first=1), counted(np.float16, 3, 2, first=7)],
        f32([[58, 64], [139, 154]]),
    )


def _attention_sized() -> Case:
    """Return a product as of queries and keys, in which no axis is where a matrix product has it.

    Each number of the second is not near its neighbours' in the last bits only, so that a wrong
    order of the axes shows.
    """
    x = counted(np.float32, 4, 32, 8, 2, 1) * np.float32(1e-4) * np.ones(256, np.float32)
    y = counted(np.float32, 4, 32, 8, 256) * np.float32(1e-4)
    wanted = np.einsum("bqhgd,bkhd->bhqgk", x.astype(np.float64), y.astype(np.float64))
    return case(
        "DotGeneral/TransposedLarge",
        lambda b, x, y: b.reshape(
            b.dot_general(x, y, contracting=((4,), (3,)), batching=((0, 2), (0, 2))), (65536,)
        ),
        [x, y],
        wanted.astype(np.float32).ravel(),
        tolerance=(0.0, 0.03),
    )


_CONVOLUTIONS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any], Any]] = [
    (
        "1D with padding",
        (2, 3, 5),
        (3, 4, 2),
        {"strides": (2,), "padding": ((0, 1),)},
        [
            [[442, 544, 296], [508, 634, 350], [574, 724, 404], [640, 814, 458]],
            [[1207, 1309, 656], [1453, 1579, 800], [1699, 1849, 944], [1945, 2119, 1088]],
        ],
    ),
    (
        "1D with stride 2",
        (1, 2, 6),
        (2, 3, 2),
        {"strides": (2,)},
        [[[86, 114, 142], [114, 158, 202], [142, 202, 262]]],
    ),
    (
        "1D with input dilation",
        (1, 2, 4),
        (2, 3, 2),
        {"input_dilation": (2,)},
        [[[24, 36, 30, 44, 36, 52], [32, 48, 42, 60, 52, 72], [40, 60, 54, 76, 68, 92]]],
    ),
    (
        "1D with kernel dilation",
        (1, 2, 6),
        (2, 3, 2),
        {"kernel_dilation": (2,)},
        [[[94, 108, 122, 136], [126, 148, 170, 192], [158, 188, 218, 248]]],
    ),
    (
        "1D with feature groups",
        (1, 6, 5),
        (3, 4, 2),
        {"feature_groups": 2},
        [
            [
                [442, 493, 544, 595],
                [508, 571, 634, 697],
                [1699, 1774, 1849, 1924],
                [1945, 2032, 2119, 2206],
            ]
        ],
    ),
    (
        "1D with batch groups",
        (4, 2, 5),
        (2, 4, 2),
        {"batch_groups": 2},
        [
            [
                [95, 113, 131, 149],
                [119, 145, 171, 197],
                [823, 857, 891, 925],
                [1007, 1049, 1091, 1133],
            ],
            [
                [275, 293, 311, 329],
                [379, 405, 431, 457],
                [1163, 1197, 1231, 1265],
                [1427, 1469, 1511, 1553],
            ],
        ],
    ),
    (
        "2D",
        (1, 3, 4, 4),
        (3, 2, 2, 2),
        {},
        [
            [
                [[3160, 3274, 3388], [3616, 3730, 3844], [4072, 4186, 4300]],
                [[4048, 4210, 4372], [4696, 4858, 5020], [5344, 5506, 5668]],
            ]
        ],
    ),
    (
        "3D",
        (1, 2, 4, 4, 4),
        (2, 2, 2, 2, 2),
        {
            "strides": (2, 1, 1),
            "padding": ((0, 0), (1, 1), (0, 0)),
            "input_dilation": (1, 2, 1),
            "kernel_dilation": (1, 1, 2),
        },
        np.reshape(
            # Rows of two; each line is a slice along depth.
            [
                [6280, 6380, 5624, 5708, 6680, 6780, 5960, 6044],
                [7080, 7180, 6296, 6380, 7480, 7580, 6632, 6716],
                [9480, 9580, 8312, 8396, 9880, 9980, 8648, 8732],
                [10280, 10380, 8984, 9068, 10680, 10780, 9320, 9404],
                [8904, 9068, 8248, 8396, 9560, 9724, 8840, 8988],
                [10216, 10380, 9432, 9580, 10872, 11036, 10024, 10172],
                [14152, 14316, 12984, 13132, 14808, 14972, 13576, 13724],
                [15464, 15628, 14168, 14316, 16120, 16284, 14760, 14908],
            ],
            (1, 2, 2, 8, 2),
        ),
    ),
    (
        "2D convolution with transposed output",
        (1, 3, 4, 5),
        (3, 2, 2, 2),
        {"layout": "NCHW,IOHW->CWNH"},
        [
            [
                [[3935, 4505, 5075]],
                [[4049, 4619, 5189]],
                [[4163, 4733, 5303]],
                [[4277, 4847, 5417]],
            ],
            [
                [[5039, 5849, 6659]],
                [[5201, 6011, 6821]],
                [[5363, 6173, 6983]],
                [[5525, 6335, 7145]],
            ],
        ],
    ),
]
_LAYOUTS = {3: "NCW,IOW->NCW", 4: "NCHW,IOHW->NCHW", 5: "NCDHW,IODHW->NCDHW"}


def _convolved(dtype: str) -> list[Case]:
    return [
        case(
            f"ConvGeneral/{test}",
            called("convolution", **({"layout": _LAYOUTS[len(shape)]} | keywords)),
            [counted(dtype, *shape), counted(dtype, *kernel)],
            np.array(wanted, dtype),
            about=dtype,
            # Sums of thousands round to a multiple of 8 in halves, and so do the parts of a sum.
            tolerance=(100.0, 0.0) if dtype == "float16" else None,
        )
        for test, shape, kernel, keywords, wanted in _CONVOLUTIONS
    ]


CASES = [
    *_DOTS,
    *_small("float32", "float32"),
    *_small("float16", "bfloat16", "with float16"),
    *_small("float16", "float16"),
    *_small("float64", "float64"),
    *_typed(),
    _configured("AccumulatorDType"),
    _configured("OutputDType"),
    _attention_sized(),
]

CONVOLUTIONS = [
    *(made for dtype in ("float32", "float64", "float16") for made in _convolved(dtype)),
    *(made for made in _convolved("int32") if made.test.endswith(("padding", "feature groups"))),
    *(made for made in _convolved("uint64") if made.test.endswith("2D")),
]
INTEGER_CONVOLUTIONS = [made for dtype in ("int32", "uint64") for made in _convolved(dtype)]
"""Each is many operations, as Core ML has no convolution of integers."""
