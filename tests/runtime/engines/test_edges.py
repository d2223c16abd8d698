"""Forms of MIL ops at the edges, on both engines, beside NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.engine_runs import run
from support.mil import mb

from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.targets import Opset

_ENGINES = {"reference": REFERENCE, "openvino": OPENVINO}
_MATRIX = np.arange(8, dtype=np.float32).reshape(4, 2)
_BATCH = np.arange(6, dtype=np.float32).reshape(1, 3, 2)
_SIGNS = np.float32([[1], [1], [-1], [-1]])


def _normalized(x: Any) -> Any:
    """Scale rows, not columns, by plus and minus 1: no root mean square norm."""
    pairs = mb.mul(x=mb.concat(values=[x, x], axis=1), y=_SIGNS)
    norm = mb.layer_norm(x=pairs, axes=[1], epsilon=np.float32(1e-5))
    return mb.slice_by_index(x=norm, begin=[0, 0], end=[4, 2])


def _numpy_norm(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pairs = np.concatenate([x, x], 1) * _SIGNS
    centred = pairs - pairs.mean(1, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5))[:, :2]


def _divided(x: Any) -> Any:
    data = np.int32([50331657, 2147483646, -16777217])
    return mb.scatter(data=data, indices=np.int32([0, 1, 2]), updates=x, axis=0, mode="div")


CASES: dict[str, tuple[Callable[[Any], Any], np.ndarray[Any, Any], Any]] = {
    "negative index in a batch of one": (
        lambda x: mb.gather(x=x, indices=np.int32([[-1, -1]]), axis=1, batch_dims=1),
        _BATCH,
        _BATCH[:, [2, 2]],
    ),
    "squeezed axis without its begin": (
        lambda x: mb.slice_by_index(
            x=x,
            begin=[2, 0],
            end=[3, 2],
            stride=[1, 2],
            begin_mask=[True, False],
            squeeze_mask=[True, False],
        ),
        _MATRIX,
        _MATRIX[0, ::2],
    ),
    "l2 windows beyond the end": (
        lambda x: mb.l2_pool(
            x=x, kernel_sizes=[2], strides=[2], pad_type="custom", pad=[0, 0], ceil_mode=True
        ),
        np.ones((1, 1, 3), np.float32),
        np.sqrt(np.float32([[[2, 1]]])),
    ),
    "nothing reversed": (
        lambda x: mb.add(x=mb.reverse(x=x, axes=np.zeros(0, np.int32)), y=np.float32(1)),
        _MATRIX,
        _MATRIX + 1,
    ),
    "rows of mirrored pairs": (_normalized, _MATRIX + 1, _numpy_norm(_MATRIX + 1)),
    "scattered divisors": (
        _divided,
        np.int32([3, 2, 1]),
        np.int32([16777219, 1073741823, -16777217]),
    ),
    "mean of single elements": (
        lambda x: mb.reduce_mean(x=mb.expand_dims(x=x, axes=[1]), axes=[1]),
        _MATRIX,
        _MATRIX,
    ),
}


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_edges(name: str, engine: str) -> None:
    function, x, expected = CASES[name]
    target = Opset.iOS16 if "batch" in name else Opset.iOS17
    (result,) = run(_ENGINES[engine], function, {"x": x}, opset=target)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
