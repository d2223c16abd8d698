"""``docs/evidence.md``: its script on a Mac's stand-in, and its workflow."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import core_ml
from support.compute_plans import CPU, Mac
from support.documents import COMMAND, DOCS, blocks
from support.mil import Opset, builder_program, mb
from support.packages import package_files

from coreml_delegate.formats.files import new_folder
from coreml_delegate.scripts.cli import main, main_parser

pytestmark = pytest.mark.xdist_group("cli")

PACKAGE = "model.mlpackage"
BLOCKS = {block.title: block for block in blocks(DOCS / "evidence.md") if block.title}
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ranked(b, a):
    """Inputs whose order is not that of their names, and several outputs."""
    values, _ = mb.topk(x=mb.add(x=mb.relu(x=b), y=a), k=4, axis=-1, name="top")
    return mb.tanh(x=values, name="t"), mb.relu(x=b, name="r")


def hand_in(monkeypatch, tmp_path, dtype):
    """Run the page's script as a Mac would."""
    inputs = {name: RNG.standard_normal((2, 8)).astype(np.float32) for name in "ab"}
    examples = {name: np.zeros((2, 8), dtype) for name in "ba"}
    program = builder_program(ranked, examples, Opset.iOS17)
    with new_folder(package_files(program, Opset.iOS17), Path(PACKAGE)):
        pass
    np.savez("inputs.npz", **inputs)
    Mac(monkeypatch, tmp_path, {"topk": CPU})
    monkeypatch.setattr("sys.argv", ["evidence.py", PACKAGE, "inputs.npz"])
    script = BLOCKS["evidence.py"]
    with core_ml.strict():
        exec(compile(script.text, script.location, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_the_script_writes_is_read_here(dtype, monkeypatch, tmp_path, capsys):
    hand_in(monkeypatch, tmp_path, dtype)
    capsys.readouterr()
    assert main(["replay", "run.cmlrun", PACKAGE, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["against"] == {"coreml": ["fp16" if dtype is np.float16 else "fp32"]}
    assert set(replayed["outputs"]) == {"t", "r"}
    assert main(["check", PACKAGE, "--against", "plan.json", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["compute_plans"]
    assert plan["matched"] == plan["in_program"] == len(plan["operations"]) == 5
    scores = {score["rule"]: (score["hits"], score["misses"]) for score in plan["rules"]}
    assert scores["topk"] == (1, 0)


def test_the_recording_is_of_its_model(monkeypatch, tmp_path, capsys):
    hand_in(monkeypatch, tmp_path, np.float16)
    (Path(PACKAGE) / "other").write_bytes(b"")
    assert main(["replay", "run.cmlrun", PACKAGE]) == 1
    assert "the recording is of another program" in capsys.readouterr().err


def test_the_workflow_runs_commands_of_ours():
    workflow = yaml.safe_load(BLOCKS["core-ml.yml"].text)
    (job,) = workflow["jobs"].values()
    assert job["runs-on"].startswith("macos-")
    lines = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    ours = [arguments for program, *arguments in lines if program == COMMAND]
    for arguments in ours:
        main_parser().parse_args(arguments)
    assert [arguments[0] for arguments in ours] == ["export", "record", "verify"]
    assert job["steps"][-2]["with"]["path"] in shlex.join(ours[1])
