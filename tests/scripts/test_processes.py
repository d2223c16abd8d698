"""The command as a process: signals and closed pipes leave no files behind."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import MODELS, leftovers, start, tiny_pte

from coreml_delegate.scripts import console, interruption

pytestmark = pytest.mark.xdist_group("cli-processes")

_PATIENCE = 120  # seconds; importing ExecuTorch and coremltools takes tens on a busy machine


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + _PATIENCE
    while not path.exists():
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            pytest.fail(f"the command did not get there: {process.communicate()}")
        time.sleep(0.05)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "coreml-delegate: error: interrupted\n"),
        (signal.SIGTERM, 143, ""),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_during_conversion_leaves_nothing(number, code, message, tmp_path):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    (here / "a.pte").write_text("old")
    stalled = tmp_path / "stalled"
    process = start(
        *("export", f"{MODELS}:stalling", "-o", here / "a.pte", "--force"),
        STALLED=stalled,
        TMPDIR=temporary,
    )
    wait_for(stalled, process)
    assert leftovers(temporary) != set()  # it is converting
    process.send_signal(number)
    out, err = process.communicate(timeout=_PATIENCE)
    assert (process.returncode, out, err) == (code, "", message)
    assert leftovers(temporary) == set()
    assert leftovers(here) == {"a.pte"}
    assert (here / "a.pte").read_text() == "old"


def test_an_interrupt_during_imports_has_no_traceback(monkeypatch, capsys):
    class Interrupting:
        @staticmethod
        def find_spec(name, *_):
            if name == "coreml_delegate.scripts.cli":
                signal.raise_signal(signal.SIGINT)

    import coreml_delegate.scripts as package
    from coreml_delegate.scripts.__main__ import main as start_command

    monkeypatch.delattr(package, "cli")
    monkeypatch.delitem(sys.modules, "coreml_delegate.scripts.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    assert start_command() == 130
    assert capsys.readouterr() == ("", "coreml-delegate: error: interrupted\n")


def test_a_signal_interrupts_nothing_after_the_command(capsys):
    def command() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert console.until_interrupted(command) == 130
    interruption.check()
    assert capsys.readouterr().err == "coreml-delegate: error: interrupted\n"


@pytest.mark.parametrize("module", ["scripts", "scripts.cli"])
def test_modules_that_are_the_command(module):
    command = [sys.executable, "-m", f"coreml_delegate.{module}", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["coreml-delegate"])


@pytest.mark.slow
def test_an_interrupt_during_calibration_leaves_nothing(tmp_path):
    here, temporary, stalled = (tmp_path / name for name in ("here", "temporary", "stalled"))
    here.mkdir()
    temporary.mkdir()
    process = start(
        *("export", f"{MODELS}:stalling_calibration", "-o", here / "a.pte"),
        *("--quantize", "int8-static", "--calibration", f"{MODELS}:sensitive_samples"),
        STALLED=stalled,
        TMPDIR=temporary,
    )
    wait_for(stalled, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_PATIENCE)
    assert (process.returncode, out, err) == (130, "", "coreml-delegate: error: interrupted\n")
    assert leftovers(temporary) == set()
    assert leftovers(here) == set()


def test_a_closed_pipe_ends_quietly(tmp_path):
    (tmp_path / "x.pte").write_bytes(tiny_pte())
    for args in (["--help"], ["extract", tmp_path / "x.pte", "-o", tmp_path / "out"]):
        process = start(*args)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(_PATIENCE)) == ("", 141)
        process.stderr.close()
    assert leftovers(tmp_path / "out") == {"forward_0.mlpackage", "forward_1.mlpackage"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "args", "ending"),
    [
        (">&-", ["inspect", "x.pte", "--json"], ("", 141)),
        (">&-", ["--help"], ("", 141)),
        (">&-", ["extract", "x.pte", "--json"], ("", 141)),
        (">&- 2>&- <&-", ["inspect", "x.pte"], ("", 141)),
        ("2>&-", ["inspect", "nothing.pte"], ("", 1)),
        (
            ">/dev/full",
            ["inspect", "x.pte", "--json"],
            ("coreml-delegate: error: No space left on device: stdout\n", 1),
        ),
    ],
)
def test_closed_streams_end_with_their_exit_code(closed, args, ending, tmp_path):
    (tmp_path / "x.pte").write_bytes(tiny_pte())
    command = shlex.join([sys.executable, "-m", "coreml_delegate.scripts", *args])
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", *ending)
    made = {"forward_0.mlpackage", "forward_1.mlpackage"} if args[0] == "extract" else set()
    assert {path.name for path in tmp_path.glob("x_coreml/*")} == made


@pytest.mark.slow
def test_a_run_on_the_stock_host_writes_nothing_to_stderr(tmp_path):
    program = tmp_path / "tiny.pte"
    program.write_bytes(tiny_pte())
    process = start("run", program, "--host", "stock")
    out, err = process.communicate(timeout=_PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert "latency" in out
