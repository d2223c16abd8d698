"""``coreml-delegate sweep``, with real jobs in processes of their own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command import MODELS, leftovers, start

from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.sweeping import sweeps
from coreml_delegate.scripts.sweeping.records import RESULTS

pytestmark = pytest.mark.xdist_group("cli-processes")

_PATIENCE = 120  # seconds
_CLASSIFIER = f'[models.net]\nsource = "{MODELS}:classifier"\ninput_shape = [[1, 3, 16, 16]]\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _sweep(text: str, *args: str) -> int:
    Path("s.toml").write_text(text)
    return main(["sweep", "s.toml", *args])


def _records() -> dict[str, Mapping[str, Any]]:
    lines = (Path("s_sweep") / RESULTS).read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def _model(name: str) -> str:
    return f'[models.{name}]\nsource = "{MODELS}:{name}"\n'


@pytest.mark.slow  # README runs a sweep
def test_jobs_give_what_export_and_verify_give(capsys):
    """The other process has one thread, and so have tests."""
    text = f"jobs = 2\nrepeat = 0\nsamples = 3\n{_CLASSIFIER}{_model('failing')}"
    assert _sweep(text, "--keep-programs") == 1
    told = capsys.readouterr()
    assert "1 of 2 jobs have no result: got 1 failed" in told.err
    assert f"failing: failed: {MODELS}:failing fails: got ValueError: no data" in told.out
    found = _records()["net"]["result"]
    source = [f"{MODELS}:classifier", "--input-shape", "1,3,16,16"]
    assert main(["export", *source, "-o", "a.pte"]) == 0
    capsys.readouterr()
    verify = ["verify", source[0], "a.pte", *source[1:], "--samples", "3", "--json"]
    assert main(verify) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"].values()
    assert found["sqnr_db"] == output["sqnr_db"]
    assert found["max_abs_error"] == output["max_abs_error"]
    assert found["top1_agreement"] == output["top1_agreement"]
    program = Path("a.pte").read_bytes()
    assert found["program_bytes"] == len(program)
    (kept,) = Path("s_sweep/programs").iterdir()
    assert kept.read_bytes() == program
    # Nothing is missing now, not even the job that failed.
    assert _sweep(text, "--keep-programs", "--list") == 0
    assert capsys.readouterr().out == "net: nothing to do\nfailing: nothing to do\n"


@pytest.mark.slow
def test_a_sweep_goes_on_and_runs_only_what_is_missing(capsys, monkeypatch):
    options = '[options]\nprecision = ["float16"]\n'
    assert _sweep(f"repeat = 3\n{_CLASSIFIER}{options}") == 0
    first = capsys.readouterr()
    assert first.err.count("[1/1] net[float16]") == 2  # lowered, and timed
    assert _records()["net[float16]"]["latency"]["runs"] == 3
    assert leftovers(Path("s_sweep")) == {"records", "index.html", RESULTS}

    assert _sweep(f"repeat = 3\n{_CLASSIFIER}{options}") == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (first.out, "")

    wider = '[options]\nprecision = ["float16", "float32"]\n'
    assert _sweep(f"repeat = 3\n{_CLASSIFIER}{wider}", "--compare", "s_sweep") == 0
    extended = capsys.readouterr()
    assert "net[float16]:" not in extended.err
    assert "[1/1] net[float32]:" in extended.err
    assert "net[float32]  new" in extended.out
    assert len(list(Path("s_sweep/records").iterdir())) == 2

    # A latency of another machine is measured again, which takes the program.
    monkeypatch.setattr(sweeps, "machine", lambda: "another")
    assert _sweep(f"repeat = 3\n{_CLASSIFIER}{options}", "--list") == 0
    assert capsys.readouterr().out == "net[float16]: to run\n"
    assert _sweep(f"repeat = 0\n{_CLASSIFIER}{options}", "--list") == 0
    assert capsys.readouterr().out == "net[float16]: nothing to do\n"


@pytest.mark.slow
def test_a_job_that_ends_badly_costs_one_job(capsys, folder):
    text = (
        f'timeout = 40\nmemory = "2G"\nrepeat = 0\n'
        f"{_model('ending')}{_model('insatiable')}{_CLASSIFIER}"
    )
    temporary = folder / "temporary"
    temporary.mkdir()
    Path("s.toml").write_text(text)
    process = start("sweep", "s.toml", TMPDIR=temporary)
    out, err = process.communicate(timeout=3 * _PATIENCE)
    assert process.returncode == 1, err
    found = _records()
    assert {name: row["status"] for name, row in found.items()} == {
        "ending": "crashed",
        "insatiable": "out of memory",
        "net": "done",
    }
    assert "ending: crashed: ended by SIGSEGV" in out
    assert "of memory; the limit is 2.1 GB" in found["insatiable"]["reason"]
    assert leftovers(temporary) == set()
    # The crash is known by now; it runs again if asked.
    capsys.readouterr()
    assert _sweep(text, "--list", "--retry-failed", "--only", "ending") == 0
    assert capsys.readouterr().out == "ending: to run\n"


@pytest.mark.slow
def test_a_time_limit_ends_a_job_and_a_longer_one_tries_again(capsys, monkeypatch, folder):
    monkeypatch.setenv("STALLED", str(folder / "stalled"))
    text = f"repeat = 0\n{_model('endless')}"
    assert _sweep(f"timeout = 2\n{text}") == 1
    assert "endless: timed out: took more than 2 s" in capsys.readouterr().out
    for limit, missing in (("timeout = 2\n", "nothing to do"), ("timeout = 3\n", "to run")):
        assert _sweep(f"{limit}{text}", "--list") == 0
        assert capsys.readouterr().out == f"endless: {missing}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "coreml-delegate: error: interrupted\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGKILL, -9, ""),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_signal_ends_the_children_and_leaves_no_part(number, code, message, folder):
    temporary, stalled = folder / "temporary", folder / "stalled"
    temporary.mkdir()
    Path("s.toml").write_text(f"{_model('endless')}")
    process = start("sweep", "s.toml", TMPDIR=temporary, STALLED=stalled)
    _wait_until(stalled.exists)
    (child,) = _children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=_PATIENCE)
    assert (process.returncode, out, err) == (code, "", message)
    _wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert not Path("s_sweep").exists()
    if number != signal.SIGKILL:  # after which no one can clean up
        assert leftovers(temporary) == set()


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_until(condition) -> None:
    limit = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_names_choose_jobs(capsys):
    options = '[options]\nprecision = ["float16", "float32"]\n'
    text = f"{_CLASSIFIER}{_model('tiny')}{options}"
    chosen = {
        ("net",): ["net[float16]", "net[float32]"],
        ("*[float32]",): ["net[float32]", "tiny[float32]"],
        ("net[float16]", "tiny*16]"): ["net[float16]", "tiny[float16]"],
    }
    for names, jobs in chosen.items():
        options = [word for name in names for word in ("--only", name)]
        assert _sweep(text, "--list", *options) == 0
        assert capsys.readouterr().out == "".join(f"{job}: to run\n" for job in jobs)
    assert _sweep(text, "--list", "--only", "nett") == 1
    assert "no job of that name: got 'nett', expected perhaps net" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--compare", "absent"], "no results of a sweep: got absent"),
        (["-o", "s.toml"], "output is not a folder: got s.toml"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(args, message, capsys):
    assert _sweep(_CLASSIFIER, *args) == 1
    assert message in capsys.readouterr().err
