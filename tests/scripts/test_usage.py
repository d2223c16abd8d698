"""Parsing, help, exit codes, and the output on the terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command import TINY

from coreml_delegate import runtime
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from coreml_delegate.scripts import arguments, cli, console
from coreml_delegate.scripts.cli import COMMANDS, main


def test_choices_equal_the_names_of_the_runtime():
    assert (AUTO, *ENGINES) == arguments.ENGINES
    assert arguments.HOSTS == runtime.HOSTS


def test_help_imports_nothing_slow():
    code = (
        "import sys\n"
        "from coreml_delegate.scripts.cli import main_parser\n"
        "main_parser().format_help()\n"
        "print(sorted({'torch', 'numpy', 'executorch', 'coremltools', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_running_a_program_imports_nothing_that_lowers():
    code = (
        "import sys\n"
        "from coreml_delegate.scripts import program_arguments, recordings, summary\n"
        "print(sorted({'executorch.exir', 'coreml_delegate.lowering'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command.name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: coreml-delegate {command.name}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("coreml-delegate 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["explode"], "invalid choice: 'explode'"),
        (["export", "m:f"], "the following arguments are required: -o/--output"),
        (
            ["export", "m:f", "-o", "x", "--input-shape", "1,0"],
            "argument --input-shape: '1,0' is not a shape such as 1,3,224,224",
        ),
        (
            ["export", "m:f", "-o", "x", "--deployment-target", "iOS9"],
            "argument --deployment-target: unknown deployment target: got 'iOS9', expected iOS15, ",
        ),
        (["quantize-report", "m:f"], "the following arguments are required: --quantize"),
        (
            ["quantize-report", "m:f", "--quantize", "int8-weight", "--report", "x.csv"],
            "argument --report: 'x.csv' ends in none of .html, .json, .png, .txt",
        ),
        (["run", "x.pte", "--repeat", "0"], "argument --repeat: '0' is not a positive integer"),
        (
            ["run", "x.pte", "--repeat", "99999999999999999999"],
            "argument --repeat: '99999999999999999999' is not a positive integer of 64 bits",
        ),
        *(
            (
                [*command, "--seed", seed],
                f"argument --seed: '{seed}' is not an integer of 64 bits, signed or unsigned",
            )
            for command in (["run", "x.pte"], ["export", "m:f", "--dry-run"])
            for seed in ("18446744073709551616", "-9223372036854775809", "1.5")
        ),
        (
            ["export", "m:f", "-o", "x", "--input-shape", "99999999999999999999,8"],
            "argument --input-shape: '99999999999999999999,8' is not a shape such as",
        ),
        (
            ["export", "m:f", "-o", "x", "--dynamic", "x:0=1..99999999999999999999"],
            "argument --dynamic: 'x:0=1..99999999999999999999' is not a range such as",
        ),
        (["verify", "m:f", "x.pte", "--min-sqnr", "nan"], "--min-sqnr: 'nan' is not a number"),
        (
            ["generate", "x.pte", "--prompt", "a", "--top-k", "99999999999999999999"],
            "argument --top-k: '99999999999999999999' is not a positive integer of 64 bits",
        ),
        (
            ["generate", "x.pte", "--prompt", "a", "--stop", "99999999999999999999"],
            "argument --stop: '99999999999999999999' is not a natural number of 64 bits",
        ),
        (["run", "x.pte", "--engine", "gpu"], "argument --engine: invalid choice: 'gpu'"),
    ],
)
def test_wrong_usage_is_exit_code_2(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_errors_are_one_line(capsys):
    console.complain("several\n  lines")
    assert capsys.readouterr().err == "coreml-delegate: error: several lines\n"


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63), 0])
def test_torch_takes_every_accepted_seed(seed):
    assert arguments.seed(str(seed)) == seed
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("std::bad_alloc"), "this machine does not have enough memory: std::bad_alloc"),
        (MemoryError(), "this machine does not have enough memory"),
        (None, "this machine does not have enough memory: .*36028797018963968 bytes"),
    ],
)
def test_too_little_memory_is_one_line(error, message, monkeypatch, capsys):
    def ask_for_much():
        raise error or torch.empty(2**53)

    command = [command for command in COMMANDS if command.name == "cache"]
    monkeypatch.setattr(cli, "COMMANDS", [replace(command[0], run=lambda _: ask_for_much())])
    assert main(["cache"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.match(f"coreml-delegate: error: {message}", err)


def test_other_errors_of_torch_keep_their_traceback(monkeypatch):
    def fail(_):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(cli, "COMMANDS", [replace(COMMANDS[0], name="cache", run=fail)])
    with pytest.raises(RuntimeError, match="sizes do not match"):
        main(["cache", "m:f"])


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (7_071_213, "7.1 MB")]
)
def test_sizes_have_decimal_units(count, text):
    assert console.size(count) == text


def test_progress_is_shown_only_on_terminals(monkeypatch, capsys):
    with console.progress([1, 2], "Reading") as items:
        assert list(items) == [1, 2]
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.progress([1, 2], "Reading") as items:
        assert list(items) == [1, 2]
    assert "Reading" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_json_is_valid_for_every_number(capsys):
    console.write_json({"a": [float("inf"), float("-inf"), float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": ["inf", "-inf", "nan", 1.5]}


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [
        (0, "coreml-delegate: warning: careful\n"),
        (1, "WARNING coreml_delegate.x: careful\nINFO other: hello\n"),
    ],
)
def test_logs_go_to_stderr(verbosity, expected, capsys):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with console.session(verbosity):
        logging.getLogger("coreml_delegate.x").warning("careful")
        logging.getLogger("other").info("hello")
        logging.getLogger("other").debug("too much")
    assert capsys.readouterr() == ("", expected)
    assert (root.level, list(root.handlers)) == before


@pytest.mark.parametrize(
    "command",
    [
        ["export", *TINY, "-o", "a", "--etrecord", "./a"],
        ["run", "a.pte", "--etdump", "b", "--debug-buffer", "b"],
        [
            "quantize-report",
            TINY[0],
            "--quantize",
            "int8-weight",
            "--report",
            "r.json",
            "--suggest",
            "r.json",
        ],
    ],
)
def test_two_outputs_are_two_files(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1
    assert "two outputs are the same file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
