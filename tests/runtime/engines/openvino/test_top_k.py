"""The first of a long axis, for which the translation is another one: stable, and in all forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import run
from support.mil import mb

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO

_SIZE = 5000
_RNG = np.random.default_rng(0)
_EQUAL = _RNG.integers(-40, 40, (2, _SIZE)).astype(np.float32)
_DISTINCT = _RNG.standard_normal((2, _SIZE)).astype(np.float32)
_INFINITE = np.where(_EQUAL > 38, np.inf, np.where(_EQUAL < -38, np.nan, -np.inf))


def _expected(x: np.ndarray, count: int, axis: int, *, ascending: bool) -> tuple[np.ndarray, ...]:
    """The first elements in the order of torch, whose largest one is NaN."""
    values, places = torch.from_numpy(x).sort(dim=axis, descending=not ascending, stable=True)
    return values.narrow(axis, 0, count).numpy(), places.narrow(axis, 0, count).numpy()


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8, 40, 312, 313])
@pytest.mark.parametrize("x", [_EQUAL, _DISTINCT, _INFINITE.astype(np.float32), 0 * _DISTINCT])
def test_equal_elements_keep_their_order(x, count, ascending):
    """The last count is one for which the kernel is the stable one."""
    values, places = run(
        OPENVINO, lambda x: mb.topk(x=x, k=count, axis=-1, ascending=ascending), {"x": x}
    )
    expected = _expected(x, count, -1, ascending=ascending)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(places, expected[1])


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("indices", [True, False])
def test_any_axis_is_a_long_one(axis, indices):
    x = _EQUAL.T.reshape((_SIZE, 2, 1) if axis == 0 else (1, _SIZE, 2)).copy()
    results = run(
        OPENVINO, lambda x: mb.topk(x=x, k=20, axis=axis, return_indices=indices), {"x": x}
    )
    for actual, expected in zip(results, _expected(x, 20, axis, ascending=False), strict=indices):
        np.testing.assert_array_equal(actual, expected)


def test_no_stable_kernel_runs_over_the_long_axis():
    main = mil.main(mil.build(lambda x: mb.topk(x=x, k=20, axis=-1), {"x": _EQUAL}))
    compiled = OPENVINO.compile(main, EngineOptions()).compiled.get_runtime_model().get_ops()
    sorts = [node for node in compiled if node.get_rt_info()["layerType"].astype(str) == "TopK"]
    assert sorted(node.get_input_shape(0)[-1] for node in sorts) == [20, _SIZE, _SIZE]
