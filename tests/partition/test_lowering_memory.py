"""Memory that lowering keeps, and objects of the caller's that it leaves unchanged."""

from __future__ import annotations

import gc
import mmap
import tempfile
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision
from executorch.exir import to_edge
from support.lowering import build_blob
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate import CoreMLBackend
from coreml_delegate.formats import blob
from coreml_delegate.formats.blob import Pieces, chunks_of, flatten, size_of, unflatten
from coreml_delegate.formats.files import write_folder
from coreml_delegate.formats.mlpackage import map_folder
from coreml_delegate.lowering import build, model_files
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.mil.passes.fp32_islands import overflows
from coreml_delegate.options.lowering_options import CompileOptions


def program() -> ExportedProgram:
    torch.manual_seed(0)
    layers = (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Hardswish(), nn.Linear(6, 5))
    return to_edge(
        torch.export.export(nn.Sequential(*layers).eval(), (torch.randn(1, 2, 8),))
    ).exported_program()


# Constants that do not fit into fp16

mb: Any = Builder


def op_with(value: Any) -> Any:
    """An op with a constant, which is one of several values of one argument."""

    kind = types.int32 if value.dtype == np.int32 else types.fp32

    @mb.program(input_specs=[mb.TensorSpec(value.shape or (1,), kind)])
    def made(x: Any) -> Any:
        return mb.concat(values=(x, value), axis=0) if value.shape else mb.add(x=x, y=value)

    (op,) = [op for op in made.functions["main"].operations if op.op_type in ("concat", "add")]
    return op


def in_second_chunk(value: float) -> np.ndarray[Any, Any]:
    values = np.ones((3, 2**19), np.float32)
    values[2, -1] = value
    return values.T  # not contiguous


LIMIT, INFINITE = np.float32(65504), np.float32(1e38)
VALUES = {
    "largest": LIMIT,
    "smallest": -LIMIT,
    "beyond": np.nextafter(LIMIT, np.float32(np.inf)),
    "far below": np.float32(-7e4),
    "large": np.nextafter(INFINITE, np.float32(0)),
    "as good as infinite": INFINITE,
    "most": np.finfo(np.float32).max,
    "infinite": np.float32(-np.inf),
    "not a number": np.float32(np.nan),
}
ARRAYS = {
    **VALUES,
    **{f"{name}, in an array": np.array([1, v, -np.inf], np.float32) for name, v in VALUES.items()},
    "in the second chunk": in_second_chunk(1e5),
    "nowhere": in_second_chunk(6e4),
    "integers": np.array([100000], np.int32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_overflow_check_agrees_with_coremltools(name: str) -> None:
    op = op_with(ARRAYS[name])
    assert overflows(op) is bool(FP16ComputePrecision.fp16_overflow(op))


def test_the_overflow_check_finds_values_in_any_chunk() -> None:
    assert overflows(op_with(ARRAYS["in the second chunk"]))
    assert not overflows(op_with(ARRAYS["nowhere"]))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_check_copies_no_constant(transposed: bool) -> None:
    value = np.ones((2**12, 2**12), np.float32)
    op = op_with(value.T if transposed else value)
    tracemalloc.start()
    try:
        assert not overflows(op)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < value.nbytes / 4


# What is shared with the caller


def test_the_copy_for_preprocess_has_the_same_tensors() -> None:
    edge = program()
    copied = CoreMLBackend.copy_exported_program_for_preprocess(edge, [])
    for theirs, ours in ((edge.state_dict, copied.state_dict), (edge.constants, copied.constants)):
        assert theirs is not ours
        assert theirs.keys() == ours.keys()
        assert all(ours[name] is value for name, value in theirs.items())
    assert copied.graph_module is not edge.graph_module
    before = str(edge.graph)
    build.build_files(copied, CompileOptions())
    assert str(edge.graph) == before


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_lowering_writes_into_no_tensor(precision: str) -> None:
    edge = program()
    held: dict[str, Any] = {**edge.state_dict, **edge.constants}
    before = {name: (value, value._version, value.clone()) for name, value in held.items()}
    specs = CompileOptions().to_specs()
    (spec,) = (each for each in specs if each.key == "model_compute_precision")
    spec.value = precision.encode()
    CoreMLBackend.preprocess(CoreMLBackend.copy_exported_program_for_preprocess(edge, specs), specs)
    for name, (value, version, content) in before.items():
        assert held[name] is value
        assert value._version == version
        assert torch.equal(value, content)


# What is held


def test_a_conversion_leaves_no_program_behind() -> None:
    edge = program()
    gc.collect()
    gc.disable()
    others = _programs()  # of other tests, held so that no new one takes the place of one
    try:
        build.build_files(edge, CompileOptions())
        assert all(any(each is other for other in others) for each in _programs())
    finally:
        gc.enable()


def _programs() -> list[Program]:
    return [each for each in gc.get_objects() if isinstance(each, Program)]


def test_large_files_stay_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = build_blob(program(), CompileOptions())
    monkeypatch.setattr(model_files, "_MAPPED", 64)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = build.build_files(program(), CompileOptions())
    assert not list(tmp_path.iterdir())
    (weights,) = (content for name, content in files.items() if name.endswith("weight.bin"))
    assert isinstance(weights, memoryview)
    assert isinstance(weights.obj, mmap.mmap)
    assert {type(c) for n, c in files.items() if n.endswith("json")} <= {bytes, memoryview}
    # Looked at in chunks that are let go of, and again.
    monkeypatch.setattr(blob, "_CHUNK", 100)
    files = with_handles(files, handles_of(program()))
    assert flatten(files) == expected
    assert flatten(files) == expected


def test_small_files_are_read(tmp_path: Path) -> None:
    write_folder({"a/small": b"12", "large": b"1234", "empty": b""}, tmp_path / "folder")
    files = map_folder(tmp_path / "folder", smallest=3)
    assert {name: bytes(content) for name, content in files.items()} == {
        "a/small": b"12",
        "empty": b"",
        "large": b"1234",
    }
    assert {name: isinstance(c.obj, mmap.mmap) for name, c in files.items()} == {
        "a/small": False,
        "empty": False,
        "large": True,
    }


def test_pieces_are_written_as_one_file(tmp_path: Path) -> None:
    words = memoryview(array("H", range(3)))
    pieces = Pieces((b"one", words, b"", bytearray(b"two")))
    whole = b"one" + words.tobytes() + b"two"
    assert size_of(pieces) == len(whole)
    assert b"".join(chunks_of(pieces)) == whole
    assert flatten({"a": b"0", "b": pieces}) == flatten({"a": b"0", "b": whole})
    assert bytes(unflatten(flatten({"b": pieces}))["b"]) == whole
    write_folder({"b": pieces}, tmp_path / "folder")
    assert (tmp_path / "folder" / "b").read_bytes() == whole
