"""``record``, ``replay`` and ``verify --against``, between two machines and two engines."""

from __future__ import annotations

import functools
import io
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import core_ml
from support.command import MODELS, leftovers, tiny_pte
from support.kept_and_flexible import Counting, lower_stateful
from support.multimethod import IOS18, Layers, linear, lower_methods, specs, two
from support.packages import long_accumulator
from support.tolerances import SQNR_FP16, SQNR_FP32

from coreml_delegate.formats.files import write_folder
from coreml_delegate.runtime.recording import Recording
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")

RECORDINGS = sorted((Path(__file__).parents[1] / "fixtures" / "recordings").glob("*.cmlrun"))
RECORDED = "a.cmlrun"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """The current folder, empty; beside it is one for temporary files, which has to stay empty."""
    own, temporary = tmp_path / "own", tmp_path / "temporary"
    own.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert not leftovers(temporary)


@pytest.fixture
def tiny():
    Path("tiny.pte").write_bytes(tiny_pte())
    return "tiny.pte"


@functools.cache
def _counting():
    return lower_stateful(Counting())


@functools.cache
def _methods():
    return lower_methods(two(Layers(linear())), specs("POSITIONAL", **IOS18)).pte


def _document(capsys):
    return json.loads(capsys.readouterr().out)


# The recordings of the repository


@pytest.mark.parametrize("engine", ["reference", "openvino"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_every_recording_of_the_repository_is_replayed(recording, engine, capsys):
    types = [t for types in Recording.read(recording).run.engines.values() for t in types]
    least = SQNR_FP16 if "fp16" in types else SQNR_FP32
    assert main(["replay", str(recording), "--engine", engine, "--min-sqnr", str(least)]) == 0
    assert f"computed by {engine} in " in capsys.readouterr().out


def test_there_are_recordings():
    assert RECORDINGS


# From one machine to another


def test_a_run_on_a_mac_is_replayed_here(tiny, capsys):
    with core_ml.strict() as loaded:
        assert main(["record", tiny, "-o", RECORDED, "--with-program"]) == 0
        assert set(loaded.compute_units) == {"ALL"}
    printed = capsys.readouterr().out
    assert "a.cmlrun: 4 calls of forward (" in printed
    assert "calls and program)\ncomputed by coreml in fp16\n" in printed
    Path(tiny).unlink()
    assert main(["replay", RECORDED]) == 0
    printed = capsys.readouterr().out
    assert "output_0  equal  0" in printed
    assert "computed by reference in fp16, compared with coreml in fp16\n" in printed
    assert "recorded on " in printed
    assert "compute units all\n" in printed


def test_a_recording_tells_what_ran_it(tiny, capsys):
    options = ["--engine", "coreml", "--compute-unit", "cpu_only", "--samples", "2", "--json"]
    with core_ml.strict() as loaded:
        assert main(["record", tiny, "-o", RECORDED, *options]) == 0
        assert set(loaded.compute_units) == {"CPU_ONLY"}
    told = _document(capsys)
    assert told["bytes"] == Path(RECORDED).stat().st_size
    assert told["engines"] == {"coreml": ["fp16"]}
    assert (told["host"], told["compute_units"]) == ("python", ["cpu_only"])
    assert (told["methods"], told["calls"]) == (["forward"], 2)
    assert told["versions"]["coremltools"] == "9.0"
    assert told["versions"]["macos"] is None
    assert told["versions"].keys() >= {"coreml-delegate", "executorch", "openvino", "python"}


def test_equal_runs_give_equal_bytes(tiny):
    for name in ("a", "b"):
        assert main(["record", tiny, "-o", f"{name}.cmlrun", "--seed", "3"]) == 0
    assert Path("a.cmlrun").read_bytes() == Path("b.cmlrun").read_bytes()


def test_a_recording_without_its_program_needs_that_very_program(tiny, capsys):
    assert main(["record", tiny, "-o", RECORDED]) == 0
    assert "without the program" in capsys.readouterr().out
    assert main(["replay", RECORDED]) == 1
    assert "Pass PROGRAM, the recorded tiny.pte" in capsys.readouterr().err
    shutil.copy(tiny, "renamed.pte")
    assert main(["replay", RECORDED, "renamed.pte"]) == 0
    Path("other.pte").write_bytes(_counting())
    assert main(["replay", RECORDED, "other.pte"]) == 1
    assert "the recording is of another program: got other.pte with SHA" in capsys.readouterr().err


def test_other_results_fail(tiny, capsys):
    assert main(["record", tiny, "-o", RECORDED, "--with-program", "--samples", "1"]) == 0
    recording = Recording.read(Path(RECORDED))
    (call,) = recording.calls
    outputs = {name: tensor * 1.1 for name, tensor in call.outputs.items()}
    changed = io.BytesIO()
    replace(recording, calls=(replace(call, outputs=outputs),)).write(changed)
    Path("b.cmlrun").write_bytes(changed.getvalue())
    capsys.readouterr()
    assert main(["replay", "b.cmlrun"]) == 1
    captured = capsys.readouterr()
    assert "this machine differs from the recording: got output_0 at 20." in captured.err
    assert "output_0  20." in captured.out
    assert main(["replay", "b.cmlrun", "--min-sqnr", "20", "--json"]) == 0
    assert _document(capsys)["outputs"]["output_0"]["sqnr_db"] == pytest.approx(20.8, abs=0.1)


def test_outputs_of_other_names_fail(tiny, capsys):
    assert main(["record", tiny, "-o", RECORDED, "--with-program", "--samples", "1"]) == 0
    recording = Recording.read(Path(RECORDED))
    (call,) = recording.calls
    changed = io.BytesIO()
    replace(recording, calls=(replace(call, outputs={"y": torch.ones(1)}),)).write(changed)
    Path("b.cmlrun").write_bytes(changed.getvalue())
    assert main(["replay", "b.cmlrun"]) == 1
    assert "the recording has other outputs than the program: got y" in capsys.readouterr().err


def test_states_are_recorded_and_compared(capsys):
    Path("counting.pte").write_bytes(_counting())
    with core_ml.strict():
        assert main(["record", "counting.pte", "-o", RECORDED, "--with-program"]) == 0
    recording = Recording.read(Path(RECORDED))
    assert {n: (s.dtype, tuple(s.shape)) for n, s in recording.states["forward"].items()} == {
        "forward.0.count": (torch.float16, (2,)),
        "forward.0.rows": (torch.float16, (3, 6, 2)),
    }
    for engine in ("reference", "openvino"):
        capsys.readouterr()
        assert main(["replay", RECORDED, "--engine", engine, "--json"]) == 0
        results = _document(capsys)["outputs"]
        assert {n for n in results if n.startswith("state ")} == {
            "state forward.0.count",
            "state forward.0.rows",
        }
    states = {"forward": {n: s + 1 for n, s in recording.states["forward"].items()}}
    changed = io.BytesIO()
    replace(recording, states=states).write(changed)
    Path("b.cmlrun").write_bytes(changed.getvalue())
    assert main(["replay", "b.cmlrun"]) == 1
    assert "got state forward.0.count at" in capsys.readouterr().err


def test_every_method_is_recorded(capsys):
    Path("methods.pte").write_bytes(_methods())
    with core_ml.strict() as loaded:
        assert main(["record", "methods.pte", "-o", RECORDED, "--with-program"]) == 0
    assert set(loaded.function_names) == {"decode", "prefill"}
    assert "8 calls of decode, prefill" in capsys.readouterr().out
    assert main(["replay", RECORDED, "--json"]) == 0
    assert set(_document(capsys)["outputs"]) == {"decode output_0", "prefill output_0"}
    one = ["record", "methods.pte", "-o", "one.cmlrun", "--method", "prefill"]
    assert main([*one, "--json"]) == 0
    assert _document(capsys)["methods"] == ["prefill"]
    np.save("x.npy", np.ones((3, 4), np.float32))
    several = ["record", "methods.pte", "-o", "several.cmlrun", "--input", "x.npy"]
    assert main(several) == 1
    assert "Name it with --method" in capsys.readouterr().err
    assert not Path("several.cmlrun").exists()
    assert main([*several, "--method", "prefill", "--with-program"]) == 0
    (call,) = Recording.read(Path("several.cmlrun")).calls
    assert torch.equal(call.inputs[0], torch.ones(3, 4))


def test_packages_are_recorded(capsys):
    write_folder(long_accumulator(), Path("a.mlpackage"))
    with core_ml.strict():
        assert main(["record", "a.mlpackage", "-o", RECORDED, "--with-program"]) == 0
    shutil.rmtree("a.mlpackage")
    capsys.readouterr()
    assert main(["replay", RECORDED, "--json"]) == 0
    assert set(_document(capsys)["outputs"]) == {"before", "after", "state total"}


def test_recordings_are_not_replaced_unasked(tiny, capsys):
    Path(RECORDED).write_text("mine")
    assert main(["record", tiny, "-o", RECORDED]) == 1
    assert "Pass --force" in capsys.readouterr().err
    assert main(["record", tiny, "-o", RECORDED, "--force"]) == 0
    assert Recording.read(Path(RECORDED)).program == tiny


def test_a_file_that_is_no_recording_is_one_error(tiny, capsys):
    assert main(["replay", tiny]) == 1
    assert "error: not a recording" in capsys.readouterr().err


# Two engines on one machine


def test_two_engines_are_compared(tiny, capsys):
    assert main(["verify", tiny, "--engine", "openvino", "--against", "reference"]) == 0
    printed = capsys.readouterr().out
    assert "computed by openvino in fp32 (the program declares fp16), compared with" in printed
    assert main(["verify", tiny, "--against", "reference", "--min-sqnr", "200"]) == 1
    assert "error: the engines differ: got output_0 at" in capsys.readouterr().err


def test_core_ml_is_compared_with_the_reference(capsys):
    Path("counting.pte").write_bytes(_counting())
    with core_ml.strict():
        command = ["verify", "counting.pte", "--engine", "coreml", "--against", "reference"]
        assert main([*command, "--json"]) == 0
    document = _document(capsys)
    assert list(document["engines"]) == ["coreml"]
    assert list(document["against"]) == ["reference"]
    assert {each["sqnr_db"] for each in document["outputs"].values()} == {"inf"}


def test_options_are_those_of_the_first_engine(tiny, capsys):
    """Core ML takes neither; the NaN of the input shows that the first engine does."""
    np.save("x.npy", np.full((1, 3, 16, 16), np.nan, np.float32))
    command = ["verify", tiny, "--engine", "openvino", "--against", "coreml", "--input", "x.npy"]
    with core_ml.strict():
        for option, message in (
            ("--exact-nan", "nothing was compared: got output_0 all NaN, output_1 all NaN"),
            ("--json", "the engines differ: got output_0 at -inf dB"),
        ):
            assert main([*command, option]) == 1
            assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["other.pte", "--against", "reference"], "--against takes only a program"),
        (["--against", "reference", "--input-shape", "1,2"], "--against takes only a program"),
        (["--against", "reference", "--etrecord", "x"], "--against takes only a program"),
        (["--engine", "openvino", "--against", "openvino"], "are both openvino"),
        (["--against", "auto"], "invalid choice: 'auto'"),
    ],
)
def test_wrong_usage_of_against(options, message, tiny, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["verify", tiny, *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_core_ml_is_refused_elsewhere(tiny, capsys):
    for command in (["run", tiny], ["verify", f"{MODELS}:tiny", tiny], ["verify", tiny]):
        against = ["--against", "reference"] if command == ["verify", tiny] else []
        assert main([*command, *against, "--engine", "coreml"]) == 1
        assert "got Core ML is a part of macOS" in capsys.readouterr().err
