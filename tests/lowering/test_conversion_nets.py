"""Calls that coremltools fails to convert stay on the CPU, and nothing is converted twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.failing_conversions import (
    MESSAGE,
    counted,
    fail_as_a_whole,
    fail_at,
    fresh_trials,
)
from support.lowering import fp32_specs, lower, lower_core_aten, reasons
from support.partitioned import Network, assert_equal_eager, delegate_functions, example
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.errors import LoweringError, UnsupportedOperatorError
from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache
from coreml_delegate.lowering import store
from coreml_delegate.lowering.trial import TRIALS, ProgramTrials, Trials
from coreml_delegate.ops import ReasonCode
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset

INPUTS = example(2, 4)


@pytest.fixture(autouse=True)
def _no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_trials(monkeypatch, tmp_path)


class Chain(nn.Module):
    """Five ops in a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(torch.exp(x) + 1) * x)


# Trial conversion


def test_failed_trials_and_integers_are_reported_without_log_output(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Coremltools logs the failure, and that it casts the indices from int64.
            return torch.sigmoid(torch.tanh(x))[:, torch.tensor([2, 0])]

    fail_at(monkeypatch, "tanh")
    lowered = lower(Chosen(), INPUTS)
    assert_equal_eager(lowered.pte, Chosen(), INPUTS)
    assert lowered.operators == ("aten.tanh.default",)
    assert not [record for record in caplog.records if record.name == "coremltools"]


@pytest.mark.parametrize("route", [lower, lower_core_aten])
def test_an_op_that_fails_in_trial_stays_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, route: object
) -> None:
    fail_at(monkeypatch, "tanh")
    lowered = route(Chain(), INPUTS)
    assert lowered.operators == ("aten.tanh.default",)
    (reason,) = (n.reason for n in lowered.report.undelegated)
    assert reason.code is ReasonCode.CONVERSION
    assert MESSAGE in reason.text
    assert_equal_eager(lowered.pte, Chain(), INPUTS)


def test_all_ops_that_fail_in_trial_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("tanh", "exp"):
        fail_at(monkeypatch, op)
    lowered = lower(Chain(), INPUTS)
    assert set(lowered.operators) == {"aten.tanh.default", "aten.exp.default"}
    assert_equal_eager(lowered.pte, Chain(), INPUTS)


def test_a_composite_op_that_fails_in_trial_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "layer_norm")
    module = nn.LayerNorm(4)
    lowered = lower(module, INPUTS)
    assert "aten.layer_norm.default" not in reasons(lowered.report)
    assert_equal_eager(lowered.pte, module, INPUTS)


def test_lower_full_graph_lists_every_op_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("tanh", "exp"):
        fail_at(monkeypatch, op)
    with pytest.raises(UnsupportedOperatorError, match=r"exp.*tanh"):
        lower(Chain(), INPUTS, lower_full_graph=True)


def test_trial_verdicts_are_cached_in_memory_and_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = counted(monkeypatch)
    lower(Chain(), INPUTS)
    first = counts["milinternal"]
    assert first >= 1
    lower(Chain(), INPUTS)
    assert counts["milinternal"] == first
    known = dict(TRIALS.cached)
    monkeypatch.setattr(TRIALS, "cached", {})
    monkeypatch.setattr(TRIALS, "loaded_from", None)
    lower(Chain(), INPUTS)
    assert counts["milinternal"] == first
    assert TRIALS.cached == known
    assert Trials().cached == {}
    assert len(EntryCache(CacheOptions(tmp_path / store.VERDICTS)).files()) == 1


@pytest.mark.parametrize("content", [b"", b"{", bytes(5000)])
def test_a_damaged_verdict_cache_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    lower(Chain(), INPUTS)
    (entry,) = EntryCache(CacheOptions(tmp_path / store.VERDICTS)).files()
    whole = entry.path.read_bytes()
    entry.path.write_bytes(content)
    monkeypatch.setattr(TRIALS, "cached", {})
    monkeypatch.setattr(TRIALS, "loaded_from", None)
    assert lower(Chain(), INPUTS).operators == ()
    assert entry.path.read_bytes() == whole


def test_lowering_works_without_a_writable_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fresh_trials(monkeypatch, blocked)
    assert lower(Chain(), INPUTS).operators == ()


def test_an_op_that_needs_a_later_target_raises_that_of_its_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ct = coremltools()
    fail_at(monkeypatch, "tanh", before=ct.target.iOS17)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(
        torch.export.export(Chain(), INPUTS), partitioner=[partitioner]
    )
    assert partitioner.report.undelegated == ()
    (lowered,) = (
        m for _, m in edge.exported_program().graph_module.named_children() if m is not None
    )
    options = CompileOptions.from_specs(lowered.compile_specs)
    assert options.deployment_target is Opset.iOS17
    (partition,) = partitioner.report.partitions
    assert (partition.target, partition.demanded_by) == ("iOS17", ("aten.tanh.default",))


def test_an_op_that_needs_a_later_target_shares_a_partition_with_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return torch.tanh(self.total)

    fail_at(monkeypatch, "tanh", before=coremltools().target.iOS17)
    lowered = lower(Total(), INPUTS)
    assert not lowered.operators
    (partition,) = lowered.report.partitions
    assert partition.target == "iOS18"
    assert partition.demanded_by == ("mutable buffers as states",)


def test_a_given_target_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ct = coremltools()
    fail_at(monkeypatch, "tanh", before=ct.target.iOS17)
    specs = fp32_specs(minimum_deployment_target=ct.target.iOS16)
    assert lower(Chain(), INPUTS, compile_specs=specs).operators == ("aten.tanh.default",)


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")], ids=repr)
def test_a_failure_of_the_machine_is_an_error_and_not_cached(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(coremltools(), "convert", mock.Mock(side_effect=error))
        with pytest.raises(LoweringError, match="this machine cannot convert"):
            lower(Chain(), INPUTS)
    assert lower(Chain(), INPUTS).operators == ()


# Conversion of partitions


def test_an_option_that_needs_macos_is_an_error_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    specs = fp32_specs(model_type=CoreMLBackend.MODEL_TYPE.COMPILED_MODEL)
    with pytest.raises(LoweringError, match="only macOS has"):
        lower(Chain(), INPUTS, compile_specs=specs)


def test_records_of_taken_blobs_hold_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[store.CachedBlob] = []
    keep = store.keep

    def recorded(*arguments: Any) -> store.CachedBlob:
        records.append(keep(*arguments))
        return records[-1]

    monkeypatch.setattr(store, "keep", recorded)
    lowered = lower(Network(supported=True), INPUTS)
    assert lowered.report.undelegated == ()
    assert [(record.files, record.constants) for record in records] == [(None, {})]


def test_the_call_that_keeps_a_partition_from_converting_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_as_a_whole(monkeypatch, "aten.tanh")
    lowered = lower(Chain(), INPUTS)
    assert lowered.operators == ("aten.tanh.default",)
    (reason,) = (n.reason for n in lowered.report.undelegated)
    assert reason.code is ReasonCode.CONVERSION
    assert MESSAGE in reason.text
    assert_equal_eager(lowered.pte, Chain(), INPUTS)


def test_calls_outside_are_not_blamed_for_a_partition_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BehindTheCpu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.tanh(torch.asinh(x)) * 2.0)

    cut = _at_most(5, ProgramTrials.partitions)
    monkeypatch.setattr(ProgramTrials, "partitions", cut)
    for op in ("aten.asinh", "aten.tanh"):
        fail_as_a_whole(monkeypatch, op)
    lowered = lower(BehindTheCpu(), INPUTS, skip_ops_for_coreml_delegation=["aten.asinh.default"])
    assert lowered.operators == ("aten.asinh.default", "aten.tanh.default")
    assert_equal_eager(lowered.pte, BehindTheCpu(), INPUTS)


def _at_most(times: int, function: Callable[..., object]) -> Callable[..., object]:
    left = iter(range(times))

    def limited(*arguments: object) -> object:
        if next(left, None) is None:
            raise AssertionError("partitions are confirmed without an end")
        return function(*arguments)

    return limited


def test_partitions_without_values_are_only_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coreml_delegate.lowering.trial.real_values", lambda state: {})
    counts = counted(monkeypatch)
    module = Network(supported=True)
    lowered = lower(module, INPUTS)
    assert counts["mlprogram"] == len(lowered.report.partitions)
    assert_equal_eager(lowered.pte, module, INPUTS)


@pytest.mark.share(2)
@pytest.mark.parametrize("supported", [True, False])
def test_every_partition_is_converted_once(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    counts = counted(monkeypatch)
    module = Network(supported=supported)
    lowered = lower(module, INPUTS)
    assert counts["mlprogram"] == len(lowered.report.partitions) == (1 if supported else 2)
    assert_equal_eager(lowered.pte, module, INPUTS)


def test_several_methods_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    programs = {
        name: torch.export.export(Network(supported=True), example(rows, 4))
        for name, rows in (("one", 1), ("two", 2))
    }
    partitioners = {name: [CoreMLPartitioner(compile_specs=fp32_specs())] for name in programs}
    to_edge_transform_and_lower(programs, partitioner=partitioners)
    assert counts["mlprogram"] == 2


def test_methods_that_differ_in_their_sizes_only_have_a_blob_each() -> None:
    """Their graphs are equal to the letter: a symbol of an input has the same name in each."""
    programs = {
        str(most): torch.export.export(
            nn.Tanh(), example(4, 2), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=most)},)
        )
        for most in (8, 64)
    }
    edge = to_edge_transform_and_lower(
        programs, partitioner={name: [CoreMLPartitioner()] for name in programs}
    )
    for most in (8, 64):
        (function,) = delegate_functions(edge, str(most))
        (x,) = function.inputs
        assert x.bounds == ((2, most), (2, 2))


def test_a_lowering_takes_over_the_blobs_of_the_plan_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = counted(monkeypatch)
    module = Network()
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    plan = partitioner.plan(torch.export.export(module, INPUTS))
    converted = counts["mlprogram"]
    edge = to_edge_transform_and_lower(
        torch.export.export(module, INPUTS), partitioner=[partitioner]
    )
    assert counts["mlprogram"] == converted == 2
    assert partitioner.report == plan
    assert_equal_eager(edge.to_executorch().buffer, module, INPUTS)


def test_weights_changed_after_a_plan_are_converted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    module = Network(supported=True)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    partitioner.plan(torch.export.export(module, INPUTS))
    with torch.no_grad():
        module.first.weight.mul_(2)
    edge = to_edge_transform_and_lower(
        torch.export.export(module, INPUTS), partitioner=[partitioner]
    )
    assert counts["mlprogram"] == 2
    assert_equal_eager(edge.to_executorch().buffer, module, INPUTS)


def test_blobs_are_equal_with_and_without_the_blob_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Network(supported=True)
    reused = lower(module, INPUTS).pte
    monkeypatch.setattr("coreml_delegate.lowering.store.find", lambda program, options: None)
    assert lower(module, INPUTS).pte == reused


def test_preprocess_works_without_a_partitioner() -> None:
    program = torch.export.export(Chain(), INPUTS).run_decompositions({})
    result = CoreMLBackend.preprocess(program, fp32_specs())
    assert result.processed_bytes
