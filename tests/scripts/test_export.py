"""``coreml-delegate export``: its files, its errors, and that nothing else is left behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from support.cli_models import Tiny
from support.command import MODELS, TINY, leftovers, tiny_pte

from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder, and an empty folder for temporary files beside it."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield here
    assert leftovers(temporary) == set()


def export(*args: str) -> int:
    return main(["export", *args])


def test_export_writes_the_program_and_prints_the_report(folder, capsys):
    assert export(*TINY, "-o", "a.pte", "--report", "a.json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert " nodes delegated " in captured.out.splitlines()[0]
    assert "aten.sin.default is in skip_ops_for_coreml_delegation" in captured.out
    assert leftovers(folder) == {"a.pte", "a.json"}
    (method,) = PteProgram.open("a.pte").methods
    assert [delegate.backend_id for delegate in method.delegates] == ["CoreMLBackend"] * 2
    report = json.loads(Path("a.json").read_text())
    assert {n["op"] for n in report["nodes"] if not n["delegated"]} == {"aten.sin.default"}
    # Equal source, options and seed give equal bytes.
    assert Path("a.pte").read_bytes() == tiny_pte()


def test_options_reach_the_program(capsys):
    options = [
        *(
            "--compute-unit",
            "cpu_and_ne",
            "--precision",
            "float32",
            "--deployment-target",
            "macOS14",
        ),
        *("--skip-op", "relu", "--json"),
    ]
    assert export(f"{MODELS}:classifier", "--input-shape", "2,3,8,8", "-o", "a.pte", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert [n["op"] for n in report["nodes"] if not n["delegated"]] == ["aten.relu.default"]
    (method,) = PteProgram.open("a.pte").methods
    assert method.input_specs[0].shape == (2, 3, 8, 8)
    assert len(method.delegates) == 2
    assert dict(method.delegates[0].compile_specs) == {
        "compute_units": b"cpu_and_ne",
        "min_deployment_target": b"8",
        "model_compute_precision": b"float32",
        "model_type": b"model",
    }


def test_factory_in_the_current_folder_and_force(folder, capsys):
    Path("my_model_here.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(4, 3)\n"
    )
    Path("a.pte").write_text("old")
    source = ("my_model_here:make", "--input-shape", "2,4", "-o", "a.pte")
    assert export(*source) == 1
    assert Path("a.pte").read_text() == "old"
    assert export(*source, "--force") == 0
    assert PteProgram.open("a.pte").method_names == ("forward",)
    assert leftovers(folder) - {"__pycache__"} == {"a.pte", "my_model_here.py"}


def test_a_pt2_is_exported_without_weights(capsys):
    torch.manual_seed(0)
    program = torch.export.export(Tiny().eval(), (torch.randn(1, 3, 16, 16),))
    torch.export.save(program, "tiny.pt2")
    assert export("tiny.pt2", "-o", "a.pte") == 0
    assert main(["verify", "tiny.pt2", "a.pte"]) == 0
    assert export("tiny.pt2", "-o", "b.pte", "--weights", "w.pt") == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: --weights is for a model; a .pt2 has its own weights\n"
    )


def test_weights_are_loaded(capsys):
    torch.manual_seed(1)
    torch.save(Tiny().state_dict(), "w.pt")
    assert export(*TINY, "-o", "a.pte", "--weights", "w.pt") == 0
    assert Path("a.pte").read_bytes() != tiny_pte()
    assert main(["verify", f"{MODELS}:tiny", "a.pte", "--weights", "w.pt"]) == 0
    assert main(["verify", f"{MODELS}:tiny", "a.pte"]) == 1
    assert "error: the program differs from its model: got output_0 at " in capsys.readouterr().err


def test_what_a_model_prints_does_not_reach_the_terminal(capsys):
    assert export(f"{MODELS}:noisy", "-o", "a.pte", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["summary"]["delegated"] == 1
    assert captured.err == ""


def test_warns_if_nothing_is_delegated(capsys):
    assert export(f"{MODELS}:in_doubles", "-o", "a.pte") == 0
    assert capsys.readouterr().err == (
        "coreml-delegate: warning: nothing was delegated to Core ML; a.pte runs on the CPU\n"
    )


@pytest.mark.parametrize("where", [("--dry-run",), ("-o", "a.pte")], ids=["planned", "written"])
def test_operators_that_the_runtime_lacks_are_named(where, capsys):
    assert export(f"{MODELS}:unusual", *where, "--precision", "float32", "--json") == 3
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    obstacles = {n["op"]: n["cpu_obstacle"] for n in report["nodes"] if n["cpu_obstacle"]}
    assert {op: o["code"] for op, o in obstacles.items()} == {
        "aten.lgamma.default": "kernel",
        "aten.mode.default": "kernel",
    }
    *warnings, error = captured.err.splitlines()
    assert len(warnings) == 2
    assert error.startswith(
        "coreml-delegate: error: no device loads the program: it has 2 operation(s) that neither "
    )
    assert "aten_lgamma_default" in error
    assert "aten_mode_default" in error
    assert Path("a.pte").is_file() == ("-o" in where)
    assert warnings[0].startswith(
        "coreml-delegate: warning: aten.lgamma.default at root (Unusual), cli_models.py:"
    )
    assert "no kernel aten::lgamma.out. Register a kernel aten::lgamma.out" in warnings[0]


def test_operators_that_executorch_cannot_lower_are_an_error(folder, capsys):
    assert export(f"{MODELS}:leaky", "-o", "a.pte", "--report", "a.json") == 1
    warning, error = capsys.readouterr().err.splitlines()
    obstacle = "aten.rrelu_with_noise_functional.default has no out variant"
    assert obstacle in warning
    assert error.startswith(
        "coreml-delegate: error: ExecuTorch cannot lower 1 operation(s) that stay on the CPU: "
        f"got 1 x {obstacle}, which ExecuTorch calls [Write the model with other operators]: "
    )
    assert leftovers(folder) == set()


def test_a_model_that_returns_complex_numbers_is_an_error(folder, capsys):
    assert export(f"{MODELS}:spectrum", "-o", "a.pte") == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        "coreml-delegate: error: the model returns a complex tensor, which Core ML does not have: "
        "got fft_rfft of complex64, expected real tensors. Return torch.view_as_real(y), and take "
        "torch.view_as_complex of the result"
    )
    assert leftovers(folder) == set()


def test_results_in_any_container_are_written_and_compared(capsys):
    source = f"{MODELS}:unusual"
    options = ("--precision", "float32", "--allow-missing-kernels")
    assert export(source, "-o", "a.pte", *options) == 0
    capsys.readouterr()
    assert main(["verify", source, "a.pte", "--min-sqnr", "60", "--json"]) == 0
    # Two of the named tuple, two of the mode, None and the size.
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 6


def test_dry_run_writes_the_report_and_nothing_else(folder, capsys):
    reports = ("--report", "a.html", "--report", "a.json", "--report", "a.txt")
    assert export(*TINY, "--dry-run", "-o", "a.pte", *reports) == 0
    table = capsys.readouterr().out
    assert leftovers(folder) == {"a.html", "a.json", "a.txt"}
    assert Path("a.txt").read_text() == table
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    planned = Path("a.json").read_text()
    assert export(*TINY, "-o", "a.pte", "--json", "--no-verify") == 0
    assert capsys.readouterr().out == planned


def test_a_strict_dry_run_reports_then_fails(folder, capsys):
    assert export(*TINY, "--dry-run", "--strict", "--report", "a.json") == 1
    captured = capsys.readouterr()
    assert " nodes delegated " in captured.out
    assert captured.err.startswith("coreml-delegate: error: Core ML cannot take 1 node(s) of the ")
    assert leftovers(folder) == {"a.json"}


def test_filters_choose_what_is_delegated(capsys):
    filters = ("--only-module", "torch.nn.Conv2d", "--only-module", "linear")
    limits = ("--skip-module", "linear", "--min-partition-nodes", "1", "--max-partitions", "1")
    dry_run = (f"{MODELS}:tiny", "--dry-run", "--json")
    assert export(*dry_run, *filters, *limits) == 0
    report = json.loads(capsys.readouterr().out)
    assert {n["module"] for n in report["nodes"] if n["delegated"]} == {"conv"}
    assert export(*dry_run, "--only-op", "relu") == 0
    report = json.loads(capsys.readouterr().out)
    assert {n["op"] for n in report["nodes"] if n["delegated"]} == {"aten.relu.default"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: -o/--output, or --dry-run"),
        (["--dry-run", "--report", "a.pdf"], "'a.pdf' ends in none of .html, .json, .txt"),
        (["--dry-run", "--max-partitions", "0"], "max_partitions must be positive: got int 0"),
    ],
)
def test_invalid_options_are_wrong_usage(args, message, capsys):
    with pytest.raises(SystemExit) as raised:
        export(f"{MODELS}:tiny", *args)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


FORMS = "torchvision:NAME, timm:NAME, MODULE:FACTORY or FILE.pt2"
REFUSED = {
    "no form": (["nothing"], f"no such source: got 'nothing', expected {FORMS}"),
    "no file": (["gone.pt2"], f"no such file: got gone.pt2, expected {FORMS}"),
    "no module": (["no_such:f"], f"no such Python module: got 'no_such', expected {FORMS}"),
    "a file's name": (
        ["no/such.py:f"],
        f"no such Python module: got 'no/such.py', expected {FORMS}. In the folder ",
    ),
    "no factory": ([f"{MODELS}:f"], f"{MODELS} has no callable of that name: got 'f'"),
    "factory fails": (
        [f"{MODELS}:failing"],
        f"{MODELS}:failing fails: got ValueError: no data",
    ),
    "no model": (
        [f"{MODELS}:number"],
        f"{MODELS}:number returns no model: got int, "
        "expected an nn.Module, (nn.Module, example_inputs) or (nn.Module, args, kwargs)",
    ),
    "nothing made": ([f"{MODELS}:no_samples"], f"{MODELS}:no_samples returns no model: got list, "),
    "no keyword inputs": (
        [f"{MODELS}:two_positional"],
        f"{MODELS}:two_positional returns no example inputs: got Tensor, Tensor, expected a "
        "tensor, a tuple of inputs, a dict of keyword inputs, or a tuple and a dict",
    ),
    "unknown keyword": (
        [f"{MODELS}:unknown_keyword"],
        "torch.export cannot capture the model: got TypeError: missing a required argument: 'x'",
    ),
    "no inputs": (
        [f"{MODELS}:classifier"],
        f"{MODELS}:classifier has no example inputs. Pass --input-shape",
    ),
    "unknown torchvision model": (
        ["torchvision:mobilnet_v2"],
        "torchvision has no such model: got 'mobilnet_v2', "
        "expected perhaps mobilenet_v2, mobilenet_v3_small, mobilenet_v3_large",
    ),
    "unknown op": (
        [f"{MODELS}:tiny", "--skip-op", "reluu"],
        "skip_ops_for_coreml_delegation names an unknown operator: got 'reluu', expected perhaps ",
    ),
    "unknown module": (
        [f"{MODELS}:classifier", "--input-shape", "1,3,8,8", "--skip-module", "conv"],
        "skip_modules names no module of the program: got 'conv', expected ",
    ),
    "not strict": (
        [f"{MODELS}:in_doubles", "--strict"],
        "Core ML cannot take 1 node(s) of the graph: got ",
    ),
    "no export": (
        [f"{MODELS}:data_dependent"],
        "torch.export cannot capture the model: got GuardOnDataDependentSymNode: ",
    ),
    "wrong shape": (
        [f"{MODELS}:classifier", "--input-shape", "1,4,8,8"],
        "torch.export cannot capture the model: got RuntimeError: ",
    ),
    "not the full graph": (
        [f"{MODELS}:in_doubles", "--full-graph"],
        "Core ML cannot take 1 node(s) of the graph: got ",
    ),
    "not for torch.export": (
        [f"{MODELS}:least_squares"],
        "torch.export cannot capture the model: got DynamicOutputShapeException: "
        "aten.linalg_lstsq.default. The size of its result depends on values: write the model "
        "without it",
    ),
    "no weights": (
        [f"{MODELS}:tiny", "--weights", "gone.pt"],
        "no such weights file: got gone.pt",
    ),
    "weights of another model": (
        [f"{MODELS}:tiny", "--weights", "other.pt"],
        "other.pt lacks tensors of the model: got conv.weight, conv.bias, linear.weight and 1 more",
    ),
    "weights of another shape": (
        [f"{MODELS}:tiny", "--weights", "shape.pt"],
        "shape.pt has tensors of another shape: got linear.weight [3, 8] for [10, 8]",
    ),
    "no state dict": (
        [f"{MODELS}:tiny", "--weights", "list.pt"],
        "list.pt is not a state dict: got list, expected tensors by name. Save module.state_dict()",
    ),
    "weights are no weights": (
        [f"{MODELS}:tiny", "--weights", "text.pt"],
        "cannot read weights from text.pt: got ",
    ),
    "no such folder": (
        [f"{MODELS}:tiny", "--report", "gone/a.json"],
        "no such folder for the output: got gone",
    ),
}


@pytest.fixture
def weight_files(folder):
    torch.save({"x": torch.zeros(2)}, "other.pt")
    torch.save(Tiny().state_dict() | {"linear.weight": torch.zeros(3, 8)}, "shape.pt")
    torch.save([1, 2], "list.pt")
    Path("text.pt").write_text("hello")
    return leftovers(folder)


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_sources_and_options_that_are_refused(args, message, weight_files, folder, capsys):
    assert export(*args, "-o", "a.pte") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"coreml-delegate: error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert leftovers(folder) == weight_files


def test_output_path_is_checked_before_the_source(folder, capsys):
    Path("a.pte").mkdir()
    assert export("no_such:f", "-o", "a.pte", "--force") == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: output is not a regular file: got a.pte\n"
    )


def test_verbose_shows_the_traceback(capsys):
    assert export(f"{MODELS}:failing", "-o", "a.pte", "-v") == 1
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "for you" in error
