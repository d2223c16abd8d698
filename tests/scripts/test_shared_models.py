"""The commands on delegates that share a model, and on models compiled ahead of time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import leftovers, tiny_pte

from coreml_delegate.formats.blob import BlobReference, flatten, unflatten
from coreml_delegate.formats.blob_layout import MethodMetadata, ModelMetadata
from coreml_delegate.runtime.program.plan import DelegateInfo, MethodInfo
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")


class Program:
    """The part of ``PteProgram`` that extraction reads; no exporter here writes shared models."""

    origin = "x.pte"
    external_tensors = ()

    def __init__(self, methods, named=None):
        self._named = named or {}
        self.named_data_keys = tuple(self._named)
        self.methods = tuple(
            MethodInfo(
                name=name,
                values=(),
                inputs=(),
                outputs=(),
                chains=(),
                delegates=tuple(DelegateInfo("CoreMLBackend", memoryview(b), ()) for b in blobs),
                arena_sizes=(),
            )
            for name, blobs in methods.items()
        )

    def named_data(self, key):
        return memoryview(self._named[key]) if key in self._named else None


@pytest.fixture
def blob():
    return bytes(PteProgram.open(tiny_pte()).methods[0].delegates[0].processed)


@pytest.fixture
def present(tmp_path, monkeypatch):
    """Make ``x.pte`` hold a program."""
    monkeypatch.chdir(tmp_path)
    Path("x.pte").touch()

    def present(program):
        monkeypatch.setattr(PteProgram, "open", lambda _path: program)

    return present


def reference(function, key="weights"):
    return BlobReference(key, function).encode()


def test_a_shared_model_is_extracted_once(blob, present, capsys):
    methods = {"prefill": [reference("prefill")], "decode": [blob, reference("decode")]}
    present(Program(methods, {"weights": blob}))
    assert main(["extract", "x.pte", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["path"] == "x_coreml/prefill_0.mlpackage"
    assert entry["delegates"] == [
        "prefill_0 (function prefill)",
        "decode_0",
        "decode_1 (function decode)",
    ]
    written = Path(entry["path"])
    expected = {
        path.removeprefix("model.mlpackage/"): bytes(content)
        for path, content in unflatten(blob).items()
        if path.startswith("model.mlpackage/")
    }
    found = {
        p.relative_to(written).as_posix(): p.read_bytes() for p in written.rglob("*") if p.is_file()
    }
    assert found == expected


def test_a_dangling_reference_is_an_error(present, capsys):
    present(Program({"forward": [reference("main", "gone")]}))
    assert main(["extract", "x.pte"]) == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: delegate refers to data the program does not have: got 'gone'. "
        "Pass the .ptd files that were written with the .pte, if there are any\n"
    )


@pytest.fixture
def compiled():
    metadata = ModelMetadata("an_identifier", {"": MethodMetadata(("x",), ("y",))})
    return flatten(
        {"metadata.json": metadata.encode(), "model.mlmodelc/a/model.mil": b"program(1.0)"}
    )


def test_a_compiled_model_is_extracted_as_such(compiled, present, capsys):
    present(Program({"forward": [compiled]}))
    assert main(["extract", "x.pte"]) == 0
    assert Path("x_coreml/forward_0.mlmodelc/a/model.mil").read_bytes() == b"program(1.0)"


def test_a_compiled_model_is_inspected_without_its_operations(compiled, present, capsys):
    present(Program({"forward": [compiled]}))
    assert main(["inspect", "x.pte", "--json"]) == 0
    delegate = json.loads(capsys.readouterr().out)["methods"][0]["delegates"][0]
    assert delegate["identifier"] == "an_identifier"
    assert delegate["model"] is None
    assert delegate["unreadable"].startswith("blob holds a compiled model")


def test_method_names_cannot_leave_the_folder(blob, present, tmp_path):
    present(Program({"../../evil": [blob]}))
    assert main(["extract", "x.pte", "-o", "out"]) == 0
    assert leftovers(Path("out")) == {".._.._evil_0.mlpackage"}
    assert leftovers(tmp_path) == {"x.pte", "out"}


def test_extract_writes_nothing_if_one_delegate_is_bad(blob, present):
    present(Program({"forward": [blob, blob[:-40]]}))
    assert main(["extract", "x.pte"]) == 1
    assert not Path("x_coreml").exists()
