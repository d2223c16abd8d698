"""Unchanged subgraphs are read from the cache of conversions; changed ones are converted."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.failing_conversions import counted
from support.lowering import fp32_specs, lower
from support.partitioned import assert_equal_eager
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE, CacheOptions, EntryCache
from coreml_delegate.lowering import store
from coreml_delegate.lowering.store import FOLDER, ConversionCacheEntry
from coreml_delegate.options.compile_specs import KeepFp32
from coreml_delegate.options.lowering_options import CompileOptions

INPUTS = (torch.linspace(-1, 1, 8).reshape(2, 4),)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    return tmp_path / FOLDER


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    return counted(monkeypatch)


class Layers(nn.Module):
    """Two linear layers in partitions of their own: Core ML has no asinh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.asinh(self.first(x)))


def _entries(folder: Path) -> list[Path]:
    return [file.path for file in EntryCache(CacheOptions(folder)).files()]


def test_an_unchanged_model_is_not_converted_again(folder: Path, counts: Any) -> None:
    first = lower(Layers(), INPUTS).pte
    made = counts["mlprogram"]
    assert made == len(_entries(folder)) == 2
    again = lower(Layers(), INPUTS)
    assert counts["mlprogram"] == made
    assert again.pte == first
    assert_equal_eager(again.pte, Layers(), INPUTS)


def test_of_a_changed_layer_only_its_partition_is_converted(counts: Any) -> None:
    lower(Layers(), INPUTS)
    changed = Layers()
    with torch.no_grad():
        changed.last.bias[1] += 1
    made = counts["mlprogram"]
    lowered = lower(changed, INPUTS)
    assert counts["mlprogram"] == made + 1
    assert_equal_eager(lowered.pte, changed, INPUTS)


@pytest.mark.slow
def test_another_process_finds_what_this_one_has_made(folder: Path) -> None:
    first = lower(Layers(), INPUTS).pte
    code = (
        "import sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from lowering.test_store import INPUTS, Layers\n"
        "from coreml_delegate import ops\n"
        "from coreml_delegate.lowering import build\n"
        # As the fixture operators_on_the_cpu does in this process.
        "ops.RECORDS = {name: r for name, r in ops.RECORDS.items() if 'asinh' not in name}\n"
        "build.convert_program = None\n"
        "from support.lowering import lower\n"
        "sys.stdout.buffer.write(lower(Layers(), INPUTS).pte)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == first
    assert len(_entries(folder)) == 2


def _key(
    module: nn.Module | None = None,
    dims: Any = None,
    change: Callable[[Any], object] = lambda program: None,
    **options: Any,
) -> bytes | None:
    program = torch.export.export(module or Layers(), INPUTS, dynamic_shapes=dims)
    change(program)
    place = ConversionCacheEntry.of(program, CompileOptions(**options))
    return None if place is None else place.key


def _rows(low: int, high: int) -> Any:
    return ({0: torch.export.Dim("rows", min=low, max=high)},)


class Renamed(Layers):
    """The same calls in a module of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(super().forward(x))


def test_equal_subgraphs_have_one_key() -> None:
    assert _key() == _key()
    assert _key(dims=_rows(2, 5)) == _key(dims=_rows(2, 5))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"keep_fp32": KeepFp32(ops=("linear",))}),
        ({}, {"dims": _rows(2, 5)}),
        ({"dims": _rows(1, 5)}, {"dims": _rows(2, 5)}),
        ({"dims": _rows(2, 5)}, {"dims": _rows(2, 6)}),
        (
            {"keep_fp32": KeepFp32(modules=("inner",)), "module": Renamed()},
            {"keep_fp32": KeepFp32(modules=("first",)), "module": Renamed()},
        ),
    ],
)
def test_whatever_a_conversion_reads_is_in_the_key(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert _key(**one) != _key(**other)


def test_the_module_of_a_call_is_in_the_key_if_it_decides_its_precision() -> None:
    def move(program: Any) -> None:
        for node in program.graph.nodes:
            if "nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = {"": ("elsewhere", nn.Tanh)}

    assert _key(change=move) == _key()
    keep = KeepFp32(modules=("inner",))
    assert _key(Renamed(), change=move, keep_fp32=keep) != _key(Renamed(), keep_fp32=keep)


def test_sources_and_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    store.toolchain.cache_clear()
    monkeypatch.setattr(store, "software", lambda *names: dict.fromkeys(names, "another"))
    try:
        assert _key() != before
    finally:
        monkeypatch.undo()
        store.toolchain.cache_clear()


def test_nothing_is_kept_where_a_user_translates_ops(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from coremltools.converters.mil.frontend.torch import torch_op_registry

    registry = torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping
    monkeypatch.setitem(registry, "my_op", lambda context, node: None)
    assert _key() is None
    lower(Layers(), INPUTS)
    assert _entries(folder) == []


def test_nothing_is_kept_if_the_cache_is_off(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "off")
    lower(Layers(), INPUTS)
    assert not folder.exists()


def test_constants_beyond_the_limit_are_not_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "100")
    assert _key() is None


def test_a_damaged_entry_is_made_again(
    folder: Path, counts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = lower(Layers(), INPUTS).pte
    whole = {path: path.read_bytes() for path in _entries(folder)}
    for path, content in whole.items():
        path.write_bytes(content[:5000] + bytes(8) + content[5008:])
    with caplog.at_level(logging.WARNING):
        assert lower(Layers(), INPUTS).pte == first
    assert counts["mlprogram"] == 4
    assert "its checksum is wrong" in caplog.text
    assert {path: path.read_bytes() for path in _entries(folder)} == whole


def test_a_partition_that_fails_is_not_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from coreml_delegate.lowering import build

    def fail(*_: Any, **_keywords: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "convert_program", fail)
    with pytest.raises(OSError, match="No space left"):
        lower(Layers(), INPUTS)
    assert _entries(folder) == []


def test_enumerated_shapes_are_kept(folder: Path, counts: Any) -> None:
    def export() -> bytes:
        program = torch.export.export(nn.Linear(4, 3).eval(), INPUTS, dynamic_shapes=_rows(2, 5))
        shapes = {"input": [[2, 4], [5, 4]]}
        specs = fp32_specs()
        specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(program, shapes))
        edge = to_edge_transform_and_lower(
            program, partitioner=[CoreMLPartitioner(compile_specs=specs)]
        )
        return edge.to_executorch().buffer

    torch.manual_seed(0)
    first = export()
    torch.manual_seed(0)
    assert export() == first
    assert counts["mlprogram"] == 1
