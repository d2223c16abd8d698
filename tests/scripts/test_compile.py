"""``coreml-delegate compile``: programs in the cache before they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.command import tiny_pte
from support.gates import needs_compiler
from support.lowering import Function, fp32_specs, lower

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE
from coreml_delegate.runtime.engines.openvino.session import compilation, compiled_cache
from coreml_delegate.scripts.cli import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps programs however small they are."""
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(compiled_cache, "is_worth_caching", lambda _: True)


def _forbid_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("translated again")

    monkeypatch.setattr(compilation.translate, "translate", fail)


@needs_compiler
def test_what_is_compiled_is_found_when_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.pte"
    path.write_bytes(tiny_pte())
    capsys.readouterr()
    assert main(["compile", str(path), "--json"]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert program["file"] == str(path)
    parts = [(d["method"], d["delegate"], d["engine"]) for d in program["delegates"]]
    assert parts == [("forward", 0, "openvino"), ("forward", 1, "openvino")]
    assert [d["python_reason"] for d in program["delegates"]] == [None, None]
    _forbid_translation(monkeypatch)
    assert main(["compile", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{path}: compiled in ")
    assert printed[1].split("  ")[-1] == "calls without Python"


def test_every_enumerated_shape_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [[1, 4], [3, 4], [7, 4]]
    exported = torch.export.export(
        Function(lambda x: torch.tanh(x) * 2),
        (torch.ones(3, 4),),
        dynamic_shapes=(({0: torch.export.Dim("rows", min=1, max=7)},),),
    )
    listed = CoreMLBackend.generate_enumerated_shapes_compile_spec(exported, {"inputs_0": shapes})
    specs = [*fp32_specs(), listed]
    edge = to_edge_transform_and_lower(
        exported, partitioner=[CoreMLPartitioner(compile_specs=specs)]
    )
    path = tmp_path / "rows.pte"
    path.write_bytes(edge.to_executorch().buffer)
    assert main(["compile", str(path)]) == 0
    assert "calls without Python" in capsys.readouterr().out
    _forbid_translation(monkeypatch)
    program = runtime.load_program(path)
    for rows, _ in shapes:
        (result,) = program.run("forward", [torch.ones(rows, 4)])
        torch.testing.assert_close(result, torch.tanh(torch.ones(rows, 4)) * 2)


def test_a_package_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pte, folder = tmp_path / "tiny.pte", tmp_path / "models"
    pte.write_bytes(tiny_pte())
    assert main(["extract", str(pte), "-o", str(folder)]) == 0
    packages = sorted(folder.rglob("*.mlpackage"))
    assert len(packages) == 2
    capsys.readouterr()
    assert main(["compile", *map(str, packages), "--json"]) == 0
    programs = json.loads(capsys.readouterr().out)["programs"]
    assert [p["delegates"][0]["engine"] for p in programs] == ["openvino", "openvino"]


def test_without_a_cache_there_is_nothing_to_compile_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.pte"
    path.write_bytes(tiny_pte())
    monkeypatch.setenv(LIMIT_VARIABLE, "off")
    assert main(["compile", str(path)]) == 1
    assert "the cache of compiled programs is off" in capsys.readouterr().err


def test_no_program_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.pte"
    path.write_bytes(b"no program")
    assert main(["compile", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("coreml-delegate: error: ")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.tanh(x), "calls here: without Python"),
        (lambda x: torch.tanh(x) @ torch.ones(1024, 1100), "it has more than 4 MB"),
    ],
    ids=["small", "large"],
)
def test_inspect_says_how_a_delegate_is_called(
    function: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "function.pte"
    path.write_bytes(lower(Function(function), (torch.ones(2, 1024),)).pte)
    assert main(["inspect", str(path)]) == 0
    assert reason in capsys.readouterr().out
