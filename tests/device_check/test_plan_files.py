"""Compute plans from files: this package's JSON, Xcode's report, and their match with a program."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.mil import Opset, builder_program, mb
from support.packages import package_files

from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.device_check.compute_plan import (
    ComputePlan,
    PlannedOp,
    Processor,
    RuleScore,
    compare_plan,
    match_plan,
    require_same_model,
    score_rules,
)
from coreml_delegate.device_check.plan_files import plan_document, read_plan
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.targets import ComputeUnit

CPU, GPU, NE = Processor
OPERATIONS = (
    PlannedOp("main", "relu", "a", NE, (CPU, NE), 0.25),
    PlannedOp("main", "topk", "b_0", CPU, (CPU,), 0.5),
    PlannedOp("main", "relu", "c", NE, (CPU, GPU, NE), 0.25),
)
PLAN = ComputePlan(OPERATIONS, ComputeUnit.CPU_AND_NE, "Apple M9", "macOS 27.0")


def ranked(x):
    values, _ = mb.topk(x=mb.relu(x=x, name="a"), k=4, axis=-1, name="b")
    return mb.relu(x=values, name="c")


@pytest.fixture(scope="module")
def model():
    program = builder_program(ranked, {"x": np.zeros((2, 8), np.float16)}, Opset.iOS17)
    return CheckedModel(read_files(package_files(program, Opset.iOS17)), (Use("main", "main"),))


def written(path, document):
    path.write_text(json.dumps(document))
    return path


def test_a_plan_is_read_as_it_was_written(tmp_path):
    assert read_plan(written(tmp_path / "plan.json", plan_document(PLAN))) == PLAN


def test_what_a_plan_may_leave_out(tmp_path):
    operations = [
        {"op": "const", "runs_on": None},
        {"op": "ios18.constexpr_blockwise_shift_scale", "runs_on": None},
        {"op": "ios17.relu", "runs_on": "CPU"},
    ]
    plan = read_plan(written(tmp_path / "plan.json", {"version": 1, "operations": operations}))
    assert plan == ComputePlan((PlannedOp("main", "relu", "", CPU, (), None),))


def xcode_report(operations, unit=2):
    """A report with the keys of Xcode 16's and 26's; see the sources in ``plan_files``."""

    def device(name):
        return {"deviceType": {name: {}}}

    def entry(op):
        usage = {"preferred": device(op["runs_on"]), "supported": [device("cpu"), device("gpu")]}
        computed = {"deviceUsage": usage, "cost": {"weight": 0.125}} if op["runs_on"] else {}
        return {
            "operatorName": op["op"],
            "outputs": [{"name": op["output"], "type": {}}],
            "blocks": [{"inputs": [], "operations": list(map(entry, op.get("blocks", ())))}],
            "inputs": {},
            **computed,
        }

    block = {"inputs": [], "operations": list(map(entry, operations))}
    return {
        "jsonVersion": 1,
        "deviceResultVersion": 4,
        "computeUnit": unit,
        "modelMetadata": {"fileName": "model", "modelType": "ML Program"},
        "deviceInfo": {
            "modelName": "iPhone 16 Pro",
            "osNameAndVersionWithoutBuildNumber": "iOS 26.5.2",
            "serialNumber": "secret",
            "displayName": "secret",
        },
        "deviceResults": {
            "predict": {"samples": [0.01], "numOperations": 40},
            "modelStructure": {"program": {"_0": {"functions": {"main": {"block": block}}}}},
        },
    }


def test_the_report_of_xcode(tmp_path):
    nested = {"op": "ios16.relu", "output": "inner", "runs_on": "neuralEngine"}
    report = xcode_report(
        [
            {"op": "const", "output": "k", "runs_on": None},
            {"op": "cond", "output": "c", "runs_on": "cpu", "blocks": [nested]},
            {"op": "ios17.conv", "output": "y", "runs_on": "gpu"},
        ]
    )
    folder = tmp_path / "model.mlperf"
    folder.mkdir()
    written(folder / "report.json", report)
    plan = read_plan(folder)
    assert plan == read_plan(folder / "report.json")
    assert plan.compute_unit is ComputeUnit.ALL
    assert (plan.device, plan.system) == ("iPhone 16 Pro", "iOS 26.5.2")
    assert plan.operations == (
        PlannedOp("main", "cond", "c", CPU, (CPU, GPU), 0.125),
        PlannedOp("main", "relu", "inner", NE, (CPU, GPU), 0.125),
        PlannedOp("main", "conv", "y", GPU, (CPU, GPU), 0.125),
    )
    assert "secret" not in repr(plan)


NETWORK = xcode_report([])
NETWORK["deviceResults"]["modelStructure"] = {"neuralNetwork": {}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a compute plan"),
        ({}, "not a compute plan"),
        ({"operations": []}, "compute plan of another version: got None, expected 1"),
        ({"version": 1, "operations": []}, "without operations"),
        ({"version": 1, "operations": [{"op": "relu", "runs_on": "TPU"}]}, "'TPU' is not a valid"),
        ({"version": 1, "operations": [{"op": "relu"}]}, "KeyError: 'runs_on'"),
        ({"version": 1, "operations": [{"op": 1, "runs_on": None}]}, "1 is no text"),
        ({"version": 1, "operations": {"op": 1}}, "malformed compute plan"),
        ({"version": 1, "operations": [{"op": "a", "runs_on": None, "cost": -1}]}, "no cost"),
        ({"version": 1, "compute_unit": "npu", "operations": []}, "'npu' is not a valid"),
        ({"deviceResults": {}}, "KeyError: 'modelStructure'"),
        (xcode_report([], unit=9), "KeyError: 9"),
        (NETWORK, "the report is not of an ML Program: got neuralNetwork"),
        (xcode_report([{"op": "x", "output": "x", "runs_on": "npu"}]), "KeyError: 'npu'"),
    ],
)
def test_other_files_are_an_error(document, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        read_plan(written(tmp_path / "plan.json", document))


def test_a_file_that_is_not_json_is_an_error(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\x00")
    for path in (tmp_path / "plan.json", tmp_path / "missing.json", tmp_path):
        with pytest.raises(OptionError, match="cannot read "):
            read_plan(path)


def test_operations_match_by_name(model):
    match = match_plan(PLAN, [model])
    assert (match.matched, match.in_program, match.plan) == (3, 3, PLAN)
    require_same_model(match)


def test_operations_without_names_match_by_type_and_order(model):
    nameless = ComputePlan(tuple(replace(op, output="") for op in OPERATIONS))
    match = match_plan(nameless, [model])
    assert [op.output for op in match.plan.operations] == ["a", "b_0", "c"]
    fewer = ComputePlan(nameless.operations[1:])  # which of the two relu is missing is unknown
    assert [op.output for op in match_plan(fewer, [model]).plan.operations] == ["b_0", ""]


def test_the_model_of_a_plan_is_the_one_that_matches(model):
    program = builder_program(lambda x: mb.tanh(x=x), {"x": np.zeros(2, np.float16)}, Opset.iOS17)
    files = package_files(program, Opset.iOS17)
    other = CheckedModel(read_files(files), (Use("other", "main"),))
    assert match_plan(PLAN, [other, model]).model is model
    with pytest.raises(ProgramError, match="got 3 of its 3 operations did not match, expected"):
        require_same_model(match_plan(PLAN, [other]))


def test_a_plan_without_the_neural_engine_is_an_error(model):
    plan = replace(PLAN, compute_unit=ComputeUnit.CPU_AND_GPU)
    with pytest.raises(ProgramError, match="compute unit cpu_and_gpu"):
        require_same_model(match_plan(plan, [model]))


def test_hits_and_misses(model):
    findings = [f for f in check([model]) if f.rule.name == "topk"]
    operations = (
        *OPERATIONS[:2],
        replace(OPERATIONS[2], preferred=GPU),
        replace(OPERATIONS[2], preferred=None),
    )
    hit = score_rules(compare_plan(operations, findings, "main"))
    assert hit == [RuleScore("topk", 1, 1, 0), RuleScore(None, 1, 0, 1)]
    missed = (replace(OPERATIONS[1], preferred=NE), operations[2])
    assert score_rules(compare_plan(missed, findings, "main")) == [
        RuleScore("topk", 0, 0, 1),
        RuleScore(None, 1, 0, 0),
    ]
