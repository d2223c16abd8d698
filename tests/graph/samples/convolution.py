"""Samples of convolutions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from graph.samples.sample import Sample
from support.graph_numbers import numbers
from support.graph_samples import NUMBERS, by_jax


def _sample(
    case: str,
    x: tuple[int, ...],
    kernel: tuple[int, ...],
    dtype: str = "float32",
    *,
    constant: bool = True,
    preferred: str | None = None,
    kernel_dtype: str | None = None,
    layout: Any = None,
    **keywords: Any,
) -> Sample:
    image = numbers(dtype, x)
    weight = numbers(kernel_dtype or dtype, kernel, 1)
    spatial = len(x) - 2
    renamed = {
        "strides": "window_strides",
        "input_dilation": "lhs_dilation",
        "kernel_dilation": "rhs_dilation",
        "feature_groups": "feature_group_count",
        "batch_groups": "batch_group_count",
    }

    def expected(x: Any, w: Any) -> Any:
        given = {renamed.get(key, key): value for key, value in keywords.items()}
        spec = tuple(layout.replace("->", ",").split(",")) if layout else None
        numbers_of = jax.lax.conv_dimension_numbers(x.shape, w.shape, spec)
        if given.pop("reversal", None):
            axes = zip(numbers_of.rhs_spec[2:], keywords["reversal"], strict=True)
            turned = [axis for axis, turn in axes if turn]
            w = jax.numpy.flip(w, turned)
        wide = "int64" if np.dtype(preferred or dtype).kind in "iu" else preferred or dtype
        given.setdefault("window_strides", (1,) * spatial)
        given["padding"] = given.get("padding") or [(0, 0)] * spatial
        found = jax.lax.conv_general_dilated(
            *(x.astype(wide), w.astype(wide)),
            dimension_numbers=numbers_of,
            precision="highest",
            **given,
        )
        return found.astype(preferred or dtype)

    def build(b: Any, x: Any, *w: Any) -> Any:
        given = b.constant(weight) if constant else w[0]
        return b.convolution(x, given, layout=layout, preferred_dtype=preferred, **keywords)

    arrays = (image,) if constant else (image, weight)
    return Sample("convolution", case, build, arrays, by_jax(expected, image, weight))


_X, _W = (2, 4, 6, 5), (6, 4, 3, 2)

SAMPLES = [
    *(_sample("1-D", (2, 3, 7), (4, 3, 2), dtype) for dtype in NUMBERS),
    _sample("2-D", _X, _W),
    _sample("3-D", (1, 2, 3, 4, 3), (3, 2, 2, 2, 3)),
    _sample("no spatial axis", (3, 4), (2, 4)),
    _sample("strides and padding", _X, _W, strides=(2, 3), padding=((1, 2), (0, 3))),
    _sample("same", _X, _W, strides=(2, 3), padding="SAME"),
    _sample("valid", _X, _W, padding="VALID"),
    _sample("cropped", _X, _W, padding=((-1, 2), (0, -2))),
    _sample("dilated kernel", _X, _W, kernel_dilation=(2, 3), padding=((1, 1), (0, 0))),
    _sample("dilated input", _X, _W, input_dilation=(2, 3), padding=((1, 0), (1, 1))),
    _sample("dilated input and kernel", _X, _W, input_dilation=(2, 1), kernel_dilation=(1, 2)),
    _sample("dilated input, cropped", _X, _W, input_dilation=(2, 3), padding=((-1, 0), (0, -2))),
    _sample("dilated input, wide padding", _X, _W, input_dilation=(2, 1), padding=((3, 0), (0, 1))),
    _sample("dilated input, strides", _X, _W, input_dilation=(3, 2), strides=(2, 1)),
    _sample("dilated input in groups", _X, (6, 2, 3, 2), input_dilation=(2, 2), feature_groups=2),
    _sample("groups", _X, (6, 2, 3, 2), feature_groups=2),
    _sample("depthwise", _X, (8, 1, 3, 2), feature_groups=4, padding="SAME"),
    _sample("groups of batches", (4, 3, 5, 4), (6, 3, 2, 2), batch_groups=2),
    _sample("turned kernel", _X, _W, reversal=(True, False)),
    _sample("channels last", (2, 6, 5, 4), (3, 2, 4, 6), layout="NHWC,HWIO->NHWC"),
    _sample("mixed layout", (6, 2, 5, 4), (3, 6, 4, 2), layout="HNWC,HOIW->CWNH"),
    _sample("kernel at run time", _X, _W, constant=False, padding=((1, 1), (1, 0))),
    _sample("dilated kernel at run time", _X, _W, constant=False, kernel_dilation=(2, 3)),
    _sample("turned kernel at run time", _X, _W, constant=False, reversal=(True, True)),
    _sample("dilated input, kernel at run time", _X, _W, constant=False, input_dilation=(2, 2)),
    _sample("groups at run time", _X, (6, 2, 3, 2), constant=False, feature_groups=2),
    _sample("groups of batches at run time", (4, 3, 5), (6, 3, 2), constant=False, batch_groups=2),
    _sample(
        "one axis, channels last, at run time",
        (2, 6, 4),
        (3, 4, 5),
        layout="NHC,HIO->NHC",
        constant=False,
    ),
    _sample("no output", (2, 3, 2), (4, 3, 3)),
    _sample("no channels", (2, 0, 5), (4, 0, 2)),
    _sample("only padding", (2, 3, 0), (4, 3, 2), padding=((2, 1),)),
    _sample("int8 to int32", (1, 8, 6, 5), (4, 8, 3, 3), "int8", preferred="int32"),
    _sample("int8 to int32, many terms", (1, 300, 3, 3), (2, 300, 3, 3), "int8", preferred="int32"),
    _sample("uint8 and int8", _X, _W, "uint8", kernel_dtype="int8", preferred="int32"),
    _sample("int16 at run time", _X, _W, "int16", constant=False, preferred="int32"),
    _sample("float16 to float32", _X, _W, "float16", preferred="float32"),
    _sample("int8 to float32", _X, _W, "int8", preferred="float32"),
]
