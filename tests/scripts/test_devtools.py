"""Files for ExecuTorch's developer tools: ETRecords, ETDumps and bundled programs."""

from __future__ import annotations

import json
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import (
    serialize_from_bundled_program_to_flatbuffer,
)
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from support.command import TINY, leftovers
from support.gates import needs_compiler
from support.mil import builder_program, ct, mb
from torch import nn

from coreml_delegate import runtime
from coreml_delegate.errors import BlobFormatError
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.runtime.devtools import Inspector
from coreml_delegate.runtime.program.bundle import cases_of
from coreml_delegate.scripts.cli import main
from coreml_delegate.targets import Opset

pytestmark = pytest.mark.xdist_group("devtools")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devtools")
    command = ["export", *TINY, "-o", str(folder / "tiny.pte"), "--bundle", "3"]
    assert main([*command, "--etrecord", str(folder / "tiny.etrecord")]) == 0
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_operation_is_verified(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", TINY[0], str(exported / "tiny.pte"), "--json"]
    assert main([*command, "--etrecord", str(exported / "tiny.etrecord")]) == 0
    operations = json.loads(capsys.readouterr().out)["operations"]
    calls = {call for operation in operations for call in operation["calls"]}
    assert {"conv2d", "relu", "mean", "linear", "sin", "sum_1"} <= calls
    assert all(
        operation["sqnr_db"] == "inf" or operation["sqnr_db"] > 40 for operation in operations
    )
    assert main([*command[:-1], "--etrecord", str(exported / "tiny.etrecord")]) == 0
    assert "calls of the model" in capsys.readouterr().out


@pytest.mark.parametrize("repeat", [1, 3])
def test_a_run_writes_its_times(exported: Path, repeat: int) -> None:
    command = ["run", str(exported / "tiny.pte"), "--etdump", "a.etdump"]
    assert main([*command, "--repeat", str(repeat)]) == 0
    inspector = Inspector(etdump_path="a.etdump", etrecord=str(exported / "tiny.etrecord"))
    (block,) = (block for block in inspector.event_blocks if block.name == "Execute")
    ops = [event for event in block.events if event.delegate_debug_identifier is not None]
    assert {"aten.conv2d.default", "aten.linear.default"} <= {
        name for event in ops for name in event.op_types
    }
    assert all(len(event.perf_data.raw) == repeat for event in ops)
    assert leftovers(Path()) == {"a.etdump"}


def test_a_run_writes_its_values(exported: Path) -> None:
    command = ["run", str(exported / "tiny.pte"), "--etdump", "a.etdump"]
    assert main([*command, "--debug-buffer", "a.values"]) == 0
    inspector = Inspector(
        etdump_path="a.etdump",
        etrecord=str(exported / "tiny.etrecord"),
        debug_buffer_path="a.values",
    )
    (block,) = (block for block in inspector.event_blocks if block.name == "Execute")
    assert [tuple(output.shape) for output in block.run_output] == [(1, 10), ()]
    assert sum(bool(event.debug_data) for event in block.events) >= 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", *TINY, "--dry-run", "--etrecord", "a"],
        ["export", *TINY, "--dry-run", "--bundle", "1"],
        ["export", *TINY, "-o", "a.bpte", "--bundle", "1"],
        ["run", "a.pte", "--debug-buffer", "a"],
        ["verify", TINY[0]],
        ["inspect", "a.pte", "--etrecord", "a"],
        ["verify", "a.bpte", "--weights", "a.pt"],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert not list(Path().iterdir())


def test_only_programs_have_events(capsys: pytest.CaptureFixture[str], exported: Path) -> None:
    extract = ["extract", str(exported / "tiny.pte"), "-o", "models"]
    assert main(extract) == 0
    package = next(Path("models").iterdir())
    assert main(["run", str(package), "--etdump", "a.etdump"]) == 1
    assert "only a .pte has events" in capsys.readouterr().err
    assert not Path("a.etdump").exists()


def test_existing_files_stay(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.etdump").write_text("mine")
    assert main(["run", str(exported / "tiny.pte"), "--etdump", "a.etdump"]) == 1
    assert Path("a.etdump").read_text() == "mine"
    assert "--force" in capsys.readouterr().err


# Where the time goes


def test_times_add_up_by_module(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", str(exported / "tiny.pte"), "--repeat", "5", "--json"]
    assert main([*command, "--etrecord", str(exported / "tiny.etrecord")]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["runs"] == 5
    assert len(profile["delegates"]) == 2
    by_call = {call: each for each in profile["operations"] for call in each["calls"]}
    assert by_call["aten_conv2d_default_"]["module"] == "conv"
    assert by_call["aten_conv2d_default_"]["delegate"] == 0
    assert by_call["aten_sin_default_"]["delegate"] is None
    assert by_call["aten_sin_default_"]["module"] == ""
    inside = sum(each["in_kernels_ms"] for each in profile["delegates"])
    total = profile["total_ms"]
    assert inside > 0
    assert 0 < sum(each["ms"] for each in profile["delegates"]) < total
    assert 0 < profile["cpu_operators_ms"] < total
    modules = profile["modules_ms"]
    assert {"", "conv", "linear"} <= modules.keys()
    assert max(modules["conv"], modules["linear"]) <= modules[""]


def test_profiles_are_compared(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, record = str(exported / "tiny.pte"), str(exported / "tiny.etrecord")
    command = ["profile", program, "--compare", program, "--repeat", "2"]
    assert main([*command, "--etrecord", record, "--compare-etrecord", record]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert "  conv" in printed
    assert main(command) == 0
    assert ":conv" in capsys.readouterr().out
    assert main(["profile", program, "--repeat", "2", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert "its operations" in printed
    assert "module  " not in printed.split("operation")[0]


@pytest.mark.parametrize(
    "command",
    [
        ["profile"],
        ["verify", TINY[0]],
        ["check"],
        ["inspect", "--model-explorer", "graphs.json"],
    ],
    ids=itemgetter(0),
)
def test_an_etrecord_of_another_program_is_refused(
    command: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [TINY[0], "-o", "other.pte", "--skip-op", "sin", "--skip-op", "linear"]
    assert main(["export", *source]) == 0
    command = [*command, "other.pte", "--etrecord", str(exported / "tiny.etrecord")]
    assert main(command) == 1
    assert "tiny.etrecord is the ETRecord of another program" in capsys.readouterr().err
    assert leftovers(Path()) == {"other.pte"}


def test_the_work_of_operations_is_known(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["profile", str(exported / "tiny.pte"), "--repeat", "2", "--json"]
    assert main([*command, "--html", "p.html"]) == 0
    operations = json.loads(capsys.readouterr().out)["operations"]
    conv = next(each for each in operations if each["name"].endswith(":conv"))
    assert conv["flops"] > 0
    assert conv["bytes"] > 0
    page = Path("p.html").read_text()
    assert conv["name"] in page
    assert "(the model)" not in page
    assert leftovers(Path()) == {"p.html"}
    assert main([*command, "--html", "p.html"]) == 1
    assert "--force" in capsys.readouterr().err


# Model Explorer


def graphs_of(*command: str) -> dict[str, Any]:
    assert main(["inspect", *command, "--model-explorer", "graphs.json"]) == 0
    content = json.loads(Path("graphs.json").read_text())
    Path("graphs.json").unlink()
    for graph in content["graphs"]:
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids)
        before = set[str]()
        for node in graph["nodes"]:
            assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= before
            before.add(node["id"])
    return content


def test_graphs_hold_the_operations_inside_delegates(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(exported / "tiny.pte")
    (graph,) = graphs_of(program, "--etrecord", str(exported / "tiny.etrecord"))["graphs"]
    assert graph["id"] == "forward"
    by_label = {node["label"]: node for node in graph["nodes"]}
    conv, linear = by_label["conv"], by_label["linear"]
    assert conv["namespace"] == "delegate 0 (CoreMLBackend)/conv"
    assert linear["namespace"] == "delegate 0 (CoreMLBackend)/linear"
    described = {pair["key"]: pair["value"] for pair in conv["attrs"]}
    assert described["weight"].endswith("fp16[8, 3, 3, 3], 432 B")
    assert described["strides"] == "int32[1, 1]"
    # The sine is computed between two delegates, on the CPU.
    (sine,) = (node for node in graph["nodes"] if node["label"].startswith("aten::sin"))
    (source,) = (edge["sourceNodeId"] for edge in sine["incomingEdges"])
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert nodes[source]["namespace"].startswith("delegate 0")
    users = [
        node["namespace"]
        for node in graph["nodes"]
        if sine["id"] in {edge["sourceNodeId"] for edge in node["incomingEdges"]}
    ]
    assert users == ["delegate 1 (CoreMLBackend)"]
    assert main(["inspect", program, "--json"]) == 0
    delegates = json.loads(capsys.readouterr().out)["methods"][0]["delegates"]
    counted = Counter[str]()
    for delegate in delegates:
        counted.update(delegate["model"]["functions"][0]["ops"])
    shown = Counter(n["label"] for n in graph["nodes"] if n["namespace"].startswith("delegate"))
    assert shown == counted


def test_graphs_of_a_model(exported: Path) -> None:
    assert main(["extract", str(exported / "tiny.pte"), "-o", "models"]) == 0
    package = next(path for path in Path("models").iterdir() if path.name.endswith("0.mlpackage"))
    (graph,) = graphs_of(str(package))["graphs"]
    labels = [node["label"] for node in graph["nodes"]]
    assert {"conv", "relu", "linear"} <= set(labels)
    last = graph["nodes"][-1]
    assert last["namespace"] == "outputs"
    assert last["incomingEdges"]


def test_blocks_are_graphs_of_their_own(tmp_path: Path) -> None:
    def branch(x):
        return mb.cond(
            pred=mb.greater(x=mb.reduce_sum(x=x), y=0.0),
            _true_fn=lambda: mb.exp(x=x),
            _false_fn=lambda: mb.sin(x=x),
        )

    package = tmp_path / "branch.mlpackage"
    program = builder_program(branch, {"x": np.ones(3, np.float32)}, Opset.iOS16)
    ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS16).save(
        str(package)
    )
    whole, *inner = graphs_of(str(package))["graphs"]
    (cond,) = (node for node in whole["nodes"] if node["label"] == "cond")
    assert cond["subgraphIds"] == [graph["id"] for graph in inner]
    computed = [{node["label"] for node in graph["nodes"]} for graph in inner]
    assert "exp" in computed[0] - computed[1]
    assert "sin" in computed[1] - computed[0]


# Bundled programs


def test_a_bundle_holds_what_the_model_returns(exported: Path) -> None:
    bundle = (exported / "tiny.bpte").read_bytes()
    cases = cases_of(memoryview(bundle))
    assert [case.method for case in cases] == ["forward"] * 3
    program = runtime.load_program(bundle, engine="openvino")
    for case in cases:
        for got, want in zip(program.run("forward", case.inputs), case.expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert not torch.equal(cases[0].inputs[0], cases[1].inputs[0])


def test_a_bundle_is_verified(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = exported / "tiny.bpte"
    assert main(["verify", str(bundle), "--json"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert all(output["sqnr_db"] > 40 for output in outputs.values())
    content = bytearray(bundle.read_bytes())
    expected = cases_of(memoryview(content))[2].expected[0]
    place = content.index(expected.numpy().tobytes())
    content[place : place + 40] = np.zeros(10, np.float32).tobytes()
    Path("wrong.bpte").write_bytes(content)
    assert main(["verify", "wrong.bpte"]) == 1
    assert "differs from its model" in capsys.readouterr().err


def test_a_damaged_bundle_is_an_error(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (exported / "tiny.bpte").read_bytes()
    for size in (0, 8, 40, 1000, len(content) // 2):
        Path("cut.bpte").write_bytes(content[:size])
        assert main(["verify", "cut.bpte"]) == 1
        assert "error" in capsys.readouterr().err
    with pytest.raises(BlobFormatError):
        runtime.load_program(content[:1000])


class Accumulator(nn.Module):
    """Adds up what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 1.0


class Doubler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def test_cases_begin_with_the_programs_own_state(capsys: pytest.CaptureFixture[str]) -> None:
    ones = torch.ones(4)
    methods = {"forward": Accumulator(), "double": Doubler()}
    exported = {name: torch.export.export(model, (ones,)) for name, model in methods.items()}
    lowered = to_edge_transform_and_lower(
        exported, partitioner={name: [CoreMLPartitioner()] for name in exported}
    ).to_executorch()

    def suite(name: str, *expected: float) -> MethodTestSuite:
        cases = [MethodTestCase([ones], [torch.full((4,), value)]) for value in expected]
        return MethodTestSuite(name, cases)

    for cases, code in (((1.0, 1.0), 0), ((1.0, 2.0), 1)):
        bundled = BundledProgram(lowered, [suite("forward", *cases), suite("double", 2.0)])
        Path("b.bpte").write_bytes(serialize_from_bundled_program_to_flatbuffer(bundled))
        assert main(["verify", "b.bpte"]) == code
        told = capsys.readouterr()
        assert ("differs from its model" in told.err) is bool(code)
    assert main(["verify", "b.bpte", "--method", "double"]) == 0


@needs_compiler
def test_executorchs_bundled_runner_takes_it(exported: Path) -> None:
    runtime.register(engine="openvino")
    bundle = portable_lib._load_bundled_program_from_buffer((exported / "tiny.bpte").read_bytes())
    for index in range(3):
        bundle.verify_result_with_bundled_expected_output("forward", index, 1e-2, 1e-2)
    with pytest.raises(RuntimeError, match="verification failed"):
        bundle.verify_result_with_bundled_expected_output("forward", 0, 1e-9, 1e-9)


def cases_of_file(folder: Path):
    return cases_of(memoryview((folder / "tiny.bpte").read_bytes()))


@needs_compiler
def test_the_stock_host_runs_it(exported: Path) -> None:
    bundle = exported / "tiny.bpte"
    program = runtime.load_program(bundle, host="stock", engine="openvino")
    (case, *_) = cases_of_file(exported)
    for got, want in zip(program.run("forward", case.inputs), case.expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
