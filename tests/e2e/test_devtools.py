"""ExecuTorch's Inspector on programs with delegates: times, module hierarchy, values, faults."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.devtools import Inspector as UpstreamInspector
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from support.tolerances import SQNR_FP16
from support.torchvision_models import build
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph

from coreml_delegate import runtime
from coreml_delegate.errors import CoreMLDelegateError, ExecutionError, OptionError, ProgramError
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.runtime.devtools import Inspector, read_etrecord

_BUFFER = 2**27


class Encoder(nn.Module):
    """A stem, a transformer block and a head; the activation may be left to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(nn.functional.gelu(self.stem(x))))


class Decoder(nn.Module):
    """A step of a decoder that keeps rows in a buffer, and returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(8, 8)
        self.write = nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(1, 4, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.copy_(torch.cat((self.rows[:, 1:], self.read(x)), 1))
        weights = torch.softmax(x @ self.rows.transpose(1, 2), -1)
        return self.write(weights @ self.rows), weights


@dataclass
class Case:
    """A lowered model: the files, and what it was called with."""

    pte: Path
    record: Path
    inputs: list[torch.Tensor]


def lower(model: nn.Module, inputs: Sequence[torch.Tensor], folder: Path, **options: Any) -> Case:
    exported = torch.export.export(model.eval(), tuple(inputs))
    return lower_exported(exported, inputs, folder, **options)


def lower_exported(
    exported: ExportedProgram, inputs: Sequence[torch.Tensor], folder: Path, **options: Any
) -> Case:
    partitioner = CoreMLPartitioner(**options)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], generate_etrecord=True)
    program = edge.to_executorch()
    case = Case(folder / "model.pte", folder / "model.etrecord", list(inputs))
    case.pte.write_bytes(program.buffer)
    record = program.get_etrecord()
    record.update_representative_inputs(case.inputs)
    case.record.unlink(missing_ok=True)
    record.save(str(case.record))
    return case


def observe(
    case: Case,
    folder: Path,
    *,
    host: str = "python",
    engine: str = "openvino",
    values: int = _BUFFER,
) -> Inspector:
    program = runtime.load_program(
        case.pte, host=host, engine=engine, enable_etdump=True, debug_buffer_size=values
    )
    program.run("forward", case.inputs)
    etdump, buffer = folder / "model.etdump", folder / "model.values"
    program.write_etdump_result_to_file(etdump, buffer)
    return Inspector(
        etdump_path=str(etdump), etrecord=str(case.record), debug_buffer_path=str(buffer)
    )


def gaps(inspector: Any, metric: str = "SNR") -> dict[tuple[str, ...], float]:
    """The gap of each operation by the names of its calls; not of zeros, whose ratio is NaN."""
    table = inspector.calculate_numeric_gap(metric)
    found = {tuple(row.aot_ops): float(row.gap[0]) for row in table.itertuples()}
    return {calls: gap for calls, gap in found.items() if not math.isnan(gap)}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return lower(Encoder(), [torch.randn(1, 3, 8)], tmp_path_factory.mktemp("encoder"))


@pytest.mark.share(2)
@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("engine", ["openvino", "reference"])
def test_rows_have_times_and_modules(host: str, engine: str, encoder: Case, tmp_path: Path) -> None:
    inspector = observe(encoder, tmp_path, host=host, engine=engine, values=0)
    (block,) = (block for block in inspector.event_blocks if block.name == "Execute")
    ops = [event for event in block.events if event.delegate_debug_identifier is not None]
    (call,) = (event for event in block.events if event.name == "DELEGATE_CALL")
    assert call.delegate_backend_name == "CoreMLBackend"
    linear = [event for event in ops if "aten.linear.default" in event.op_types]
    modules = {
        path for event in linear for stack in event.module_hierarchy.values() for path in stack
    }
    assert any("stem" in path for path in modules)
    assert any("block" in path for path in modules)
    times = [event.perf_data.raw[0] for event in ops]
    assert all(time >= 0 for time in times)
    assert sum(time > 0 for time in times) >= 3
    assert sum(times) <= call.perf_data.raw[0]
    starts = [event.start_time[0] for event in ops]
    assert min(starts) >= call.start_time[0]
    assert inspector.find_total_for_module("block") > 0


@pytest.mark.share(2)
@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("engine", ["openvino", "reference"])
def test_values_are_those_of_the_model(
    host: str, engine: str, encoder: Case, tmp_path: Path
) -> None:
    inspector = observe(encoder, tmp_path, host=host, engine=engine)
    found = gaps(inspector)
    assert len(found) >= 20
    assert {("linear",), ("gelu",), ("scaled_dot_product_attention",)} <= found.keys()
    assert min(found.values()) > SQNR_FP16
    assert all(value < 1 for value in gaps(inspector, "MSE").values())
    assert all(value < 10 for value in gaps(inspector, "L1").values())


def test_values_are_those_of_the_model_where_ids_of_graphs_are_used_again(
    encoder: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = torch.export.export(Encoder().eval(), tuple(encoder.inputs))
    graphs: list[Graph] = [exported.graph]

    def reused_id(graph: Graph) -> int:
        """As if each graph that lowering makes were freed before the next but one is made."""
        if not any(graph is known for known in graphs):
            graphs.append(graph)
        number = next(n for n, known in enumerate(graphs) if known is graph)
        return id(graphs[number if number < 3 else 2 - number % 2])

    monkeypatch.setattr("torch.fx.traceback.id", reused_id, raising=False)
    found = gaps(observe(lower_exported(exported, encoder.inputs, tmp_path), tmp_path))
    assert len(graphs) > 3
    assert found.keys() == gaps(observe(encoder, tmp_path)).keys()
    assert min(found.values()) > SQNR_FP16


@pytest.mark.share(2)
@pytest.mark.parametrize("host", ["python", "stock"])
def test_several_delegates_with_operators_between(host: str, tmp_path: Path) -> None:
    options = {"skip_ops_for_coreml_delegation": ["aten.gelu"]}
    case = lower(Encoder(), [torch.randn(1, 3, 8)], tmp_path, **options)
    found = gaps(observe(case, tmp_path, host=host))
    assert {("linear",), ("gelu",), ("linear_5",)} <= found.keys()
    assert min(found.values()) > SQNR_FP16


@pytest.mark.share(2)
@pytest.mark.parametrize("host", ["python", "stock"])
def test_a_decoder_with_a_state_and_several_outputs(host: str, tmp_path: Path) -> None:
    case = lower(Decoder(), [torch.randn(1, 1, 8)], tmp_path)
    found = gaps(observe(case, tmp_path, host=host))
    assert {("linear",), ("softmax",), ("linear_1",)} <= found.keys()
    assert min(found.values()) > SQNR_FP16


@pytest.mark.filterwarnings("ignore")
def test_executorchs_own_inspector_takes_delegates_of_one_output(
    encoder: Case, tmp_path: Path
) -> None:
    program = Runtime.get().load_program(
        encoder.pte.read_bytes(), enable_etdump=True, debug_buffer_size=_BUFFER
    )
    runtime.register(engine="openvino")
    program.load_method("forward").execute(encoder.inputs)
    etdump, buffer = str(tmp_path / "etdump"), str(tmp_path / "values")
    program.write_etdump_result_to_file(etdump, buffer)
    inspector = UpstreamInspector(
        etdump_path=etdump, etrecord=str(encoder.record), debug_buffer_path=buffer
    )
    assert min(gaps(inspector).values()) > SQNR_FP16


def _with_a_fault(model: nn.Module, layer: str) -> nn.Module:
    faulty = copy.deepcopy(model)
    with torch.no_grad():
        faulty.get_submodule(layer).weight.mul_(-1)
    return faulty


def _check_that_the_fault_is_found(case: Case, call: str, folder: Path) -> None:
    found = gaps(observe(case, folder, values=2**30))
    (position,) = (place for place, calls in enumerate(found) if call in calls)
    before, at = list(found.values())[:position], list(found.values())[position]
    assert at < 10
    assert all(value > SQNR_FP16 for value in before)


def test_a_fault_in_a_layer_is_found(encoder: Case, tmp_path: Path) -> None:
    torch.manual_seed(1)
    faulty = lower(_with_a_fault(Encoder(), "block.linear2"), encoder.inputs, tmp_path)
    _check_that_the_fault_is_found(
        Case(faulty.pte, encoder.record, encoder.inputs), "linear_4", tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer", "call"),
    [
        ("mobilenet_v2", "features.10.conv.0.0", "conv2d_27"),
        ("vit_b_16", "encoder.layers.encoder_layer_6.mlp.3", "linear_27"),
    ],
)
def test_faults_in_large_models(name: str, layer: str, call: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = build(name, 224)
    inputs = [x]
    case = lower(model, inputs, tmp_path)
    assert min(gaps(observe(case, tmp_path, values=2**30)).values()) > 20
    (tmp_path / "faulty").mkdir()
    faulty = lower(_with_a_fault(model, layer), inputs, tmp_path / "faulty")
    _check_that_the_fault_is_found(Case(faulty.pte, case.record, inputs), call, tmp_path)


@pytest.mark.parametrize("host", ["python", "stock"])
def test_a_debug_buffer_that_is_too_small_is_an_error(
    host: str, encoder: Case, tmp_path: Path
) -> None:
    with pytest.raises(ExecutionError, match="larger debug_buffer_size"):
        observe(encoder, tmp_path, host=host, values=64)
    assert not list(tmp_path.iterdir())


def test_the_stock_host_refuses_what_its_runtime_would_not_survive(
    encoder: Case, tmp_path: Path
) -> None:
    def load(path: Path) -> Any:
        return runtime.load_program(
            path, host="stock", enable_etdump=True, debug_buffer_size=_BUFFER
        )

    program = load(encoder.pte)
    program.run("forward", encoder.inputs)
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        program.write_etdump_result_to_file(file)
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(OptionError, match="have been written"):
        program.run("forward", encoder.inputs)
    half = lower(nn.ReLU(), [torch.randn(4).half()], tmp_path)
    with pytest.raises(OptionError, match=r"tensors of torch\.float16"):
        load(half.pte).run("forward", half.inputs)


@pytest.mark.parametrize("host", ["python", "stock"])
def test_events_are_collected_on_request_only(host: str, encoder: Case, tmp_path: Path) -> None:
    program = runtime.load_program(encoder.pte, host=host)
    program.run("forward", encoder.inputs)
    with pytest.raises(OptionError, match="enable_etdump"):
        program.write_etdump_result_to_file(tmp_path / "etdump")
    with pytest.raises(OptionError, match="enable_etdump"):
        runtime.load_program(encoder.pte, host=host, debug_buffer_size=1)
    traced = runtime.load_program(encoder.pte, host=host, enable_etdump=True)
    traced.run("forward", encoder.inputs)
    with pytest.raises(OSError, match="nowhere"):
        traced.write_etdump_result_to_file(tmp_path / "nowhere" / "etdump")


def test_other_files_are_no_etrecord(encoder: Case) -> None:
    with pytest.raises(ProgramError, match="is no ETRecord"):
        read_etrecord(encoder.pte)
    assert issubclass(ProgramError, CoreMLDelegateError)
