"""Samples of normalization by given statistics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from graph.edge_arrays import FLOATS, numbers
from graph.samples.sample import Sample


def _samples() -> Iterator[Sample]:
    for dtype in FLOATS:
        for shape, axis in (((2, 3, 4), 1), ((2, 4, 3), -1), ((2, 3), 1), ((2, 3, 1, 2, 2), 1)):
            x = numbers(dtype, shape)
            scale, offset, mean = (numbers(dtype, (3,)) for _ in range(3))
            variance = np.abs(numbers(dtype, (3,))) + np.asarray(0.5, dtype)
            form = [1] * len(shape)
            form[axis] = 3
            wide = [a.astype(np.float64).reshape(form) for a in (scale, offset, mean, variance)]
            expected = (x - wide[2]) / np.sqrt(wide[3] + 1e-3) * wide[0] + wide[1]
            arrays = (x, scale, offset, mean, variance)
            yield Sample(
                "batch_norm_inference",
                f"axis {axis} of {len(shape)}",
                lambda b, *x, axis=axis: b.batch_norm_inference(*x, 1e-3, axis),
                arrays,
                expected.astype(dtype),
            )
            yield Sample(
                "batch_norm_inference",
                f"constant statistics, axis {axis} of {len(shape)}",
                lambda b, x, axis=axis, given=arrays[1:]: b.batch_norm_inference(
                    x, *map(b.constant, given), 1e-3, axis
                ),
                (x,),
                expected.astype(dtype),
            )


SAMPLES = list(_samples())
