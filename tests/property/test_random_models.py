"""Random models of a few ops in a row equal eager PyTorch, and stay as they are."""

from __future__ import annotations

import random

import pytest
from support.lowering import PRECISIONS
from support.random_models import draw_chain, wrong

from coreml_delegate.options.compile_specs import Precision


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(8)]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_lowered_models_equal_eager(seed: int, precision: Precision) -> None:
    source = random.Random(seed)
    assert wrong([draw_chain(source) for _ in range(12)], precision) == []
