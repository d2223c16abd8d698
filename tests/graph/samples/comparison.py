"""Samples of comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from graph.edge_arrays import ALL, FLOATS, pairs
from graph.samples.sample import Sample

_FUNCTIONS = {
    "EQ": ("equal", np.equal),
    "NE": ("not_equal", np.not_equal),
    "LT": ("less", np.less),
    "LE": ("less_equal", np.less_equal),
    "GT": ("greater", np.greater),
    "GE": ("greater_equal", np.greater_equal),
}


def _place(x: np.ndarray) -> np.ndarray:
    """Return numbers in the total order of floats."""
    place = np.where(np.isnan(x), np.inf, np.arctan(x.astype(np.float64)))
    return np.where((x == 0) & np.signbit(x), -1e-300, place)


def _comparisons() -> Iterator[Sample]:
    for direction, (name, function) in _FUNCTIONS.items():
        for dtype in ALL:
            x, y = pairs(dtype)
            with np.errstate(invalid="ignore"):
                yield Sample(
                    "compare",
                    direction,
                    lambda b, x, y, direction=direction: b.compare(x, y, direction),
                    (x, y),
                    function(x, y),
                )
                yield Sample(
                    name,
                    "rank 0",
                    lambda b, x, y, name=name: getattr(b, name)(x, y),
                    (x[:, 0], y[0, -1]),
                    function(x[:, 0], y[0, -1]),
                )
        for dtype in FLOATS:
            x, y = pairs(dtype)
            yield Sample(
                name,
                "total order",
                lambda b, x, y, name=name: getattr(b, name)(x, y, total_order=True),
                (x, y),
                function(_place(x), _place(y)),
            )


SAMPLES = list(_comparisons())
