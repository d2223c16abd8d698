"""The user's filters and limits: by op, module, node, mark, and by the size of partitions."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs, lower
from support.partitioned import assert_equal_eager
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import OptionError, UnsupportedOperatorError
from coreml_delegate.exported.module_scope import ModulePattern, Scope, scopes_of
from coreml_delegate.ops import ReasonCode
from coreml_delegate.partition import DelegationReport, do_not_delegate
from coreml_delegate.partition.verdicts.filters import Filters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    """Two blocks, an operator that Core ML lacks (asinh), and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.asinh(x))


INPUTS = (torch.linspace(-1, 1, 8).reshape(2, 4),)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return torch.export.export(Stack().eval(), INPUTS)


def plan(program: ExportedProgram, **options: Any) -> DelegationReport:
    return CoreMLPartitioner(compile_specs=fp32_specs(), **options).plan(program)


def modules_left(report: DelegationReport) -> set[str]:
    return {node.module for node in report.undelegated}


# Modules

NORM = Scope("layers.0.norm", "torch.nn.modules.normalization.LayerNorm")


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.0.norm",
        "layers.0",
        "layers",
        "layers.*",
        "layers.?.norm",
        "lay*",
        "*.norm",
        "LayerNorm",
        "torch.nn.LayerNorm",
        "torch.nn.modules.normalization.LayerNorm",
        nn.LayerNorm,
    ],
)
def test_a_module_is_named_by_path_wildcard_or_class(pattern: str | type[nn.Module]) -> None:
    assert ModulePattern.of(pattern, "skip_modules").covers([Scope("", "Stack"), NORM])


@pytest.mark.parametrize(
    "pattern",
    [
        *("layers.0.no", "layers.1", "ayers.0", "norm", "layers.0.norm.weight", "layers.*.linear"),
        *("Norm", "torch.nn.functional.LayerNorm", "torch.n.LayerNorm", "layernorm", nn.Linear),
    ],
)
def test_a_pattern_covers_no_other_module(pattern: str | type[nn.Module]) -> None:
    assert not ModulePattern.of(pattern, "skip_modules").covers([Scope("", "Stack"), NORM])


@pytest.mark.parametrize("pattern", ["", " ", 3, int, nn.ReLU()])
def test_a_value_that_is_no_module_pattern_is_an_error(pattern: Any) -> None:
    with pytest.raises(OptionError, match="only_modules takes paths and classes of modules: got"):
        CoreMLPartitioner(only_modules=[pattern])


@pytest.mark.parametrize(
    ("option", "value", "left"),
    [
        ("skip_modules", ["layers.1", nn.LayerNorm], {"layers.0.norm", "layers.1"}),
        ("only_modules", ["layers.0", Block], {"head"}),
    ],
)
def test_modules_are_skipped_or_delegated_alone(
    program: ExportedProgram, option: str, value: list[Any], left: set[str]
) -> None:
    report = plan(program, **{option: value})
    found = modules_left(report) - {""}  # asinh, in the root
    assert all(any(f"{m}.".startswith(f"{stem}.") for stem in left) for m in found)
    assert all(any(f"{m}.".startswith(f"{stem}.") for m in found) for stem in left)
    assert not left & {n.module for n in report.delegated}
    codes = {n.reason.code for n in report.undelegated if n.reason and n.module}
    assert codes == {ReasonCode.SKIPPED}


def test_the_reason_names_the_option_and_the_module(program: ExportedProgram) -> None:
    skipped = plan(program, skip_modules=["head"]).undelegated[-1]
    assert str(skipped.reason) == "'head' is in skip_modules"
    assert skipped.reason is not None
    assert skipped.reason.remedy == "Remove it from the list"
    reasons = {n.op: str(n.reason) for n in plan(program, only_modules=["head"]).undelegated}
    assert reasons["aten.tanh.default"] == "layers.1 is not in only_modules"
    assert reasons["aten.asinh.default"] == "the root module is not in only_modules"


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.2", "layers.0, layers.1"),
        ("heat", "head"),
        ("LayerNrom", "LayerNorm"),
        ("q*", "a path or class of its modules"),
    ],
)
def test_an_unknown_module_is_an_error_with_near_matches(
    program: ExportedProgram, pattern: str, near: str
) -> None:
    filters = Filters.of(
        skip_ops=None,
        only_ops=None,
        skip_modules=["head", pattern],
        only_modules=None,
        node_filter=None,
    )
    modules = {scope for node in program.graph.nodes for scope in scopes_of(node)}
    with pytest.raises(OptionError, match="skip_modules names no module of the program") as raised:
        filters.check_patterns(modules)
    assert raised.value.got == repr(pattern)
    assert raised.value.expected is not None
    assert near in raised.value.expected


def test_module_patterns_are_checked_when_a_program_is_partitioned(
    program: ExportedProgram,
) -> None:
    with pytest.raises(OptionError, match="only_modules names no module of the program: got 'x'"):
        plan(program, only_modules=["x"])


@pytest.mark.parametrize("option", ["skip_modules", "only_modules", "only_ops"])
def test_one_name_is_not_accepted_as_a_list(option: str) -> None:
    options: dict[str, Any] = {option: "head"}
    with pytest.raises(
        OptionError, match=rf"{option} must be a list .* got str 'head', .*'head'\]"
    ):
        CoreMLPartitioner(**options)


# Ops and nodes


def test_only_ops_delegates_no_other_ops(program: ExportedProgram) -> None:
    report = plan(program, only_ops=["tanh", "aten.linear"])
    assert {n.op for n in report.delegated} == {"aten.tanh.default", "aten.linear.default"}
    reasons = {str(n.reason) for n in report.undelegated if "layer_norm" in n.op}
    assert reasons == {"aten.layer_norm.default is not in only_ops"}


def test_an_unknown_name_in_only_ops_is_an_error() -> None:
    with pytest.raises(OptionError, match="only_ops names an unknown operator") as raised:
        CoreMLPartitioner(only_ops=["aten.tahn"])
    assert "tanh" in str(raised.value)


def test_node_filter_is_asked_in_both_dialects() -> None:
    seen: set[str] = set()

    def wanted(node: torch.fx.Node) -> bool:
        seen.add(type(node.target).__name__)
        return "norm" not in str(node.target)

    lowered = lower(Stack(), INPUTS, node_filter=wanted)
    assert seen == {"OpOverload", "EdgeOpOverload"}
    assert "aten.native_layer_norm.default" in lowered.operators
    (norm, *_) = [n for n in lowered.report.undelegated if "norm" in n.op]
    assert str(norm.reason) == "node_filter is false for it"
    assert_equal_eager(lowered.pte, Stack().eval(), INPUTS)


def test_a_node_filter_by_edge_names_decomposes_the_op_after_lowering() -> None:
    """The filter refuses nothing in ATen dialect, so the op is preserved at first."""
    name = "aten_layer_norm_default_1"
    lowered = lower(Stack(), INPUTS, node_filter=lambda node: node.name != name)
    assert name in {node.name for node in lowered.report.undelegated}
    assert "aten.native_layer_norm.default" in lowered.operators
    assert_equal_eager(lowered.pte, Stack().eval(), INPUTS)


# Marks


def test_calls_marked_do_not_delegate_stay_on_the_cpu() -> None:
    exported = torch.export.export(Stack().eval(), INPUTS)
    (tanh, _) = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    *_, head = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    do_not_delegate(tanh)
    do_not_delegate(head)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(torch.export.load(stored), partitioner=[partitioner])
    left = partitioner.report.undelegated
    assert {n.module for n in left} == {"", "layers.0", "head"}
    marked = {n.op for n in left if str(n.reason) == "marked by do_not_delegate"}
    assert marked == {"aten.tanh.default", "aten.linear.default"}
    assert_equal_eager(edge.to_executorch().buffer, Stack().eval(), INPUTS)


def test_a_mark_on_a_result_marks_the_whole_call() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch.split(x, 2, dim=1)
            return torch.relu(a) * torch.relu(b)

    exported = torch.export.export(Halves(), INPUTS)
    parts = [n for n in exported.graph.nodes if "getitem" in n.name]
    do_not_delegate(parts[1])
    report = plan(exported)
    assert {n.op for n in report.undelegated} == {
        "aten.split_with_sizes_copy.default",
        "operator.getitem",
    }


def test_marking_a_node_that_is_no_call_is_an_error(program: ExportedProgram) -> None:
    placeholder = next(iter(program.graph.nodes))
    with pytest.raises(OptionError, match=r"only calls are delegated: got .*kind placeholder"):
        do_not_delegate(placeholder)


def test_a_mark_is_on_one_node_only() -> None:
    exported = torch.export.export(Stack().eval(), INPUTS)
    calls = [n for n in exported.graph.nodes if n.op == "call_function"]
    shared: dict[str, Any] = {"mine": 1}
    for node in calls:
        node.meta["custom"] = shared
    do_not_delegate(calls[0])
    assert shared == {"mine": 1}
    assert calls[0].meta["custom"]["mine"] == 1
    assert calls[1].meta["custom"] is shared


# Partitions


def test_small_partitions_stay_on_the_cpu_whole() -> None:
    module = Stack().eval()
    lowered = lower(module, INPUTS, min_partition_nodes=3)
    assert lowered.report.tags == ("coreml_0",)
    assert {"aten.linear.default", "aten.asinh.default"} <= set(lowered.operators)
    dropped = [n for n in lowered.report.undelegated if n.module == "head"]
    assert {n.reason.code for n in dropped if n.reason} == {ReasonCode.PARTITION_SIZE}
    assert "min_partition_nodes is 3" in str(dropped[0].reason)
    assert_equal_eager(lowered.pte, module, INPUTS)


def test_max_partitions_keeps_the_partition_of_most_flops(program: ExportedProgram) -> None:
    report = plan(program, max_partitions=1)
    # The head does 1024 multiplications and additions; both blocks together, fewer.
    assert {n.module for n in report.delegated} == {"head"}
    reason = next(n.reason for n in report.undelegated if n.module == "layers.0.norm")
    assert reason is not None
    assert reason.code is ReasonCode.PARTITION_LIMIT
    assert reason.remedy == "Raise max_partitions"


@pytest.mark.parametrize("option", ["min_partition_nodes", "max_partitions"])
@pytest.mark.parametrize("value", [0, True])
def test_limits_on_partitions_must_be_positive(option: str, value: int) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionError, match=f"{option} must be .*: got .* {value}"):
        CoreMLPartitioner(**options)


# Strict


def test_strict_raises_if_any_call_stays_on_the_cpu() -> None:
    partitioner = CoreMLPartitioner(strict=True, skip_modules=["head"])
    exported = torch.export.export(Stack().eval(), INPUTS)
    with pytest.raises(UnsupportedOperatorError) as raised:
        to_edge_transform_and_lower(exported, partitioner=[partitioner])
    text = str(raised.value)
    assert "1 x 'head' is in skip_modules [Remove it from the list]: " in text
    assert "1 x no Core ML translation of aten.asinh.default is known" in text
    assert len(partitioner.report.undelegated) == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("only_ops", ["relu"]),
        ("skip_modules", ["a"]),
        ("only_modules", ["a"]),
        ("node_filter", bool),
        ("min_partition_nodes", 2),
    ],
)
def test_lower_full_graph_excludes_filters(option: str, value: Any) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionError, match=f"leaves nothing to the CPU: got together with {option}"):
        CoreMLPartitioner(lower_full_graph=True, **options)
