"""The rule ``fp16-accuracy`` on measurements of a method with two delegates."""

from __future__ import annotations

import math
from dataclasses import replace

from support import handmade
from support.mil import Opset

from coreml_delegate.device_check import CheckedModel, Finding, MeasuredProgram, Use, check
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Program, TensorType
from coreml_delegate.runtime.precision import Operation, PrecisionMeasurement

_SUM = handmade.op("reduce_sum", "y", TensorType(DType.FP16, (4, 64)), x="x")


def accuracy(before: float, after: float, islands: tuple[Operation, ...]) -> list[Finding]:
    """Findings of the rule in a method of two delegates; ``islands`` are in the second."""
    lossy = tuple(replace(operation, without_db=math.nan) for operation in islands)
    measurement = PrecisionMeasurement(
        40.0,
        {"mean": 90.0, "score": before},
        {"mean": 90.0, "score": after},
        islands if after >= 40 else (),
        lossy,
        True,
        100,
    )
    names = ("forward_0", "forward_1")
    program = Program(Opset.iOS18, {"main": handmade.function([_SUM], ["y"])}, "main", {})
    models = [CheckedModel(program, (Use(name, "main"),)) for name in names]
    measured = [MeasuredProgram(names, measurement)]
    return [f for f in check(models, measurements=measured) if f.rule.name == "fp16-accuracy"]


_LOST = Operation("reduce_sum", "y", (), 10, math.inf, 7e4, -math.inf, -math.inf, delegate=1)


def test_outputs_that_miss_the_target_are_found_with_what_auto_gains():
    (finding,) = accuracy(-math.inf, 71.25, (_LOST,))
    assert finding.details.got == "-inf dB at output 'score', less than 40 dB"
    assert finding.details.delegate == "forward_1"
    assert [str(place) for place in finding.details.places] == ["reduce_sum 'y' at main op 0"]
    assert finding.remedy.endswith(
        "--precision auto, which keeps 1 operation in fp32 and has 71.2 dB"
    )


def test_outputs_that_no_choice_restores_are_found_with_the_operations_that_lose_most():
    (finding,) = accuracy(12.0, 33.0, (_LOST,))
    assert finding.details.got.startswith("12.0 dB at output 'score'")
    assert [place.name for place in finding.details.places] == ["y"]
    assert "--precision float32" in finding.remedy
    (finding,) = accuracy(12.0, 33.0, ())
    assert finding.details.delegate == "forward_0, forward_1"
    assert finding.details.places == ()


def test_outputs_that_reach_the_target_are_no_finding():
    assert accuracy(40.0, 40.0, ()) == []
