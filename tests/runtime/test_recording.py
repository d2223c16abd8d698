"""The file of a recorded run: what is written is read, and nothing else is."""

from __future__ import annotations

import io
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coreml_delegate.errors import BlobFormatError, CoreMLDelegateError, ProgramError
from coreml_delegate.runtime.recording import (
    _DTYPES,
    MAGIC,
    Call,
    RecordedFile,
    Recording,
    Run,
    files_of,
    write_files,
)


def _recording(stored=True):
    tensors = [torch.ones(2, 3).to(dtype) for dtype in _DTYPES.values()]
    odd = [torch.tensor(1.5), torch.empty(0, 4), torch.tensor([math.nan, math.inf]), _strided()]
    return Recording(
        program="model.pte",
        files=(
            RecordedFile.of("model.pte", b"program", stored=stored),
            RecordedFile.of("w.ptd", b"", stored=stored),
        ),
        run=Run({"coreml": ("fp16",)}, "python", ("cpu_and_ne",)),
        machine={"system": "Darwin", "processor": None},
        versions={"coremltools": "9.0", "openvino": None},
        calls=(
            Call("forward", (*tensors, 3, True, None, "text", -0.1, math.inf), {"a": odd[0]}),
            Call("forward", tuple(odd), {}),
            Call("other", (), {"b": torch.tensor([True, False]), "c": None}),
        ),
        states={"forward": {"forward.0.total": torch.full((3,), 0.5, dtype=torch.float16)}},
    )


def _strided():
    return torch.arange(12.0).reshape(3, 4).T[::2]


def _bytes(recording):
    file = io.BytesIO()
    recording.write(file)
    return file.getvalue()


def _equal(one, other):
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and bool(((one == other) | ((one != one) & (other != other))).all())


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_written_is_read(stored):
    written = _recording(stored)
    read = Recording.read(_bytes(written))
    for name in ("program", "run", "machine", "versions", "methods"):
        assert getattr(read, name) == getattr(written, name)
    assert read.has_program is stored
    for one, other in zip(read.files, written.files, strict=True):
        assert replace(one, content=None) == replace(other, content=None)
        assert (one.content is not None) is stored
    for one, other in zip(read.calls, written.calls, strict=True):
        assert one.method == other.method
        assert list(one.outputs) == list(other.outputs)
        assert all(map(_equal, one.inputs, other.inputs))
        assert all(map(_equal, one.outputs.values(), other.outputs.values()))
    (state,) = read.states["forward"].values()
    assert _equal(state, written.states["forward"]["forward.0.total"])
    assert _bytes(read) == _bytes(written) == _bytes(_recording(stored))


def test_its_form_is_that_of_the_document():
    data = _bytes(_recording())
    size = int.from_bytes(data[8:16], "little")
    assert data[:8] == MAGIC == b"CMLRUN\0\1"
    header = json.loads(data[16 : 16 + size])
    assert list(header) == [
        *("program", "run", "machine", "versions", "calls", "states", "tensors"),
    ]
    assert data[16 + size :].endswith(b"program")
    assert header["tensors"][0] == {"dtype": "float64", "shape": [2, 3]}
    assert data[16 + size :][:48] == torch.ones(6, dtype=torch.float64).numpy().tobytes()


def test_files_are_written_where_they_were(tmp_path):
    folder = tmp_path / "a.mlpackage"
    (folder / "Data").mkdir(parents=True)
    (folder / "Manifest.json").write_bytes(b"{}")
    (folder / "Data" / "model").write_bytes(b"spec")
    (tmp_path / "w.ptd").write_bytes(b"weights")
    files = tuple(
        RecordedFile.of(path, content, stored=True)
        for path, content in files_of(folder, [tmp_path / "w.ptd"])
    )
    recording = Recording.read(_bytes(replace(_recording(), program=folder.name, files=files)))
    target = tmp_path / "copy"
    target.mkdir()
    program, (data,) = write_files(recording, target)
    assert program == target / "a.mlpackage"
    assert (program / "Data" / "model").read_bytes() == b"spec"
    assert (data.name, data.read_bytes()) == ("w.ptd", b"weights")
    with pytest.raises(ProgramError, match="two files have the same name"):
        list(files_of(folder, [tmp_path / "w.ptd", target / "w.ptd"]))


def _with_header(change):
    data = _bytes(_recording())
    size = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + size])
    change(header)
    changed = json.dumps(header).encode()
    return data[:8] + len(changed).to_bytes(8, "little") + changed + data[16 + size :]


def _rename(path):
    return lambda header: header["program"]["files"][0].update(path=path)


_TENSORS = {"dtype": "float32", "shape": [1 << 40]}
_DAMAGED = {
    "a longer tensor": (lambda h: h["tensors"].append(_TENSORS), "truncated"),
    "a negative size": (lambda h: h["tensors"].append({**_TENSORS, "shape": [-1]}), "no size"),
    "an impossible shape": (
        lambda h: h["tensors"].append({**_TENSORS, "shape": [0, 1 << 61, 1 << 61]}),
        "malformed",
    ),
    "an unknown dtype": (lambda h: h["tensors"][0].update(dtype="complex64"), "unknown dtype"),
    "a missing tensor": (lambda h: h["calls"][0]["inputs"].append({"tensor": 99}), "malformed"),
    "an unknown value": (lambda h: h["calls"][0]["inputs"].append({"code": "1"}), "malformed"),
    "a list for a value": (lambda h: h["calls"][0]["inputs"].append({"value": []}), "malformed"),
    "a state of text": (
        lambda h: h["states"]["forward"].update({"forward.0.total": {"value": "a"}}),
        "no tensor",
    ),
    "no program": (lambda h: h.pop("program"), "malformed"),
    "calls by name": (lambda h: h.update(calls={"a": 1}), "malformed"),
    "a path outside": (_rename("../model.pte"), "unsafe path"),
    "an absolute path": (_rename("/model.pte"), "unsafe path"),
    "a path of Windows": (_rename("a\\..\\model.pte"), "unsafe path"),
    "a drive": (_rename("C:model.pte"), "unsafe path"),
    "a program outside": (lambda h: h["program"].update(name=".."), "unsafe path"),
    "a file with another content": (
        lambda h: h["program"]["files"][0].update(sha256="0" * 64),
        "is damaged",
    ),
    "a shorter file": (lambda h: h["program"]["files"][0].update(size=6), "damaged"),
    "data without a name": (lambda h: h["program"]["files"].pop(0), "does not name"),
}


@pytest.mark.parametrize("damage", _DAMAGED)
def test_damaged_recordings_are_refused(damage):
    change, message = _DAMAGED[damage]
    with pytest.raises(BlobFormatError, match=message):
        Recording.read(_with_header(change))


def test_another_version_is_refused():
    with pytest.raises(BlobFormatError, match="recording of another version"):
        Recording.read(MAGIC[:-1] + b"\2" + _bytes(_recording())[8:])


def test_truths_that_are_none_are_refused():
    recording = replace(_recording(), calls=(Call("f", (torch.tensor([True]),), {}),), states={})
    data = bytearray(_bytes(replace(recording, files=())))
    assert data[-1] == 1
    data[-1] = 2
    with pytest.raises(BlobFormatError, match="neither 0 nor 1"):
        Recording.read(bytes(data))


@pytest.mark.parametrize("data", [b"", b"CMLRUN", b"PK\3\4" + bytes(99), MAGIC + b"\xff" * 8])
def test_other_bytes_are_refused(data):
    with pytest.raises(BlobFormatError, match=r"not a recording|truncated"):
        Recording.read(data)


def test_a_missing_file_is_refused():
    with pytest.raises(ProgramError, match="cannot read the recording"):
        Recording.read(Path("/nowhere.cmlrun"))


_BYTES = _bytes(_recording())


@pytest.mark.property
@given(st.data())
def test_damage_anywhere_raises_only_our_errors(data):
    damaged = bytearray(_BYTES[: data.draw(st.integers(0, len(_BYTES)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CoreMLDelegateError):
        Recording.read(bytes(damaged))
