"""A sample of JAX's harnesses on each engine; ``make jax-suite`` runs all of them."""

from __future__ import annotations

from typing import Any

import pytest

from coreml_delegate.graph import Executable
from jax_suite import harnesses as suite

_SAMPLE = 0.008
_NAMES = [name for name in suite.harnesses() if suite.in_sample(name, _SAMPLE)]


@pytest.mark.parametrize("name", _NAMES)
def test_a_harness_passes_or_is_refused(name: str) -> None:
    outcome = suite.run(name)
    assert outcome.outcome in (suite.PASSED, suite.REFUSED, suite.EXCLUDED), outcome.reason


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Executable.run

    def slightly_wrong(self: Executable, *arrays: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(array * array.dtype.type(1.01) for array in run(self, *arrays, **options))

    monkeypatch.setattr(Executable, "run", slightly_wrong)
    outcome = suite.run("sin_shape_float16_20_20_")
    assert outcome.outcome == suite.WRONG
    assert set(outcome.engines) == set(suite.ENGINES)
    assert "is not" in outcome.reason


def test_other_errors_than_refusals_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no reason")

    monkeypatch.setattr(suite.stablehlo, "compile", fails)
    outcome = suite.run("sin_shape_float16_20_20_")
    assert (outcome.outcome, outcome.reason) == (suite.CRASHED, "ValueError: no reason")
