"""Stable TopK of a long axis, by two unstable TopKs of OpenVINO's CPU plugin.

The stable kernel compares all elements with each result: 40 of 70,000 take 14 ms. The unstable
kernel uses a heap and takes 0.1 ms, but it may return any of several equal elements, and for fewer
than 8 results it is the stable algorithm.

Measured with OpenVINO 2026.4 on one thread. Source: openvino pull request #30859, a draft for one
element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import dims, ints, rank, stable_topk
from coreml_delegate.runtime.engines.openvino.values import Tensor

_LONG = 4096  # elements; on fewer, a stable TopK takes less than 0.1 ms per result
_LARGEST = 1 << 22  # elements; twice an index has to be exact in f32, in which the plugin selects
_PART = 16
_HEAP = 8


def is_long(x: Tensor, count: int, axis: int) -> bool:
    """Whether ``first_indices`` is worthwhile for the ``count`` first elements of ``axis`` >= 0."""
    size = dims(x)[axis]
    return size is not None and _LONG <= size <= _LARGEST and 0 < count <= size // _PART


def first_indices(x: Tensor, count: int, axis: int, mode: str) -> Any:
    """Return the indices of the first elements in stable order, i32.

    Let ``last`` be the value at position ``count`` of the sorted axis. All elements sorted before
    ``last`` are taken, then the elements equal to ``last`` with the lowest indices. ``x`` has no
    NaN, ``axis`` is counted from the front, and ``mode`` is ``max`` or ``min``; see ``is_long``.
    """
    size = dims(x)[axis] or 0
    last = ops.gather(_heap(x, count, axis, mode).output(0), ints([count - 1]), ints(axis))
    shape = [size if at == axis else 1 for at in range(rank(x))]
    ranks = np.arange(size, 0, -1, dtype=np.int32).reshape(shape)
    before = ops.greater(x, last) if mode == "max" else ops.less(x, last)
    equal_or_after = ops.select(ops.equal(x, last), ops.constant(ranks), ints(0))
    ranked = ops.select(before, ops.constant(ranks + np.int32(size)), equal_or_after)
    candidates = _heap(ranked, count, axis, "max").output(1)
    indices = ops.gather(candidates, ints(list(range(count))), ints(axis))
    _, order = stable_topk(ops.gather_elements(x, indices, axis), ints(count), axis, mode)
    return ops.gather_elements(indices, order, axis)


def _heap(x: Any, count: int, axis: int, mode: str) -> Any:
    """Return an unstable TopK of at least 8 results, so that the plugin uses a heap."""
    k = ints(max(count, _HEAP))
    return ops.topk(x, k, axis, mode, "value", index_element_type="i32")
