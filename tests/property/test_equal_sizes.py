"""Dimensions of equal sizes are not taken for each other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import mil
from support.engine_runs import assert_close
from support.equal_sizes import draw_program

from coreml_delegate.ops.merging import transposes
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

pytestmark = pytest.mark.property

_QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


@pytest.mark.parametrize(
    "seed",
    [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 400))],
)
def test_engines_agree_on_programs_of_few_sizes(seed: int) -> None:
    source = random.Random(seed)
    function, inputs = draw_program(source, source.randint(3, 12))
    main = mil.main(mil.build(function, inputs))
    expected, actual = (
        engine.compile(main, EngineOptions())(mil.features(main, inputs))
        for engine in (REFERENCE, OPENVINO)
    )
    for name, wanted in expected.items():
        # Products in a row magnify rounding beyond the tolerance of one op.
        scale = max(1.0, float(np.abs(wanted).max()))
        assert_close(actual[name] / scale, wanted / scale, "fp16")


@settings(_QUICK, max_examples=50)
@given(st.data())
def test_permutations_in_turns_are_one_permutation(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=6, max_size=8))
    order = data.draw(st.permutations(range(len(sizes))))
    x = np.arange(np.prod(sizes))
    expected = x.reshape(sizes).transpose(order)
    for shape, dims in transposes(sizes, order):
        x = x.reshape(shape).transpose(dims)
    np.testing.assert_array_equal(x.reshape(expected.shape), expected)
