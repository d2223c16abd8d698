"""``coreml-delegate export`` with dynamic and enumerated shapes, and what ``inspect`` shows."""

from __future__ import annotations

import pytest
from support.command import MODELS

from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def export(*options: str) -> int:
    return main(["export", f"{MODELS}:tiny", "-o", "a.pte", *options])


def test_dynamic(capsys):
    assert export("--dynamic", "x:2=8..24", "--skip-op", "sin") == 0
    assert "takes x [1, 3, 8..24, 16]" in capsys.readouterr().out
    assert main(["inspect", "a.pte"]) == 0
    assert "inputs: x fp32[1, 3, 8..24, 16]" in capsys.readouterr().out


def test_enumerated(capsys):
    assert export("--enumerated-shapes", "x=1,3,8,16/1,3,24,16", "--skip-op", "sin") == 0
    assert "takes x [1, 3, 8, 16] | [1, 3, 24, 16]" in capsys.readouterr().out
    assert main(["inspect", "a.pte"]) == 0
    shown = capsys.readouterr().out
    assert "x fp32[1, 3, 8, 16] | [1, 3, 24, 16]" in shown
    assert "enumerated_shapes x [1, 3, 8, 16] | x [1, 3, 24, 16]" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dynamic", "x=1..3"], "'x=1..3' is not a range such as x:0=1..8"),
        (["--dynamic", "x:0=3..1"], "is not a range"),
        (["--enumerated-shapes", "x"], "is not shapes such as x=1,8/1,16"),
    ],
)
def test_misspelt(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        export(*options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dynamic", "y:0=1..3"], "no such input: got 'y', expected x"),
        (["--dynamic", "x:4=1..3"], "has no such dimension: got 4, expected 0 to 3"),
        (["--dynamic", "x:2=8..24", "--dynamic", "x:2=8..9"], "given twice for a dimension"),
        (["--enumerated-shapes", "x=1,3,8,16"], "wrong number of enumerated shapes: got 1"),
        (["--enumerated-shapes", "z=1,3,8,16/1,3,9,16"], "no such input: got 'z'"),
    ],
)
def test_refused(options, message, capsys):
    assert export(*options) == 1
    assert message in capsys.readouterr().err
