"""Programs that keep tensors and delegates' weights in ``.ptd`` files, on both hosts."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.extension.flat_tensor.serialize.serialize import (
    FlatTensorConfig,
    FlatTensorSerializer,
)
from support.lowering import fp32_specs
from support.multimethod import specs, two
from support.partitioned import ATOL, RTOL, Network, example

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import BlobFormatError, OptionError, ProgramError
from coreml_delegate.runtime.program.ptd import read_external_data
from coreml_delegate.scripts.cli import main

HOSTS = ("python", "stock")
INPUTS = example(2, 4)


def written(manager: Any, folder: Path) -> list[Path]:
    _ = manager.buffer
    manager.write_tensor_data_to_file(str(folder))
    return sorted(folder.glob("*.ptd"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("external")


@pytest.fixture(scope="module")
def files(folder: Path) -> tuple[Path, Path]:
    """A program whose weights are passed to its delegates, and its ``.ptd``."""
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), take_over_constant_data=False)
    exported = torch.export.export(Network().eval(), INPUTS)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    manager = edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda _: "weights"))
    path = folder / "model.pte"
    path.write_bytes(manager.buffer)
    (data,) = written(manager, folder)
    return path, data


def assert_runs(program: Any) -> None:
    (actual,) = program.run("forward", list(INPUTS))
    torch.testing.assert_close(actual, Network()(*INPUTS), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("host", HOSTS)
def test_from_paths_and_bytes(files: tuple[Path, Path], host: str) -> None:
    pte, ptd = files
    for data in (ptd, str(ptd), ptd.read_bytes(), [ptd]):
        assert_runs(runtime.load_program(pte, data=data, host=host))
    assert_runs(runtime.load_program(pte.read_bytes(), data=ptd, host=host))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (None, ProgramError, r"keeps 4 tensor\(s\) outside the .pte: got first.weight \(no data"),
        (lambda _: b"", BlobFormatError, "not a file of external data: got file identifier b''"),
        (lambda d: d[:200], BlobFormatError, "external data is truncated"),
        (lambda d: d[:8] + b"XXXX" + d[12:], BlobFormatError, "external data lacks its header"),
    ],
)
def test_missing_and_bad_data(
    files: tuple[Path, Path], host: str, change: Any, error: type[Exception], message: str
) -> None:
    pte, ptd = files
    data = None if change is None else change(ptd.read_bytes())
    with pytest.raises(error, match=message):
        runtime.load_program(pte, data=data, host=host)


def rewritten(entries: Mapping[str, memoryview]) -> bytes:
    """A ``.ptd`` with these entries, by ExecuTorch's own writer."""
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload

    payload = DataPayload(
        buffers=[bytes(data) for data in entries.values()],
        named_data={key: DataEntry(i, 1, None) for i, key in enumerate(entries)},
    )
    return bytes(FlatTensorSerializer(FlatTensorConfig()).serialize(payload))


@pytest.mark.parametrize("host", HOSTS)
def test_data_of_another_program(files: tuple[Path, Path], host: str) -> None:
    pte, ptd = files
    entries = read_external_data(ptd)
    short = entries | {"first.weight": entries["first.weight"][:8]}
    del short["second.bias"]
    with pytest.raises(ProgramError) as raised:
        runtime.load_program(pte, data=rewritten(short), host=host)
    assert str(raised.value) == (
        "the program keeps 2 tensor(s) outside the .pte that are not in its external data: "
        "got first.weight (8 bytes for float32[4, 4]), second.bias (no data for float32[3]). "
        "Pass the .ptd files that were written with this .pte as data (--data)"
    )


def test_several_files(files: tuple[Path, Path]) -> None:
    pte, ptd = files
    data = read_external_data(ptd)
    halves = [rewritten({key: data[key] for key in list(data)[part::2]}) for part in range(2)]
    assert_runs(runtime.load_program(pte, data=halves))
    with pytest.raises(OptionError, match=r"takes one file of external data: got 2\. Use host="):
        runtime.load_program(pte, data=halves, host="stock")
    other = rewritten({"first.bias": memoryview(bytes(16))})
    with pytest.raises(ProgramError, match=r"disagree: got two values of 'first.bias', one in <b"):
        runtime.load_program(pte, data=[ptd, other])


def test_damage_is_noticed_or_harmless(files: tuple[Path, Path]) -> None:
    content = files[1].read_bytes()
    damaged = [content[:end] for end in range(0, len(content), 7)]
    for position in range(0, 400, 3):
        flipped = bytearray(content)
        flipped[position] ^= 0xFF
        damaged.append(bytes(flipped))
    for data in damaged:
        with contextlib.suppress(BlobFormatError):
            read_external_data(data)


def test_no_such_file(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"cannot read external data: .* expected a .ptd file"):
        runtime.load_program(files[0], data=tmp_path / "none.ptd")


@functools.cache
def shared_model() -> Any:
    """Two methods whose model is in the program's named data."""
    programs = {
        name: torch.export.export(module.eval(), inputs)
        for name, (module, inputs) in two(features=32).items()
    }
    partitioner = CoreMLPartitioner(compile_specs=specs("POSITIONAL"))
    edge = to_edge_transform_and_lower(programs, partitioner=[partitioner])
    edge._named_data_store.externalize_pte_data(1 << 30, "weights")
    return edge.to_executorch()


@pytest.mark.parametrize("host", HOSTS)
def test_models_of_delegates_outside(host: str, tmp_path: Path) -> None:
    manager = shared_model()
    pte = manager.buffer
    (ptd,) = written(manager, tmp_path)
    assert len(pte) < ptd.stat().st_size
    program = runtime.load_program(pte, data=ptd, host=host)
    for name, (module, inputs) in two(features=32).items():
        (actual,) = program.run(name, list(inputs))
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)
    with pytest.raises(BlobFormatError, match=r"data the program does not have: .* Pass the .ptd"):
        runtime.load_program(pte, host=host).load_method("decode")


def test_commands(
    files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pte, ptd = map(str, files)
    for host in HOSTS:
        assert main(["run", pte, "--data", ptd, "--host", host, "--repeat", "1", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["outputs"][0]["shape"] == [2, 3]
    assert main(["inspect", pte, "--data", ptd, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["external_tensors"][0] == "first.weight"
    torch.save(INPUTS, tmp_path / "inputs.pt")
    data = ["--calibration", str(tmp_path / "inputs.pt")]
    assert main(["check", pte, "--data", ptd, *data, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["runs"], document["precision"][0]["holds"]) == (2, True)
    assert main(["run", pte]) == 1
    assert "keeps 4 tensor(s) outside the .pte" in capfd.readouterr().err
