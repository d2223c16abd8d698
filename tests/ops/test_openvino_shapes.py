"""Ops that rearrange, slice and index on OpenVINO, against coremltools, numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import assert_close, run
from support.mil import mb

from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.mil.opset import Opset

_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((2, 3, 4)).astype(np.float32)
_IMAGE = _RNG.standard_normal((2, 8, 4, 6)).astype(np.float32)


def _inferred(function, inputs, opset=Opset.iOS18):
    expected = mil.infer(function, inputs, opset)
    actual = run(OPENVINO, function, inputs, opset)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: mb.reshape(x=x, shape=[4, -1]),
        lambda x: mb.reshape(x=x, shape=[0, 2, 6]),
        lambda x: mb.reshape(x=x, shape=[6, 0]),
        lambda x: mb.reshape(x=x, shape=[1, 0, -1, 2, 0]),
        lambda x: mb.flatten2d(x=x, axis=2),
        lambda x: mb.flatten2d(x=x, axis=-2),
        lambda x: mb.expand_dims(x=x, axes=[0, -1]),
        lambda x: mb.expand_dims(x=x, axes=[-3]),
        lambda x: mb.squeeze(x=mb.expand_dims(x=x, axes=[0, 2])),
        lambda x: mb.squeeze(x=mb.expand_dims(x=x, axes=[0, 2]), axes=[2]),
        lambda x: mb.transpose(x=x, perm=[-1, 0, 1]),
        lambda x: mb.concat(values=[x, x], axis=-1),
        lambda x: mb.stack(values=[x, x], axis=1),
        lambda x: mb.stack(values=[x, x], axis=-1),
        lambda x: mb.split(x=x, num_splits=2, axis=-1),
        lambda x: mb.split(x=x, split_sizes=[1, 3], axis=2),
        lambda x: mb.tile(x=x, reps=[1, 2, 3]),
        lambda x: mb.reverse(x=x, axes=[0, -1]),
        lambda x: mb.reverse(x=x),
        lambda x: mb.shape(x=x),
        lambda x: mb.identity(x=x),
        lambda x: mb.pad(x=x, pad=[1, 2, 0, 3], mode="constant", constant_val=np.float32(7)),
        lambda x: mb.pad(x=x, pad=[0, 1, 1, 2, 3, 2], mode="reflect"),
        lambda x: mb.pad(x=x, pad=[2, 1], mode="replicate"),
        lambda x: mb.band_part(x=x, lower=1, upper=0),
        lambda x: mb.band_part(x=x, lower=-1, upper=1),
        lambda x: mb.fill_like(ref_tensor=x, value=np.float32(2.5)),
    ],
)
def test_rearranging(build):
    _inferred(build, {"x": _X})


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


def test_concat_interleaved():
    other = _X + 10
    (actual,) = run(
        OPENVINO,
        lambda x, y: mb.concat(values=[x, y], axis=1, interleave=True),
        {"x": _X, "y": other},
    )
    assert_close(actual, np.stack([_X, other], axis=2).reshape(2, 6, 4))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda x: mb.pixel_shuffle(x=x, upscale_factor=2),
            lambda x: torch.nn.functional.pixel_shuffle(x, 2),
        ),
        (
            lambda x: mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)),
            lambda x: torch.nn.functional.pixel_unshuffle(x, 2),
        ),
        (
            lambda x: mb.depth_to_space(x=x, block_size=2),
            lambda x: (
                x.reshape(2, 2, 2, 2, 4, 6).permute(0, 3, 4, 1, 5, 2).reshape(2, 2, 8, 12)
            ),
        ),
        (
            lambda x: mb.space_to_depth(x=x, block_size=2),
            lambda x: (
                x.reshape(2, 8, 2, 2, 3, 2).permute(0, 3, 5, 1, 2, 4).reshape(2, 32, 2, 3)
            ),
        ),
        (
            lambda x: mb.space_to_batch(x=x, block_shape=[2, 3], paddings=[[0, 0], [1, 2]]),
            lambda x: (
                torch.nn.functional.pad(x, (1, 2, 0, 0))
                .reshape(2, 8, 2, 2, 3, 3)
                .permute(3, 5, 0, 1, 2, 4)
                .reshape(12, 8, 2, 3)
            ),
        ),
        (
            lambda x: mb.batch_to_space(x=x, block_shape=[2, 1], crops=[[1, 0], [0, 2]]),
            lambda x: x.reshape(2, 1, 8, 4, 6).permute(1, 2, 3, 0, 4).reshape(1, 8, 8, 6)[
                :, :, 1:, :-2
            ],
        ),
        (
            lambda x: mb.sliding_windows(x=x, axis=-1, size=3, stride=2),
            lambda x: x.unfold(3, 3, 2),
        ),
        (lambda x: mb.crop(x=x, crop_height=[1, 2], crop_width=[0, 1]), lambda x: x[..., 1:-2, :-1]),
    ],
)
def test_space(build, expected):
    (actual,) = run(OPENVINO, build, {"x": _IMAGE})
    assert_close(actual, expected(torch.from_numpy(_IMAGE)).numpy())


def test_reverse_sequence():
    lengths = np.array([1, 3], np.int32)
    (actual,) = run(
        OPENVINO,
        lambda x, lengths: mb.reverse_sequence(x=x, lengths=lengths, seq_axis=1, batch_axis=0),
        {"x": _X, "lengths": lengths},
    )
    assert_close(actual, np.stack([_X[0], _X[1, ::-1]]))


@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS16, Opset.iOS17])
class TestGather:
    def test_gather(self, opset):
        indices = np.array([[2, 0], [1, 1]], np.int32)
        for axis in (1, -2):
            _inferred(
                lambda x, i, axis=axis: mb.gather(x=x, indices=i, axis=axis),
                {"x": _X, "i": indices},
                opset,
            )

    def test_gather_along_axis(self, opset):
        indices = _RNG.integers(0, 3, (2, 5, 4)).astype(np.int32)
        _inferred(
            lambda x, i: mb.gather_along_axis(x=x, indices=i, axis=1), {"x": _X, "i": indices}, opset
        )

    def test_gather_nd(self, opset):
        indices = np.array([[1, 2], [0, 0]], np.int32)
        (actual,) = run(
            OPENVINO, lambda x, i: mb.gather_nd(x=x, indices=i), {"x": _X, "i": indices}, opset
        )
        assert_close(actual, _X[[1, 0], [2, 0]])


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


def test_gather_batch_dims():
    indices = np.array([[0, 2], [1, 1]], np.int32)
    _inferred(
        lambda x, i: mb.gather(x=x, indices=i, axis=1, batch_dims=1), {"x": _X, "i": indices}
    )
    (actual,) = run(
        OPENVINO,
        lambda x, i: mb.gather_nd(x=x, indices=i, batch_dims=1),
        {"x": _X, "i": np.array([[2], [0]], np.int32)},
    )
    assert_close(actual, np.stack([_X[0, 2], _X[1, 0]]))


_SCATTERS = {
    "update": lambda data, at, updates: np.copyto(data[:, at], updates),
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scattered(mode, data, key, updates):
    result = data.copy()
    if mode == "update":
        result[key] = updates
    else:
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


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS16, Opset.iOS17])
def test_topk(opset, ascending):
    _inferred(lambda x: mb.topk(x=x, k=2, axis=1, ascending=ascending), {"x": _X}, opset)


def test_topk_without_indices():
    (actual,) = run(OPENVINO, lambda x: mb.topk(x=x, k=4, return_indices=False), {"x": _X})
    assert_close(actual, -np.sort(-_X, -1))


def test_topk_unsorted_holds_the_same_elements():
    (actual,) = run(
        OPENVINO, lambda x: mb.topk(x=x, k=3, sort=False, return_indices=False), {"x": _X}
    )
    assert_close(np.sort(actual, -1), np.sort(_X, -1)[..., 1:])


@pytest.mark.parametrize("ascending", [False, True])
def test_argsort(ascending):
    _inferred(lambda x: mb.argsort(x=x, axis=1, ascending=ascending), {"x": _X})


def test_one_hot():
    indices = np.array([[0, 2], [1, 1]], np.int32)
    (actual,) = run(
        OPENVINO,
        lambda i: mb.one_hot(
            indices=i, one_hot_vector_size=3, axis=1, on_value=np.float32(5), off_value=np.float32(-1)
        ),
        {"i": indices},
    )
    expected = np.where(np.moveaxis(np.eye(3)[indices], -1, 1) > 0, 5.0, -1.0)
    assert_close(actual, expected)


def test_non_zero():
    x = np.array([[0, 1.5], [2, 0]], np.float32)
    _inferred(lambda x: mb.non_zero(x=x), {"x": x})


def test_fill_and_range():
    shape = np.array([2, 3], np.int32)
    (actual,) = run(OPENVINO, lambda s: mb.fill(shape=s, value=np.int32(4)), {"s": shape})
    assert_close(actual, np.full((2, 3), 4), "int32")
    bounds = {"start": np.int32(2), "end": np.int32(11), "step": np.int32(3)}
    (actual,) = run(
        OPENVINO,
        lambda end: mb.range_1d(start=bounds["start"], end=mb.squeeze(x=end), step=bounds["step"]),
        {"end": np.array([11], np.int32)},
    )
    assert_close(actual, np.array([2, 5, 8]), "int32")


def test_reshape_like():
    reference = np.zeros((4, 6), np.float32)
    (actual,) = run(
        OPENVINO,
        lambda x, y: mb.reshape_like(
            x=x, ref_tensors=[y, y], begins=[0, 1], ends=[1, 0], end_masks=[False, True]
        ),
        {"x": _X, "y": reference},
    )
    assert_close(actual, _X.reshape(4, 6))


def test_reshape_to_a_run_time_shape():
    (actual,) = run(
        OPENVINO, lambda x, s: mb.reshape(x=x, shape=s), {"x": _X, "s": np.array([4, 6], np.int32)}
    )
    assert_close(actual, _X.reshape(4, 6))


@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS16])
def test_reshape_zero_keeps_the_dimension_in_place(opset):
    _inferred(lambda x: mb.reshape(x=x, shape=[0, 0, 2]), {"x": _X[..., :2]}, opset)
