"""The rules on values: overflow and underflow of fp16 in runs on the user's data."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from support.mil import Opset, build, main, mb

from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.runtime.diagnosis import diagnose
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE


def runs(function: Callable[..., Any], *values: float) -> tuple[CheckedModel, list[Any]]:
    model = build(function, {"x": np.zeros((2, 64), np.float16)}, Opset.iOS17)
    compiled = REFERENCE.compile(main(model), EngineOptions())
    inputs = [{"x": np.full((2, 64), value, np.float16)} for value in values]
    diagnoses = [("forward_0", diagnose(main(model), compiled, each)) for each in inputs]
    return CheckedModel(model, (Use("forward_0", "main"),)), diagnoses


def on_values(rule: str, function: Callable[..., Any], *values: float) -> list[Any]:
    model, diagnoses = runs(function, *values)
    return [f for f in check([model], diagnoses) if f.rule.name == rule]


def squared(x):
    return mb.tanh(x=mb.square(x=x, name="sq"))


def test_values_far_from_the_end_of_fp16_are_no_risk():
    assert on_values("fp16-overflow", squared, 100.0) == []
    assert on_values("fp16-underflow", squared, 1.0) == []


def test_values_near_the_end_of_fp16():
    (finding,) = on_values("fp16-overflow", squared, 200.0)
    assert finding.details.got == "4e+04, 61% of the largest fp16"
    assert finding.details.places[0].name == "sq"


def test_an_overflow_in_any_run_is_the_worst():
    for values in ((200.0, 300.0), (300.0, 200.0)):
        (finding,) = on_values("fp16-overflow", squared, *values)
        assert finding.details.got == "infinite (128 elements), and finite in fp32"


def test_the_largest_value_of_several_runs_counts():
    (finding,) = on_values("fp16-overflow", squared, 200.0, 250.0, 210.0)
    assert "6.25e+04" in finding.details.got


def test_underflow():
    first, _ = on_values("fp16-underflow", squared, 1e-4)
    assert first.details.places[0].name == "sq"
    assert on_values("fp16-underflow", squared, 1e-1) == []


def test_values_in_fp32_are_no_risk_of_fp16():
    def wide(x):
        square = mb.square(x=mb.cast(x=x, dtype="fp32"))
        return mb.cast(x=mb.sqrt(x=square), dtype="fp16")

    assert on_values("fp16-overflow", wide, 300.0) == []


def in_fp32(x):
    return mb.cast(x=mb.tanh(x=mb.square(x=mb.cast(x=x, dtype="fp32"), name="sq")), dtype="fp16")


def test_whether_fp16_would_do_for_a_program_in_fp32():
    (finding,) = on_values("fp32-program", in_fp32, 300.0, 2.0)
    assert finding.details.got == (
        "3 results in fp32, none in fp16; on the data 1 of them near or beyond what fp16 holds"
    )
    assert re.fullmatch(
        r"Lower in fp16 \(--precision float16\), and keep square 'sq' at main op \d+ in fp32 .*",
        finding.remedy,
    )
    (finding,) = on_values("fp32-program", in_fp32, 2.0)
    assert "on the data none of them near or beyond" in finding.details.got
    assert finding.remedy == "Lower in fp16 (--precision float16)"


def test_without_data_nothing_is_said_of_values():
    model, _ = runs(in_fp32, 2.0)
    (finding,) = [f for f in check([model]) if f.rule.name == "fp32-program"]
    assert finding.details.got == "3 results in fp32, none in fp16"
