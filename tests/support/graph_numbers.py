"""Arrays whose products and sums are equal in 64-bit types and their storage dtypes."""

from __future__ import annotations

import numpy as np

from support.graph_samples import FLOATS


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random numbers from the whole range of a type; 64-bit integers from the range of 8 bits."""
    random = np.random.default_rng(seed)
    if dtype in FLOATS:
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    if dtype == "bool":
        return np.asarray(random.integers(0, 2, shape)).astype(bool)
    bounds = np.iinfo({"int64": "int8", "uint64": "uint8"}.get(dtype, dtype))
    return np.asarray(random.integers(bounds.min, bounds.max, shape, endpoint=True)).astype(dtype)
