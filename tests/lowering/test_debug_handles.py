"""Debug handles: which operations of a delegate come from which calls of the program."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torch import nn

from coreml_delegate import CoreMLBackend
from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.blob_layout import DEBUG_INFO, DebugInfo, debug_info_in
from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE
from coreml_delegate.lowering.store import FOLDER
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.targets import Opset


class Net(nn.Module):
    """Ops that stay, that are fused, that vanish, and one that becomes several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = nn.functional.hardswish(y.mean((2, 3)))
        return self.last(y.clone()).contiguous()


def lower(module: nn.Module, *inputs: torch.Tensor, **options: Any) -> EdgeProgramManager:
    exported = torch.export.export(module.eval(), inputs)
    return to_edge_transform_and_lower(
        exported, partitioner=[CoreMLPartitioner(**options)], generate_etrecord=True
    )


@functools.cache
def lowered_net() -> EdgeProgramManager:
    return lower(Net(), torch.randn(1, 3, 8, 8))


def handle_maps(edge: EdgeProgramManager) -> list[dict[str, tuple[int, ...]]]:
    graph = edge.exported_program().graph_module
    return [module.meta["debug_handle_map"] for _, module, _ in get_lowered_submodules(graph)]


def blobs(edge: EdgeProgramManager) -> list[bytes]:
    graph = edge.exported_program().graph_module
    return [module.processed_bytes for _, module, _ in get_lowered_submodules(graph)]


def targets_by_handle(edge: EdgeProgramManager) -> dict[int, set[str]]:
    """Names of the operators that the edge program calls, by debug handle."""
    record = edge._etrecord
    assert record is not None
    program = record.edge_dialect_program
    assert program is not None
    found: dict[int, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and "getitem" not in str(node.target):
            found.setdefault(node.meta["debug_handle"], set()).add(str(node.target).split(".")[1])
    return found


def test_every_call_is_found_again() -> None:
    edge = lowered_net()
    (handles,) = handle_maps(edge)
    calls = targets_by_handle(edge)
    listed = {handle for found in handles.values() for handle in found}
    assert listed == set(calls)
    of_operator: dict[str, set[str]] = {}
    for symbol, found in handles.items():
        names = {name for handle in found for name in calls[handle]}
        of_operator.setdefault(symbol.rsplit(":", 1)[-1], set()).update(names)
    assert {"conv2d", "_native_batch_norm_legit_no_training"} <= of_operator["conv"]
    assert of_operator["relu"] == {"relu"}
    assert "linear" in of_operator["linear"]
    assert of_operator["reduce_mean"] == {"mean"}


def test_a_call_that_becomes_several_operations_names_each() -> None:
    (handles,) = handle_maps(edge := lowered_net())
    calls = targets_by_handle(edge)
    (hardswish,) = (handle for handle, names in calls.items() if "hardswish" in names)
    operators = {s.rsplit(":", 1)[-1] for s, found in handles.items() if hardswish in found}
    assert {"sigmoid_hard", "mul"} <= operators


def test_symbols_are_operations_of_the_model() -> None:
    edge = lowered_net()
    ((handles,), (blob,)) = handle_maps(edge), blobs(edge)
    program, _ = read_blob(blob)
    operations = {f"{op.outputs[0].name}:{op.type}" for op in program.function().block.ops}
    assert set(handles) <= operations
    info = debug_info_in(unflatten(blob))
    assert info is not None
    assert {symbol: tuple(found) for symbol, found in info.handles.items()} == handles
    assert info.with_value.keys() <= handles.keys()
    for symbol, path in info.paths.items():
        assert [step["Type"] for step in path] == ["Program", "Function", "Block", "Operation"]
        assert f"{path[-1]['Output']}:{path[-1]['Operator']}" == symbol
        assert path[1]["Name"] == "main"


def test_last_handle_is_that_of_the_value() -> None:
    edge = lowered_net()
    ((handles,), (blob,)) = handle_maps(edge), blobs(edge)
    info = debug_info_in(unflatten(blob))
    assert info is not None
    calls = targets_by_handle(edge)
    conv = next(symbol for symbol in handles if symbol.endswith(":conv"))
    assert "_native_batch_norm_legit_no_training" in calls[handles[conv][-1]]
    # Its statistics are empty results.
    assert info.with_value[conv] == 3
    relu = next(symbol for symbol in handles if symbol.endswith(":relu"))
    assert info.with_value[relu] == 1


def test_each_delegate_has_its_own_handles() -> None:
    edge = lower(Net(), torch.randn(1, 3, 8, 8), skip_ops_for_coreml_delegation=["aten.relu"])
    first, second = handle_maps(edge)
    calls = targets_by_handle(edge)
    (relu,) = (handle for handle, names in calls.items() if names == {"relu"})
    one, other = ({h for found in each.values() for h in found} for each in (first, second))
    assert not one & other
    assert one | other == set(calls) - {relu}


def test_a_kept_conversion_has_the_handles_of_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)

    class Behind(nn.Module):
        """The same subgraph beside calls that stay on the CPU and have the handles before it."""

        def __init__(self, before: int) -> None:
            super().__init__()
            self.before = before
            self.net = Net()

        def forward(self, z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for _ in range(self.before):
                z = torch.tan(z)
            return z, self.net(x)

    options = {"skip_ops_for_coreml_delegation": ["aten.tan"]}
    maps = [
        handle_maps(lower(Behind(count), torch.ones(2), torch.randn(1, 3, 8, 8), **options))[0]
        for count in (1, 3, 3)
    ]
    assert maps[0].keys() == maps[1].keys()
    shifted = {symbol: tuple(h + 2 for h in found) for symbol, found in maps[0].items()}
    assert maps[1] == maps[2] == shifted
    assert len([path for path in (tmp_path / FOLDER).rglob("*") if path.is_file()]) == 1


def test_functions_of_one_model_have_their_own_symbols() -> None:
    class Methods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.shared(x))

    shared = Methods().eval()
    methods = {
        name: torch.export.export(shared, (torch.randn(rows, 64),))
        for name, rows in (("one", 1), ("many", 8))
    }
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs)
    edge = to_edge_transform_and_lower(methods, partitioner=[partitioner])
    maps = {}
    for name in methods:
        graph = edge.exported_program(name).graph_module
        ((_, module, _),) = get_lowered_submodules(graph)
        maps[name] = module.meta["debug_handle_map"]
        (stored,) = module.named_data_store_output.pte_data.values()
        data = module.named_data_store_output.buffers[stored.buffer_index]
    info = debug_info_in(unflatten(data))
    assert info is not None
    for name, found in maps.items():
        assert found
        assert all(symbol.startswith(f"{name}:") for symbol in found)
        assert all(info.paths[symbol][1]["Name"] == name for symbol in found)
    assert set(info.handles) == {symbol for found in maps.values() for symbol in found}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"debugSymbolToHandles": 1, "debugSymbolToOperationPath": {}}'],
)
def test_malformed_debug_info_is_an_error(content: bytes) -> None:
    with pytest.raises(BlobFormatError, match=DEBUG_INFO):
        DebugInfo.decode(content)


# Both backends have one name, so this runs in a process of its own.
_UPSTREAM = """
import copy, json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from executorch.backends.apple.coreml.compiler import CoreMLBackend
from executorch.exir import to_edge
from executorch.exir.passes.debug_handle_generator_pass import generate_missing_debug_handles
sys.path[:0] = {paths!r}
from tests.lowering.test_debug_handles import Net
exported = torch.export.export(Net().eval(), (torch.randn(1, 3, 8, 8),))
edge = to_edge(exported).exported_program()
mine = copy.deepcopy(edge)
theirs = CoreMLBackend.preprocess(edge, []).debug_handle_map
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.lowering.build import build_files
from coreml_delegate.lowering.model_files import result_of
handles = handles_of(mine)
ours = result_of(with_handles(build_files(mine, CompileOptions()), handles)).debug_handle_map
print(json.dumps([theirs, ours]))
"""


@pytest.mark.slow
def test_handles_are_those_of_executorchs_own_backend() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _UPSTREAM.format(paths=sys.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    theirs, ours = json.loads(finished.stdout.splitlines()[-1])
    by_operator = [_by_operator(found) for found in (theirs, ours)]
    # Of several calls that became one operation, ExecuTorch's own knows the last.
    # It lists constants too, which take no time.
    assert len(by_operator[0].keys() - {"const"}) >= 5
    for operator in by_operator[0].keys() - {"const"}:
        assert by_operator[0][operator] <= by_operator[1][operator], operator


def _by_operator(handles: Mapping[str, list[int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for symbol, listed in handles.items():
        found.setdefault(symbol.rsplit(":", 1)[-1], set()).update(listed)
    return found
