"""Core ML's plans beside the predictions, on a stand-in of its native proxy."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.compute_plans import CPU, GPU, Mac
from support.mil import Opset, builder_program, mb
from support.packages import package_files

from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.device_check.compute_plan import (
    Processor,
    compare_plan,
    compute_plan,
)
from coreml_delegate.errors import EngineUnavailableError, ProgramError
from coreml_delegate.formats.files import new_folder
from coreml_delegate.runtime.mil.reader import read_mlpackage
from coreml_delegate.targets import ComputeUnit


def chosen(x):
    values, indices = mb.topk(x=mb.relu(x=x, name="positive"), k=2, axis=-1, name="top")
    return mb.tanh(x=values, name="y"), indices


def branches(x):
    test = mb.greater(x=mb.reduce_sum(x=x), y=np.float32(0))
    return mb.cond(
        pred=test,
        _true_fn=lambda: mb.relu(x=x, name="inside"),
        _false_fn=lambda: mb.identity(x=x),
    )


@pytest.fixture
def package(tmp_path):
    return saved(tmp_path / "model.mlpackage", chosen)


def saved(path, function):
    program = builder_program(function, {"x": np.zeros((2, 8), np.float32)}, Opset.iOS17)
    with new_folder(package_files(program, Opset.iOS17), path):
        pass
    return path


def test_elsewhere_it_is_an_error(package):
    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    with pytest.raises(EngineUnavailableError, match="only Core ML itself has compute plans"):
        compute_plan(package, None)


def test_every_operation_has_its_processor(package, tmp_path, monkeypatch):
    mac = Mac(monkeypatch, tmp_path, {"topk": CPU, "tanh": GPU})
    planned = compute_plan(package, None).operations
    found = {(op.op_type, op.output): op for op in planned}
    assert all(op.op_type != "const" for op in planned)
    assert found["relu", "positive"].preferred is Processor.NEURAL_ENGINE
    assert found["relu", "positive"].supported == (Processor.CPU, Processor.NEURAL_ENGINE)
    assert found["topk", "top_0"].preferred is Processor.CPU
    assert found["topk", "top_0"].supported == (Processor.CPU,)
    assert found["tanh", "y"].preferred is Processor.GPU
    assert {op.cost for op in planned} == {0.25}
    assert {op.function for op in planned} == {"main"}
    assert mac.asked == ["ALL"]
    assert not list(tmp_path.glob("*.mlmodelc"))  # nothing is left behind


def test_the_plan_is_for_the_compute_unit_of_the_program(package, tmp_path, monkeypatch):
    mac = Mac(monkeypatch, tmp_path, {})
    plan = compute_plan(package, ComputeUnit.CPU_AND_NE)
    assert plan.compute_unit is ComputeUnit.CPU_AND_NE
    assert mac.asked == ["CPU_AND_NE"]


def test_operations_that_core_ml_says_nothing_about(package, tmp_path, monkeypatch):
    Mac(monkeypatch, tmp_path, {"topk": None})
    (top,) = [op for op in compute_plan(package, None).operations if op.op_type == "topk"]
    assert (top.preferred, top.supported, top.cost) == (None, (), None)


def test_nested_operations_are_in_the_plan(tmp_path, monkeypatch):
    Mac(monkeypatch, tmp_path, {})
    planned = compute_plan(saved(tmp_path / "cond.mlpackage", branches), None).operations
    assert "inside" in {op.output for op in planned}


def test_what_core_ml_refuses_is_an_error(tmp_path, monkeypatch):
    Mac(monkeypatch, tmp_path, {})
    with pytest.raises(ProgramError, match="Core ML has no plan of the model: got ValueError: "):
        compute_plan(tmp_path / "none.mlpackage", None)


def test_predictions_stand_beside_the_plan(package, tmp_path, monkeypatch):
    Mac(monkeypatch, tmp_path, {"topk": CPU})
    model = CheckedModel(read_mlpackage(package), (Use("forward_0", "main"),))
    findings = check([model])
    planned = compute_plan(package, None).operations
    compared = compare_plan(planned, findings, "forward_0")
    predicted = {each.planned.output: each.predicted for each in compared}
    # The program computes in fp32, which concerns each operation of it.
    assert predicted["top_0"] == ("topk", "fp32-program")
    assert predicted["positive"] == ("fp32-program",)
    others = compare_plan(planned, findings, "forward_1")
    assert {each.predicted for each in others} == {()}


@pytest.mark.macos
@pytest.mark.skipif(sys.platform != "darwin", reason="needs Core ML itself")
def test_core_ml_has_a_plan(package):
    planned = compute_plan(package, ComputeUnit.ALL).operations
    assert {"relu", "topk", "tanh"} <= {op.op_type for op in planned}
    assert all(op.preferred is not None for op in planned if op.op_type == "relu")
