"""Samples of constants."""

from __future__ import annotations

import numpy as np
from graph.samples.sample import Sample

from coreml_delegate.graph import DType


def _constant(array: np.ndarray) -> Sample:
    return Sample("constant", "matrix", lambda b: b.constant(array), (), array)


SAMPLES = [_constant(np.array([[0, 1, 1]]).astype(dtype.label)) for dtype in DType]
