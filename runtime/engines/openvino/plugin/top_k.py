"""The first few of a long axis in stable order, by unstable kernels of OpenVINO's CPU plugin.

A stable TopK compares all elements with each one that it returns: 40 of 70,000 take 14 ms. An
unstable one keeps a heap and takes 0.1 ms, but leaves open which of equal elements it returns, and
for fewer than 8 it does as the stable one does.

Measured with OpenVINO 2026.4 on one thread. Source: openvino pull request #30859, a draft for one
element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import dims, ints, rank
from coreml_delegate.runtime.engines.openvino.values import Tensor

_LONG = 4096  # elements; of fewer a stable TopK takes less than a tenth of a millisecond each
_LARGEST = 1 << 22  # twice the places have to be exact in f32, in which the plugin selects
_PART = 16
_HEAP = 8


def is_long(x: Tensor, count: int, axis: int) -> bool:
    """Whether ``first_places`` is for ``count`` elements of an axis, counted from the front."""
    size = dims(x)[axis]
    return size is not None and _LONG <= size <= _LARGEST and 0 < count <= size // _PART


def first_places(x: Tensor, count: int, axis: int, mode: str) -> Any:
    """Return the places of the first elements in stable order, i32.

    Elements before the last one of them in order come with all their places. Of the elements that
    equal it, those with the lowest places come.

    Args:
        x: Floating-point numbers, none of them NaN.
        count: Number of elements; see ``is_long``.
        axis: Counted from the front.
        mode: ``max`` or ``min``.
    """
    size = dims(x)[axis] or 0
    last = ops.gather(_heap(x, count, axis, mode).output(0), ints([count - 1]), ints(axis))
    shape = [size if at == axis else 1 for at in range(rank(x))]
    ranks = np.arange(size, 0, -1, dtype=np.int32).reshape(shape)
    before = ops.greater(x, last) if mode == "max" else ops.less(x, last)
    equal_or_behind = ops.select(ops.equal(x, last), ops.constant(ranks), ints(0))
    ranked = ops.select(before, ops.constant(ranks + np.int32(size)), equal_or_behind)
    found = _heap(ranked, count, axis, "max").output(1)
    places = ops.gather(found, ints(list(range(count))), ints(axis))
    order = ops.topk(
        ops.gather_elements(x, places, axis),
        ints(count),
        axis,
        mode,
        "value",
        index_element_type="i32",
        stable=True,
    )
    return ops.gather_elements(places, order.output(1), axis)


def _heap(x: Any, count: int, axis: int, mode: str) -> Any:
    most = ints(max(count, _HEAP))
    return ops.topk(x, most, axis, mode, "value", index_element_type="i32")
