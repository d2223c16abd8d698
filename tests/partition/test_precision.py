"""Precision ``auto``: calls in fp32 by measurement, in Python, recipes and on the command line."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner
from executorch.export import ExportRecipe, export
from support.cli_models import Choice, Exponentials, exponentials
from support.lowering import Lowered, lower_unchecked
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db
from torch.export import ExportedProgram

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, backend, runtime
from coreml_delegate.errors import InputError, OptionError, PrecisionError
from coreml_delegate.lowering import build
from coreml_delegate.lowering.build import build_files
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition import PrecisionReport
from coreml_delegate.partition.precision import calls_by_handle
from coreml_delegate.recipes import CoreMLRecipeType
from coreml_delegate.runtime.precision import Operation, PrecisionMeasurement
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main

MODEL = "support.cli_models:exponentials"
AUTO = CoreMLBackend.generate_compile_specs(compute_precision="auto")


def _worst(pte: bytes, module: torch.nn.Module, inputs: tuple[Any, ...]) -> float:
    program = runtime.load_program(pte, host="python", engine="reference")
    got = program.run("forward", list(inputs))
    with torch.no_grad():
        want = module(*inputs)
    return min(sqnr_db(w.numpy(), g.numpy()) for w, g in zip(want, got, strict=True))


def _lowered(**options: Any) -> tuple[Lowered, torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = exponentials()
    return lower_unchecked(module, (inputs,), compile_specs=AUTO, **options), module, (inputs,)


def _precision(lowered: Lowered) -> PrecisionReport:
    assert lowered.report.precision is not None
    return lowered.report.precision


def _specs(pte: bytes) -> CompileOptions:
    (delegate,) = PteProgram.open(pte).methods[0].delegates
    return CompileOptions.from_pairs(delegate.compile_specs)


def test_calls_that_overflow_compute_in_fp32() -> None:
    lowered, module, inputs = _lowered()
    precision = _precision(lowered)
    assert precision.before_db == -math.inf
    assert precision.after_db >= precision.target_db
    assert "aten_sum_dim_int_list" in precision.in_fp32
    assert "aten_linear_default" not in precision.in_fp32
    assert 0 < precision.share < 0.5
    assert _worst(lowered.pte, module, inputs) >= SQNR_FP16_GUARDED
    # A device reads fp16, and which calls are in fp32 is part of the compile specs.
    specs = _specs(lowered.pte)
    assert specs.precision is Precision.FLOAT16
    assert set(specs.keep_fp32.nodes) == precision.in_fp32


def test_equal_models_and_inputs_give_equal_bytes() -> None:
    first, second = (hashlib.sha256(_lowered()[0].pte).digest() for _ in range(2))
    assert first == second


def test_the_samples_decide() -> None:
    small = [(torch.full((2, 16), -0.01) * 0,)]
    module, example = exponentials()
    with torch.no_grad():
        module.linear.bias.fill_(-9)
    lowered = lower_unchecked(module, (example,), compile_specs=AUTO, precision_data=small)
    assert _precision(lowered).islands == ()
    assert _precision(lowered).is_minimal


def test_options_of_a_measurement_need_precision_auto() -> None:
    with pytest.raises(OptionError, match="precision_data is for precision auto"):
        CoreMLPartitioner(precision_data=[(torch.zeros(1),)])


def test_a_sample_with_another_number_of_inputs_is_refused() -> None:
    with pytest.raises(InputError, match="wrong number of inputs: got 2, expected 1"):
        _lowered(precision_data=[(torch.zeros(2, 16), torch.zeros(1))])


def test_a_decomposed_program_cannot_be_measured() -> None:
    exported = torch.export.export(Exponentials().eval(), (torch.zeros(2, 16),))
    with pytest.raises(OptionError, match="before it is decomposed"):
        to_edge(exported).to_backend(CoreMLPartitioner(compile_specs=AUTO))


def _lower(
    programs: ExportedProgram | dict[str, ExportedProgram],
    partitioner: CoreMLPartitioner,
    *others: Partitioner,
) -> bytes:
    config = EdgeCompileConfig(_check_ir_validity=False)
    partitioners: list[Partitioner] = [partitioner, *others]
    edge = to_edge_transform_and_lower(programs, partitioner=partitioners, compile_config=config)
    return bytes(edge.to_executorch().buffer)


def test_a_program_without_islands_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[bool] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        conversions.append(True)
        return build_files(*arguments, **keywords)

    monkeypatch.setattr(build, "build_files", counted)
    monkeypatch.setattr(backend, "build_files", counted)
    module = torch.nn.Linear(16, 4).eval()
    lowered = lower_unchecked(module, (torch.randn(2, 16),), compile_specs=AUTO)
    assert _precision(lowered).islands == ()
    assert len(conversions) == 1
    _lowered()  # once in fp16, and once with islands
    assert len(conversions) == 3


class Centred(torch.nn.Module):
    """A product in which nearly equal weights cancel, so that their rounding is what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(1 + torch.randn(64, 64) * 1e-3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x - x.mean(-1, keepdim=True)) @ self.weight,)


@pytest.mark.parametrize("is_planned", [False, True])
def test_rounding_of_weights_is_measured(is_planned: bool) -> None:
    torch.manual_seed(0)
    module, x = Centred().eval(), torch.randn(4, 64)
    partitioner = CoreMLPartitioner(compile_specs=AUTO)
    program = torch.export.export(module, (x,))
    if is_planned:  # converts the same partition, without the weights in fp32
        partitioner.plan(program)
    pte = _lower(program, partitioner)
    precision = partitioner.report.precision
    assert precision is not None
    assert precision.in_fp32 == {"aten_matmul_default"}
    plain = CoreMLPartitioner(compile_specs=CoreMLBackend.generate_compile_specs())
    in_fp16 = _worst(_lower(program, plain), module, (x,))
    assert in_fp16 < SQNR_FP16_GUARDED
    assert precision.before_db == pytest.approx(in_fp16, abs=0.5)
    assert _worst(pte, module, (x,)) >= SQNR_FP16_GUARDED


class Shifted(torch.nn.Module):
    """Constants of three kinds: a tensor in the code, and buffers that are stored or not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stored", torch.full((4,), 0.5))
        self.register_buffer("derived", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.stored + self.derived * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_constants_of_every_kind_are_there_after_a_measurement() -> None:
    module, x = Shifted().eval(), torch.randn(2, 4)
    lowered = lower_unchecked(module, (x,), compile_specs=AUTO)
    assert _precision(lowered).islands == ()
    program = runtime.load_program(lowered.pte, host="python", engine="reference")
    (got,) = program.run("forward", [x])
    assert sqnr_db(module(x).numpy(), got.numpy()) >= SQNR_FP16_GUARDED


def test_every_method_is_measured() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 16),)
    modules = {"loses": Exponentials().eval(), "holds": torch.nn.Linear(16, 4).eval()}
    partitioner = CoreMLPartitioner(compile_specs=AUTO)
    pte = _lower({n: torch.export.export(m, inputs) for n, m in modules.items()}, partitioner)
    loses, holds = (report.precision for report in partitioner.reports)
    assert loses is not None
    assert holds is not None
    assert loses.in_fp32
    assert not holds.in_fp32
    program = runtime.load_program(pte, host="python", engine="reference")
    for name, module in modules.items():
        with torch.no_grad():
            expected = module(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for want, got in zip(expected, program.run(name, list(inputs)), strict=True):
            assert sqnr_db(want.numpy(), got.numpy()) >= SQNR_FP16_GUARDED


def test_calls_in_branches_that_run_on_the_cpu_compute_in_fp32() -> None:
    torch.manual_seed(0)
    module, x = Choice().eval(), torch.rand(2, 16)
    partitioner = CoreMLPartitioner(
        compile_specs=AUTO, node_filter=lambda node: node.target is not torch.ops.higher_order.cond
    )
    pte = _lower(torch.export.export(module, (x,)), partitioner)
    precision = partitioner.report.precision
    assert precision is not None
    assert precision.before_db == -math.inf
    assert precision.is_reached
    names = [name for call in precision.islands for name in call.nodes]
    assert all("." in name for name in names), names
    program = runtime.load_program(pte, host="python", engine="reference")
    (got,) = program.run("forward", [x])
    assert sqnr_db(module(x).numpy(), got.numpy()) >= SQNR_FP16_GUARDED


def test_a_loss_in_a_delegated_branch_is_named_as_such() -> None:
    torch.manual_seed(0)
    partitioner = CoreMLPartitioner(compile_specs=AUTO)
    _lower(torch.export.export(Choice().eval(), (torch.rand(2, 16),)), partitioner)
    precision = partitioner.report.precision
    assert precision is not None
    assert not precision.lossy
    cause = "those in branches and loops are not measured one by one"
    with pytest.raises(PrecisionError, match=cause):
        precision.require()
    assert list(precision.lines())[-1].endswith(cause)


def test_delegates_of_another_backend_come_after_a_measurement() -> None:
    exported = torch.export.export(Exponentials().eval(), (torch.randn(2, 16),))
    first = XnnpackPartitioner()
    with pytest.raises(OptionError, match="another backend: got XnnpackBackend"):
        to_edge_transform_and_lower(
            exported, partitioner=[first, CoreMLPartitioner(compile_specs=AUTO)]
        )
    partitioner = CoreMLPartitioner(compile_specs=AUTO)
    assert _lower(exported, partitioner, first)
    assert partitioner.report.precision is not None
    assert partitioner.report.precision.is_reached


def test_islands_of_dynamic_sizes_have_a_share_of_the_work() -> None:
    torch.manual_seed(0)
    module, inputs = Exponentials().eval(), (torch.randn(2, 16),)
    sizes = ({0: torch.export.Dim("rows", min=1, max=8)},)
    fixed, partitioner = _precision(_lowered()[0]), CoreMLPartitioner(compile_specs=AUTO)
    _lower(torch.export.export(module, inputs, dynamic_shapes=sizes), partitioner)
    assert partitioner.report.precision is not None
    assert partitioner.report.precision.share == pytest.approx(fixed.share)


def test_a_plan_measures_nothing() -> None:
    exported = torch.export.export(Exponentials().eval(), (torch.zeros(2, 16),))
    report = CoreMLPartitioner(compile_specs=AUTO).plan(exported)
    assert report.precision is None
    assert report.partitions


@pytest.mark.filterwarnings("ignore:This API and all of its related:Warning")
def test_a_recipe_measures_with_the_example_inputs() -> None:
    module, inputs = exponentials()
    recipe = ExportRecipe.get_recipe(CoreMLRecipeType.AUTO)
    pte = bytes(export(module.eval(), [(inputs,)], recipe).get_pte_buffer())
    assert _worst(pte, module, (inputs,)) >= SQNR_FP16_GUARDED


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_export_in_fp16_warns_of_what_it_loses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", MODEL, "-o", "a.pte", "--report", "a.json"]) == 0
    warning = capsys.readouterr().err
    assert "-inf dB on the example inputs; --precision auto keeps " in warning
    precision = json.loads(Path("a.json").read_text())["precision"]
    assert precision["islands"] == []
    assert precision["before_db"] == precision["after_db"] == "-inf"
    assert {call["operation"] for call in precision["lossy"]} >= {"reduce_sum"}


@pytest.mark.usefixtures("_here")
def test_no_verify_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", MODEL, "-o", "a.pte", "--no-verify", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["precision"] is None


@pytest.mark.usefixtures("_here")
def test_export_with_precision_auto_and_verify_agree(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--precision", "auto", "-o", "a.pte", "--report", "a.html")
    assert main(["export", MODEL, *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert " operation(s) in fp32, " in captured.out
    assert '<table id="precision">' in Path("a.html").read_text()
    assert main(["verify", MODEL, "a.pte", "--engine", "reference", "--min-sqnr", "40"]) == 0


@pytest.mark.usefixtures("_here")
def test_calibration_data_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.zeros(2, 16), "x.pt")
    Path("data").mkdir()
    Path("x.pt").rename("data/x.pt")
    options = ("--precision", "auto", "--calibration", "data", "-o", "a.pte", "--json")
    assert main(["export", MODEL, *options]) == 0
    assert json.loads(capsys.readouterr().out)["precision"]["target_db"] == 40.0


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("precision", ["auto", "float16"])
def test_every_enumerated_shape_is_measured(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--enumerated-shapes", "x=1,16/3,16", "--precision", precision)
    assert main(["export", MODEL, *options, "-o", "a.pte", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["precision"]
    assert measured["before_db"] == "-inf"
    assert measured["is_reached"] is (precision == "auto")


@pytest.mark.usefixtures("_here")
def test_nothing_is_written_if_the_target_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--precision", "auto", "-o", "a.pte")
    model = "support.cli_models:unreachable"
    assert main(["export", model, *options]) == 1
    assert "the outputs reach " in capsys.readouterr().err
    assert not Path("a.pte").exists()
    assert main(["export", model, *options, "--force"]) == 0
    assert Path("a.pte").exists()


@pytest.mark.usefixtures("_here")
def test_a_program_that_refuses_its_example_is_written_unmeasured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "support.cli_models:doubling", "-o", "a.pte"]) == 0
    assert "not measured, because the program does not run here" in capsys.readouterr().err
    assert Path("a.pte").exists()


def test_islands_for_a_higher_target_are_minimal_only_if_the_own_target_needs_them() -> None:
    island = Operation("mul", "y", (), 1, 1.0, 1.0, 45.0, 50.0)
    measured = PrecisionMeasurement(60.0, {"y": 30.0}, {"y": 70.0}, (island,), (island,), True, 1)
    report = _lowered()[0].report
    for target, is_minimal in ((60.0, True), (40.0, False)):
        result = PrecisionReport.of(measured, calls_by_handle(report), target_db=target)
        assert result.is_minimal is is_minimal
        assert bool(result.lossy) is is_minimal


def test_the_error_of_a_missed_target_names_the_operations() -> None:
    lowered, _, _ = _lowered()
    report = replace(lowered.report, precision=_precision(lowered).in_fp16())
    with pytest.raises(PrecisionError, match="reduce_sum aten_sum_dim_int_list at root"):
        report.require_precision()
