"""``coreml-delegate check``, and its section of the export's page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command import MODELS, TINY, leftovers, tiny_pte
from support.compute_plans import CPU, Mac
from support.mil import Opset, builder_program, mb
from support.packages import package_files
from support.programs import export_case

from coreml_delegate.device_check import RULES, Consequence
from coreml_delegate.formats.files import new_folder
from coreml_delegate.runtime.mil.reader import read_mlpackage
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.commands import check
from coreml_delegate.scripts.device_findings import models_of_pte, modules_of_etrecord

pytestmark = pytest.mark.xdist_group("devtools")

_OVERFLOWING = f"{MODELS}:overflowing"
X = {"x": np.zeros((2, 8), np.float16)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def package():
    """A product of large numbers, and the largest of the results."""

    def function(x):
        values, indices = mb.topk(x=mb.square(x=x, name="sq"), k=2, axis=-1, name="top")
        return values, indices

    program = builder_program(function, X, Opset.iOS16)
    with new_folder(package_files(program, Opset.iOS16), Path("model.mlpackage")):
        pass
    return "model.mlpackage"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    command = ["export", _OVERFLOWING, "-o", str(folder / "a.pte"), "--bundle", "2"]
    command += ["--etrecord", str(folder / "a.etrecord"), "--report", str(folder / "a.html")]
    assert main([*command, "--report", str(folder / "a.json")]) == 0
    return folder


def read(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def rules_in(document: dict) -> set[str]:
    return {finding["rule"] for finding in document["findings"]}


def error(capsys) -> str:
    captured = capsys.readouterr()
    return captured.err.splitlines()[-1]


def test_consequences_equal_the_enum():
    assert tuple(each.value for each in Consequence) == check.CONSEQUENCES


# programs


def test_a_package(package, capsys):
    assert main(["check", package, "--json"]) == 0
    document = read(capsys)
    assert document["delegates"] == ["model"]
    (top,) = [f for f in document["findings"] if f["rule"] == "topk"]
    assert top["function"] == "main"
    assert top["got"] == "at the end of the model"
    assert top["places"] == [
        {"what": "topk", "name": "top_0", "location": top["places"][0]["location"], "module": None}
    ]
    assert top["consequence"] == "leaves-neural-engine"
    assert {source["url"] for source in top["sources"]} == {
        source.url for rule in RULES if rule.name == "topk" for source in rule.sources
    }


def test_text_names_place_reason_remedy_and_source(package, capsys):
    assert main(["check", package]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^leaves the neural engine  topk +model: topk 'top_0' at main op \d+ +at the end",
        out,
        re.M,
    )
    (rule,) = [rule for rule in RULES if rule.name == "topk"]
    assert f"  {rule.reason}\n  remedy: {rule.remedy}\n" in out
    assert all(source.url in out for source in rule.sources)


def test_text_says_why_a_finding_is_advice(capsys):
    weight = np.ones((8, 8), np.float16)

    def function(x):
        values, _ = mb.topk(x=mb.linear(x=x, weight=weight), k=8, axis=-1)
        return mb.linear(x=values, weight=weight)

    files = package_files(builder_program(function, X, Opset.iOS16), Opset.iOS16)
    with new_folder(files, Path("model.mlpackage")):
        pass
    assert main(["check", "model.mlpackage"]) == 0
    out = capsys.readouterr().out
    assert "\n  not by --for: in the middle of the model, which would become two\n" in out
    assert "done by: export --for neural-engine, if it splits no partition" not in out


def test_a_program_without_fault(capsys):
    Path("tiny.pte").write_bytes(tiny_pte())
    capsys.readouterr()
    assert main(["check", "tiny.pte", "--json"]) == 0
    document = read(capsys)
    assert document["delegates"] == ["forward_0", "forward_1"]
    assert not rules_in(document) & {"topk", "fp32-program", "duplicate-weights", "large-file"}
    for rule in sorted(rules_in(document)):
        assert main(["check", "tiny.pte", "--ignore", rule]) == 0
    capsys.readouterr()
    command = [part for rule in rules_in(document) for part in ("--ignore", rule)]
    assert main(["check", "tiny.pte", *command]) == 0
    assert capsys.readouterr().out == (
        "nothing found\n\n"
        "forward_0: 100.0% of the work can run on the neural engine, with all 7 operations\n"
        "forward_1: 100.0% of the work can run on the neural engine, with all 3 operations\n"
    )


def test_compute_unit_and_precision_of_the_program_count(capsys):
    command = ["export", TINY[0], "-o", "a.pte", "--precision", "float32", "--compute-unit"]
    for unit, found in (("cpu_and_ne", {"unit-in-vain", "fp32-program"}), ("cpu_only", set())):
        assert main([*command, unit, "--force"]) == 0
        capsys.readouterr()
        assert main(["check", "a.pte", "--json"]) == 0
        assert rules_in(read(capsys)) & {"unit-in-vain", "fp32-program"} == found


def test_modules_of_the_model(capsys):
    command = ["export", *TINY, "-o", "a.pte", "--etrecord", "a.etrecord", "--report", "a.json"]
    assert main(command) == 0
    program = PteProgram.open(Path("a.pte"))
    modules = modules_of_etrecord(Path("a.etrecord"), program)
    models = models_of_pte(program, modules)
    found = {symbol.partition(":")[2]: m for c in models.checked for symbol, m in c.modules.items()}
    assert (found["conv"], found["linear"]) == ("conv", "linear")
    # Those of the report, which the page uses, are the same.
    nodes = json.loads(Path("a.json").read_text())["nodes"]
    told = {node["debug_handle"]: node["module"] for node in nodes}
    assert told.keys() <= modules.keys()
    assert {handle: modules[handle] for handle in told} == told


def test_a_bundle_is_run_on_its_own_inputs(exported, capsys):
    assert main(["check", str(exported / "a.bpte"), "--json"]) == 0
    assert "fp16-overflow" in rules_in(read(capsys))
    assert main(["check", str(exported / "a.pte"), "--json"]) == 0
    document = read(capsys)
    assert document["runs"] == 0
    assert "fp16-overflow" not in rules_in(document)


@pytest.mark.parametrize(("value", "found"), [(300.0, True), (2.0, False)])
def test_values_on_given_data(package, capsys, value, found):
    np.savez("x.npz", x=np.full((3, 2, 8), value, np.float16))
    assert main(["check", package, "--calibration", "x.npz", "--json"]) == 0
    document = read(capsys)
    assert document["runs"] == 3
    assert ("fp16-overflow" in rules_in(document)) is found


def test_as_many_samples_as_asked_for(package, capsys):
    np.savez("x.npz", x=np.ones((5, 2, 8), np.float16))
    command = ["check", package, "--calibration", "x.npz", "--calibration-samples", "2", "--json"]
    assert main(command) == 0
    assert read(capsys)["runs"] == 2


# accuracy on data


@pytest.fixture(scope="module")
def lossy(tmp_path_factory):
    """A program whose sum overflows in fp16, lowered with and without ``auto``, and its input."""
    folder = tmp_path_factory.mktemp("lossy")
    torch.save(torch.linspace(-1, 1, 32).reshape(2, 16), folder / "x.pt")
    command = ["export", f"{MODELS}:exponentials", "--no-verify", "--etrecord"]
    command += [str(folder / "a.etrecord"), "--bundle", "1", "-o", str(folder / "plain.pte")]
    assert main(command) == 0
    command = ["export", f"{MODELS}:exponentials", "--precision", "auto"]
    assert main([*command, "-o", str(folder / "auto.pte")]) == 0
    return folder


def accuracy_in(document: dict) -> list[dict]:
    return [finding for finding in document["findings"] if finding["rule"] == "fp16-accuracy"]


def test_accuracy_on_the_data_and_what_auto_gains(lossy, capsys):
    options = ["--calibration", str(lossy / "x.pt"), "--etrecord", str(lossy / "a.etrecord")]
    assert main(["check", str(lossy / "plain.pte"), *options, "--json"]) == 0
    document = read(capsys)
    (finding,) = accuracy_in(document)
    assert finding["got"].startswith("-inf dB at output")
    assert finding["delegate"] == "forward_0"
    assert "reduce_sum" in {place["what"] for place in finding["places"]}
    assert {place["module"] for place in finding["places"]} == {""}
    assert re.search(r"--precision auto, which keeps \d operations in fp32", finding["remedy"])
    (measured,) = document["precision"]
    assert measured["delegates"] == ["forward_0"]
    assert min(measured["before_db"].values(), key=float) == "-inf"
    assert measured["is_reached"]
    assert min(map(float, measured["after_db"].values())) >= 40


def test_a_program_lowered_by_auto_has_the_accuracy(lossy, capsys):
    data = ["--calibration", str(lossy / "x.pt"), "--json"]
    assert main(["check", str(lossy / "auto.pte"), *data]) == 0
    document = read(capsys)
    assert accuracy_in(document) == []
    (measured,) = document["precision"]
    assert measured["holds"]
    assert main(["check", str(lossy / "auto.pte"), *data, "--min-sqnr", "300"]) == 0
    assert len(accuracy_in(read(capsys))) == 1


def test_nothing_is_measured_without_data(lossy, capsys):
    assert main(["check", str(lossy / "plain.pte"), "--json"]) == 0
    document = read(capsys)
    assert (document["precision"], accuracy_in(document)) == ([], [])


def test_a_bundle_is_measured_on_its_own_inputs(lossy, capsys):
    assert main(["check", str(lossy / "plain.bpte"), "--json"]) == 0
    assert len(accuracy_in(read(capsys))) == 1
    ignored = ["--ignore", "fp16-accuracy", "--json"]
    assert main(["check", str(lossy / "plain.bpte"), *ignored]) == 0
    document = read(capsys)
    assert (document["precision"], accuracy_in(document)) == ([], [])


def test_an_mlpackage_is_measured(lossy, capsys):
    assert main(["extract", str(lossy / "plain.pte"), "-o", "models"]) == 0
    capsys.readouterr()
    np.savez("x.npz", np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16))
    package = "models/forward_0.mlpackage"
    assert main(["check", package, "--calibration", "x.npz", "--json"]) == 0
    (finding,) = accuracy_in(read(capsys))
    assert finding["delegate"] == "forward_0"
    assert finding["places"][0]["location"].startswith("main op ")


def test_reports_are_written_in_their_format(package, capsys):
    assert main(["check", package, "--report", "a.json", "--report", "a.txt", "--json"]) == 0
    document = read(capsys)
    assert json.loads(Path("a.json").read_text()) == document
    assert "source: " in Path("a.txt").read_text()
    assert main(["check", package, "--report", "a.json"]) == 1
    assert "output exists: got a.json" in error(capsys)


# rules and exit codes


def test_rules_are_listed_with_their_sources(capsys):
    assert main(["check", "--rules"]) == 0
    out = capsys.readouterr().out
    for rule in RULES:
        assert f"{rule.name}: {rule.finds} ({rule.consequence.text})" in out
        assert all(source.url in out for source in rule.sources)
    assert main(["check", "--rules", "--json"]) == 0
    assert [entry["rule"] for entry in read(capsys)] == [rule.name for rule in RULES]


@pytest.mark.parametrize(
    ("named", "code"),
    [((), 0), (("fails",), 0), (("fails", "leaves-neural-engine"), 1), (("any",), 1)],
)
def test_findings_fail_if_they_are_asked_to(package, capsys, named, code):
    command = [part for each in named for part in ("--fail-on", each)]
    assert main(["check", package, *command]) == code
    captured = capsys.readouterr()
    assert "topk" in captured.out  # printed all the same
    if code:
        assert "the program has findings that --fail-on names: got 1 of topk" in captured.err


def test_an_ignored_rule_does_not_fail(package, capsys):
    command = ["check", package, "--fail-on", "leaves-neural-engine", "--ignore", "topk"]
    assert main(command) == 0
    assert "topk" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["none.pte"], "No such file or directory"),
        (["model.mlpackage", "--ignore", "topkk"], "unknown rule: got 'topkk', expected perhaps"),
        (["model.mlpackage", "--etrecord", "x"], "--etrecord is for a .pte: got model.mlpackage"),
        (["model.mlpackage", "--data", "x.ptd"], "--data is for a .pte: got model.mlpackage"),
        (["model.mlpackage", "--calibration", "none.npz"], "no such calibration file"),
        (["model.mlpackage", "--method", "main"], "--method needs --calibration"),
        (["plain.pte"], "has no Core ML delegate"),
        (["tiny.pte", "--etrecord", "plain.pte"], "plain.pte is no ETRecord"),
    ],
)
def test_mistakes_are_one_line(package, capsys, command, message):
    Path("plain.pte").write_bytes(export_case("arithmetic")[1])
    Path("tiny.pte").write_bytes(tiny_pte())
    before = leftovers(Path())
    assert main(["check", *command]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert leftovers(Path()) == before


@pytest.mark.parametrize("command", [[], ["--rules", "model.mlpackage"]])
def test_wrong_usage(command):
    with pytest.raises(SystemExit) as exit_:
        main(["check", *command])
    assert exit_.value.code == 2


# compute plans


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML itself is here")
def test_plans_need_a_mac(package, capsys):
    assert main(["check", package, "--compute-plan"]) == 1
    assert "only Core ML itself has compute plans: got " in error(capsys)


def test_the_plan_beside_the_prediction(package, capsys, tmp_path, monkeypatch):
    Mac(monkeypatch, tmp_path, {"topk": CPU, "square": CPU})
    assert main(["check", package, "--compute-plan", "--json"]) == 0
    (plan,) = read(capsys)["compute_plans"]
    by_op = {entry["op"]: entry for entry in plan["operations"]}
    assert by_op["topk"]["runs_on"] == "CPU"
    assert by_op["topk"]["predicted_by"] == ["topk"]
    assert by_op["square"]["runs_on"] == "CPU"
    assert by_op["square"]["predicted_by"] == []
    assert main(["check", package, "--compute-plan"]) == 0
    out = capsys.readouterr().out
    assert "Core ML's plan of model on " in out
    assert re.search(r"^  topk +top_0 +CPU +25\.0% +topk$", out, re.M)
    assert re.search(r"^  square +sq +CPU +25\.0% +-$", out, re.M)


def test_the_plan_of_a_pte_is_for_its_compute_unit(exported, capsys, tmp_path, monkeypatch):
    mac = Mac(monkeypatch, tmp_path, {})
    assert main(["check", str(exported / "a.pte"), "--compute-plan", "--json"]) == 0
    (plan,) = read(capsys)["compute_plans"]
    assert (plan["delegates"], plan["compute_unit"]) == ("forward_0", "all")
    assert plan["matched"] == plan["in_program"] == len(plan["operations"])
    assert mac.asked == ["ALL"]


def plan_file(path, package, **changes):
    """Write the plan of a package: topk on the CPU, everything else on the neural engine."""
    devices = {"topk": ("CPU", ["CPU"]), **changes}
    engine = ("neural engine", ["CPU", "neural engine"])
    operations = [
        {"op": f"ios16.{op.type}", "output": op.outputs[0].name}
        | dict(zip(("runs_on", "supported"), devices.get(op.type, engine), strict=True))
        for op in read_mlpackage(Path(package)).function().block.ops
    ]
    Path(path).write_text(json.dumps({"version": 1, "device": "M9", "operations": operations}))
    return path


def test_hits_and_misses_of_a_plan_from_elsewhere(package, capsys):
    plan_file("plan.json", package)
    assert main(["check", package, "--against", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert "Core ML's plan of model on M9\n" in out
    assert re.search(r"^  topk +1 +1 +0\n  \(no rule\) +0 +0 +-$", out, re.M)
    assert re.search(r"^  topk +top_0 +CPU +- +topk$", out, re.M)
    other = plan_file("other.json", package, topk=("neural engine", []), square=("GPU", ["GPU"]))
    assert main(["check", package, "--against", "plan.json", "--against", other, "--json"]) == 0
    _, plan = read(capsys)["compute_plans"]
    assert plan["rules"] == [
        {"rule": "topk", "hits": 0, "unsupported": 0, "misses": 1},
        {"rule": None, "hits": 1, "unsupported": 1, "misses": 0},
    ]
    # The data of a comparison is a plan too.
    Path("again.json").write_text(json.dumps(plan))
    assert main(["check", package, "--against", "again.json", "--json"]) == 0
    assert read(capsys)["compute_plans"] == [plan]


def test_a_plan_of_another_model_is_an_error(package, exported, capsys):
    plan_file("plan.json", package)
    assert main(["check", str(exported / "a.pte"), "--against", "plan.json"]) == 1
    assert re.search(
        r"plan\.json: the plan is of another model: got 2 of its 2 operations did not match, "
        r"expected the \d+ operations of forward_0\. Pass the plan of exactly this program$",
        error(capsys),
    )
    assert main(["check", package, "--against", "missing.json"]) == 1
    assert "cannot read missing.json" in error(capsys)


# the page


def test_the_page_of_a_lowering_has_the_findings(exported):
    page = (exported / "a.html").read_text()
    assert "<h2>Before the device</h2>" in page
    assert json.loads((exported / "a.json").read_text())["nodes"][0]["debug_handle"] is not None


def test_the_page_names_modules(tmp_path):
    command = ["export", f"{MODELS}:attending", "-o", "a.pte", "--report", "a.html"]
    assert main([*command, "--deployment-target", "iOS18"]) == 0
    page = Path("a.html").read_text()
    (rows,) = re.findall(r'<table id="device">(.*?)</table>', page, re.S)
    assert "<code>fused-attention</code>" in rows
    assert re.search(r"scaled_dot_product_attention .* at main op \d+", rows)
    assert 'href="https://github.com/pytorch/executorch/pull/16057"' in rows


def test_a_plan_has_no_such_section():
    assert main(["export", _OVERFLOWING, "--dry-run", "--report", "a.html"]) == 0
    assert "Before the device" not in Path("a.html").read_text()


def test_nothing_delegated_is_nothing_to_check(capsys):
    command = ["export", f"{MODELS}:in_doubles", "-o", "a.pte", "--report", "a.html"]
    assert main(command) == 0
    assert "None of the documented causes of trouble was found." in Path("a.html").read_text()
