"""Sums and counts of comparisons are exact: no order and no cut of the samples changes them."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch._higher_order_ops.while_loop import while_loop

from coreml_delegate.errors import InputError
from coreml_delegate.runtime import accuracy
from coreml_delegate.runtime.accuracy import Accuracy, ExactSum, Int32Watch

_FINITE = st.floats(allow_nan=False, allow_infinity=False)


def _sum(*parts: np.ndarray) -> ExactSum:
    total = ExactSum()
    for part in parts:
        total.add(part)
    return total


@pytest.mark.property
@given(arrays.arrays(np.float64, st.integers(0, 40), elements=_FINITE), st.integers(0, 40))
def test_a_sum_is_that_of_fractions(numbers, cut):
    total = sum(map(Fraction, numbers.tolist()), Fraction(0))
    found = _sum(numbers[:cut], numbers[cut:])
    assert Fraction(found.units, 1 << 1074) == total
    assert found == _sum(numbers[::-1])
    try:
        expected = math.fsum(numbers)
    except OverflowError:  # of a partial sum, which ours has not
        return
    assert float(found) == expected


def test_large_arrays_are_summed_in_pieces(monkeypatch):
    numbers = np.random.default_rng(0).standard_normal(10_000) * 10.0 ** (np.arange(10_000) % 7)
    whole = _sum(numbers)
    monkeypatch.setattr(accuracy, "_CHUNK", 13)
    assert _sum(numbers) == whole
    assert float(whole) == math.fsum(numbers)


def test_the_largest_significands_do_not_round():
    largest = np.full(1 << 18, np.nextafter(2.0, 0.0))
    assert Fraction(_sum(largest).units, 1 << 1074) == Fraction(largest[0]) * largest.size


def test_what_is_not_finite_stays_so():
    assert float(_sum(np.array([1.0, np.inf]))) == math.inf
    assert math.isnan(float(_sum(np.array([np.inf]), np.array([-np.inf, 3.0]))))
    assert math.isnan(float(_sum(np.array([np.nan]))))
    assert float(_sum(np.full(4, np.finfo(np.float64).max))) == math.inf


def _accuracy(expected, actual, labels, order) -> Accuracy:
    accuracy = Accuracy()
    for rows in order:
        accuracy.add(expected[rows], actual[rows], labels=labels[rows])
    return accuracy


def test_accuracy_does_not_depend_on_order_or_batches():
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(60, 12, generator=generator) * 10 ** torch.arange(60.0)[:, None].div(9)
    actual = expected + torch.randn(60, 12, generator=generator)
    labels = torch.randint(0, 12, (60,), generator=generator)
    singles = [slice(n, n + 1) for n in range(60)]
    shuffled = random.Random(0).sample(singles, len(singles))
    batches = [slice(n, n + 13) for n in range(0, 60, 13)]
    first, *others = (
        _accuracy(expected, actual, labels, order)
        for order in (singles, shuffled, batches, [slice(None)])
    )
    assert all(other == first for other in others)
    assert first.sqnr_db == others[0].sqnr_db


def test_classes_are_counted_as_numpy_counts_them():
    generator = np.random.default_rng(1)
    expected, actual = generator.standard_normal((2, 40, 9)).astype(np.float32)
    labels = generator.integers(0, 9, 40)
    accuracy = Accuracy()
    accuracy.add(*map(torch.from_numpy, (expected, actual)), labels=torch.from_numpy(labels))
    best = np.argsort(-actual, axis=1)[:, :5]
    model_best = np.argsort(-expected, axis=1)[:, :5]
    first = expected.argmax(1)
    assert accuracy.top1_agreement == np.mean(first == actual.argmax(1))
    assert accuracy.top5_agreement == np.mean((best == first[:, None]).any(1))
    assert accuracy.hits.top1 == np.mean(actual.argmax(1) == labels)
    assert accuracy.hits.top5 == np.mean((best == labels[:, None]).any(1))
    assert accuracy.model_hits.top5 == np.mean((model_best == labels[:, None]).any(1))


def test_five_classes_have_no_top5():
    accuracy = Accuracy()
    accuracy.add(torch.arange(5.0), torch.arange(5.0))
    assert (accuracy.top1_agreement, accuracy.top5_agreement) == (1.0, None)
    assert accuracy.hits.top1 is None


def test_nan_is_among_no_best():
    accuracy = Accuracy()
    accuracy.add(torch.arange(6.0), torch.full((6,), math.nan), labels=torch.tensor([0]))
    assert (accuracy.top5_agreement, accuracy.hits.top5) == (0.0, 0.0)


@pytest.mark.parametrize("label", [-1, 6])
def test_labels_beyond_the_classes_are_refused(label):
    scores = torch.arange(6.0)
    with pytest.raises(InputError, match=f"no class of the model: got {label}, expected 0 to 5"):
        Accuracy().add(scores, scores, labels=torch.tensor([label]))


def test_control_flow_is_watched_by_its_results() -> None:
    def doubled(values: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda v: v.sum() < 2**40, lambda v: (v * 2,), (values,))[0]

    for start, first in ((torch.tensor([1, 1]), "while_loop"), (torch.ones(2), None)):
        with Int32Watch() as watch:
            result = doubled(start)
        assert result.sum() >= 2**40
        assert watch.first == first
