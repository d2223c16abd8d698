"""Random values of the OpenVINO engine: distributions, seeds, places in a program."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import handmade, mil
from support.mil import mb
from support.tolerances import kolmogorov_bound

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.dtypes import DType

_COUNT = 20_000
_NONE = np.zeros(1, np.float32)

_SEEDS = pytest.mark.parametrize("seed", [-1, 0, 7, 2**31 - 1])


def _compile(function, inputs=None):
    return OPENVINO.compile(mil.main(mil.build(function, inputs or {"x": _NONE})), EngineOptions())


def _draw(function, inputs=None):
    inputs = inputs or {"x": _NONE}
    (values,) = _compile(function, inputs)(inputs).values()
    return values


def _distance(values, cumulative):
    """Greatest distance of the empirical from a continuous distribution (Kolmogorov, Smirnov)."""
    ordered = np.sort(values.ravel())
    expected = np.vectorize(cumulative)(ordered)
    steps = np.arange(ordered.size + 1) / ordered.size
    return max(np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max())


@_SEEDS
def test_uniform(seed):
    values = _draw(
        lambda x: mb.random_uniform(
            shape=[100, _COUNT // 100], low=np.float32(-2), high=np.float32(4), seed=seed
        )
    )
    assert -2 <= values.min() < values.max() < 4
    assert _distance(values, lambda v: (v + 2) / 6) < kolmogorov_bound(_COUNT)
    # Neighbours along either axis are independent; five standard deviations of a correlation.
    for left, right in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(_COUNT)


@_SEEDS
@pytest.mark.parametrize(
    ("factor", "summand"), [(-2, 0), (0, 0), (1, 1e9), (-1, 0.5), (0.5, 1)], ids=str
)
def test_uniform_times_and_plus_numbers(factor, summand, seed):
    factor, summand = np.float32(factor), np.float32(summand)

    def function(x):
        values = mb.random_uniform(shape=[1000], low=np.float32(-1), high=np.float32(2), seed=seed)
        return mb.add(x=mb.mul(x=values, y=factor), y=summand)

    values = _draw(function)
    low, high = sorted(summand + factor * np.float32([-1, 2]))
    assert low <= values.min() <= values.max() <= high
    assert np.ptp(values) >= 0.9 * (high - low)


@pytest.mark.parametrize("seed", [-1, 7])
@pytest.mark.parametrize(("low", "high"), [(3, 3), (2, -1)])
def test_uniform_over_an_empty_or_reversed_interval(low, high, seed):
    values = _draw(
        lambda x: mb.random_uniform(
            shape=[500], low=np.float32(low), high=np.float32(high), seed=seed
        )
    )
    assert values.min() >= min(low, high)
    assert values.max() <= max(low, high)
    assert values.mean() == pytest.approx((low + high) / 2, abs=0.2)


@_SEEDS
def test_normal(seed):
    values = _draw(
        lambda x: mb.random_normal(
            shape=[_COUNT], mean=np.float32(1), stddev=np.float32(3), seed=seed
        )
    )
    assert np.isfinite(values).all()
    distance = _distance(values, lambda v: 0.5 + 0.5 * math.erf((v - 1) / 3 / math.sqrt(2)))
    assert distance < kolmogorov_bound(_COUNT)


@_SEEDS
def test_bernoulli(seed):
    values = _draw(lambda x: mb.random_bernoulli(shape=[_COUNT], prob=np.float32(0.25), seed=seed))
    assert set(values) == {0, 1}
    assert values.mean() == pytest.approx(0.25, abs=kolmogorov_bound(_COUNT))


@_SEEDS
@pytest.mark.parametrize("mode", ["logits", "probs"])
def test_categorical(mode, seed):
    shares = np.array([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 0.0, 1.0]], np.float32)
    x = shares
    if mode == "logits":
        with np.errstate(divide="ignore"):
            x = np.maximum(np.log(shares), np.float32(-1e4)) + np.float32(5)
    values = _draw(
        lambda x: mb.random_categorical(x=x, mode=mode, size=_COUNT, seed=seed), {"x": x}
    )
    assert values.shape == (2, _COUNT)
    for row, expected in zip(values, shares, strict=True):
        found = np.bincount(row.astype(int), minlength=4) / _COUNT
        np.testing.assert_allclose(found, expected, atol=kolmogorov_bound(_COUNT))
        assert not found[expected == 0].any()


def test_an_unknown_mode_is_refused():
    op = handmade.op(
        "random_categorical",
        "y",
        x="x",
        mode=handmade.text("odds"),
        size=handmade.constant(1, DType.INT32),
    )
    with pytest.raises(UnsupportedOpError, match="got odds, expected logits or probs"):
        OPENVINO.compile(handmade.function([op], ["y"]), EngineOptions())


@pytest.mark.parametrize("seed", [-1, 7])
def test_shapes_known_at_run_time(seed):
    def function(shape):
        return (
            mb.random_uniform(shape=shape, seed=seed),
            mb.random_normal(shape=shape, seed=seed),
            mb.random_bernoulli(shape=shape, seed=seed),
        )

    compiled = _compile(function, {"shape": np.array([2, 3], np.int32)})
    for shape in ((2, 3), (40, 50), (0, 3)):
        for values in compiled({"shape": np.array(shape, np.int32)}).values():
            assert values.shape == shape
            # Six unseeded coins may well fall alike; two thousand never do.
            assert values.size < 100 or np.unique(values).size >= 2


@pytest.mark.parametrize("seed", [-1, 7])
def test_a_seed_repeats_its_values(seed):
    def function(x):
        return (
            mb.random_uniform(shape=[64], seed=seed),
            mb.random_uniform(shape=[64], seed=seed),
            mb.random_uniform(shape=[64], seed=8),
        )

    compiled = _compile(function)
    runs = [list(compiled({"x": _NONE}).values()) for _ in range(2)]
    runs.append(list(_compile(function)({"x": _NONE}).values()))
    first, twin, other = runs[0]
    repeats = seed != -1
    assert all(np.array_equal(first, run[0]) is repeats for run in runs[1:])
    assert np.array_equal(first, twin) is repeats
    assert not np.array_equal(first, other)


def test_unseeded_values_differ_between_iterations():
    def function(count):
        def body(i, held):
            return mb.add(x=i, y=np.int32(1)), mb.list_write(
                ls=held, index=i, value=mb.random_uniform(shape=[4])
            )

        ls = mb.make_list(init_length=3, dynamic_length=False, elem_shape=[4], dtype="fp32")
        _, ls = mb.while_loop(
            _cond=lambda i, ls: mb.less(x=i, y=mb.squeeze(x=count, axes=[0])),
            _body=body,
            loop_vars=(mb.const(val=np.int32(0)), ls),
        )
        return mb.list_gather(ls=ls, indices=[0, 1, 2])

    values = _draw(function, {"count": np.array([3], np.int32)})
    assert np.unique(values).size == 12
