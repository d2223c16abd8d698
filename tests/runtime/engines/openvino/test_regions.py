"""Slices, updates and scatters on OpenVINO with constant and run-time bounds, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support import mil
from support.engine_runs import assert_close, run
from support.mil import mb

from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((2, 3, 4)).astype(np.float32)
_IMAGE = _RNG.standard_normal((2, 8, 4, 6)).astype(np.float32)


def _inferred(function, inputs, opset=Opset.iOS18):
    expected = mil.infer(function, inputs, opset)
    actual = run(OPENVINO, function, inputs, opset)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want)


_SLICES = [
    {"begin": [0, 1, 1], "end": [2, 3, 4]},
    {"begin": [0, -2, -3], "end": [2, 3, -1], "stride": [1, 1, 2]},
    {"begin": [0, 0, 3], "end": [2, 3, 0], "stride": [1, 2, -1]},
    {"begin": [0, 0, 0], "end": [0, 0, 0], "begin_mask": [True] * 3, "end_mask": [True] * 3},
    {
        "begin": [0, 0, 2],
        "end": [2, 0, 0],
        "stride": [1, -1, -2],
        "begin_mask": [False, True, False],
        "end_mask": [False, True, True],
    },
    {"begin": [0, 0, 0], "end": [99, 2, 99]},
]
_INDEXED = {"begin": [1, 0, -1], "end": [9, 3, 9], "squeeze_mask": [True, False, True]}


@pytest.mark.parametrize("keywords", [*_SLICES, _INDEXED])
def test_slice_by_index(keywords):
    _inferred(lambda x: mb.slice_by_index(x=x, **keywords), {"x": _X})


@pytest.mark.parametrize("keywords", [*_SLICES, _INDEXED])
def test_slice_by_index_with_run_time_bounds(keywords):
    bounds = {key: np.array(keywords[key], np.int32) for key in ("begin", "end")}
    rest = {key: value for key, value in keywords.items() if key not in bounds}
    (expected,) = mil.infer(lambda x: mb.slice_by_index(x=x, **keywords), {"x": _X})
    (actual,) = run(
        OPENVINO,
        lambda x, begin, end: mb.slice_by_index(x=x, begin=begin, end=end, **rest),
        {"x": _X, **bounds},
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("keywords", _SLICES)
def test_slice_update(keywords):
    (region,) = mil.infer(lambda x: mb.slice_by_index(x=x, **keywords), {"x": _X})
    update = _RNG.standard_normal(region.shape).astype(np.float32)
    _inferred(
        lambda x, update: mb.slice_update(x=x, update=update, **keywords),
        {"x": _X, "update": update},
    )


@pytest.mark.parametrize("at_run_time", [False, True])
def test_slice_update_of_an_index(at_run_time):
    update = np.array([10, 20, 30], np.float32)
    keywords = {key: np.array(value) for key, value in _INDEXED.items()}
    inputs = {"x": _X, "update": update}
    if at_run_time:
        inputs["begin"] = keywords.pop("begin").astype(np.int32)
    (actual,) = run(
        OPENVINO,
        lambda x, update, **bounds: mb.slice_update(x=x, update=update, **bounds, **keywords),
        inputs,
    )
    expected = _X.copy()
    expected[1, :, -1] = update
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("begin", "size"), [([0, 1, 1], [2, 1, 3]), ([1, 0, -3], [-1, -1, 2]), ([0, -2, 0], [1, 1, -1])]
)
def test_slice_by_size(begin, size):
    _inferred(lambda x: mb.slice_by_size(x=x, begin=begin, size=size), {"x": _X})
    inputs = {"x": _X, "begin": np.array(begin, np.int32)}
    (expected,) = mil.infer(lambda x: mb.slice_by_size(x=x, begin=begin, size=size), {"x": _X})
    (actual,) = run(
        OPENVINO, lambda x, begin: mb.slice_by_size(x=x, begin=begin, size=size), inputs
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS16])
def test_negative_indices_count_from_the_end(opset):
    indices = np.array([-1, 0, -3], np.int32)
    inputs = {"x": _X, "i": indices}
    (actual,) = run(OPENVINO, lambda x, i: mb.gather(x=x, indices=i, axis=1), inputs, opset)
    assert_close(actual, _X[:, indices])
    places = np.array([[[-1] * 4], [[-3] * 4]], np.int32)
    (actual,) = run(
        OPENVINO,
        lambda x, i: mb.gather_along_axis(x=x, indices=i, axis=1),
        {"x": _X, "i": places},
        opset,
    )
    assert_close(actual, np.take_along_axis(_X, places, 1))
    (actual,) = run(
        OPENVINO,
        lambda x, i: mb.gather_nd(x=x, indices=i),
        {"x": _X, "i": np.array([[-1, -2], [0, 1]], np.int32)},
        opset,
    )
    assert_close(actual, _X[[-1, 0], [-2, 1]])


_SCATTERS = {
    "update": np.ndarray.__setitem__,
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scattered(mode, data, key, updates):
    result = data.copy()
    _SCATTERS[mode](result, key, updates)
    return result


@pytest.mark.parametrize("mode", _SCATTERS)
def test_scatter(mode):
    # Places repeat, except where the last write would win.
    indices = np.array([2, 0] if mode == "update" else [2, 2], np.int32)
    updates = _RNG.uniform(0.5, 2, (2, 2, 4)).astype(np.float32)
    (actual,) = run(
        OPENVINO,
        lambda x, i, u: mb.scatter(data=x, indices=i, updates=u, axis=1, mode=mode),
        {"x": _X, "i": indices, "u": updates},
    )
    assert_close(actual, _scattered(mode, _X, (slice(None), indices), updates))


@pytest.mark.parametrize("mode", _SCATTERS)
def test_scatter_along_axis(mode):
    indices = np.array([[[0, 1, 2, 0]], [[1, 1, 0, 2]]], np.int32)
    updates = _RNG.uniform(0.5, 2, (2, 1, 4)).astype(np.float32)
    key = (np.arange(2).reshape(2, 1, 1), indices, np.arange(4).reshape(1, 1, 4))
    (actual,) = run(
        OPENVINO,
        lambda x, i, u: mb.scatter_along_axis(data=x, indices=i, updates=u, axis=1, mode=mode),
        {"x": _X, "i": indices, "u": updates},
    )
    assert_close(actual, _scattered(mode, _X, key, updates))


@pytest.mark.parametrize("mode", _SCATTERS)
def test_scatter_nd(mode):
    indices = np.array([[1, 2], [0, 0]] if mode == "update" else [[1, 2], [1, 2]], np.int32)
    updates = _RNG.uniform(0.5, 2, (2, 4)).astype(np.float32)
    (actual,) = run(
        OPENVINO,
        lambda x, i, u: mb.scatter_nd(data=x, indices=i, updates=u, mode=mode),
        {"x": _X, "i": indices, "u": updates},
    )
    assert_close(actual, _scattered(mode, _X, (indices[:, 0], indices[:, 1]), updates))


def test_topk_unsorted_holds_the_same_elements():
    (actual,) = run(
        OPENVINO, lambda x: mb.topk(x=x, k=3, sort=False, return_indices=False), {"x": _X}
    )
    assert_close(np.sort(actual, -1), np.sort(_X, -1)[..., 1:])


def test_reshape_to_a_run_time_shape():
    (actual,) = run(
        OPENVINO, lambda x, s: mb.reshape(x=x, shape=s), {"x": _X, "s": np.array([4, 6], np.int32)}
    )
    assert_close(actual, _X.reshape(4, 6))
