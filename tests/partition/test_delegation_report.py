"""``DelegationReport``: its nodes, partitions and obstacles, and its forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs
from support.partitioned import Network, example
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.exported import source_lines
from coreml_delegate.exported.source_lines import source_of
from coreml_delegate.partition import DelegationReport
from coreml_delegate.partition.report.table import quantity
from coreml_delegate.patches.third_party import coremltools


def exported(module: nn.Module, *shape: int) -> ExportedProgram:
    return torch.export.export(module.eval(), example(*shape))


def plan(program: ExportedProgram, **options: Any) -> DelegationReport:
    return CoreMLPartitioner(**({"compile_specs": fp32_specs()} | options)).plan(program)


@pytest.fixture(scope="module")
def report() -> DelegationReport:
    return plan(exported(Network(), 2, 4))


# The plan


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_partition_nodes": 2},
        {"skip_modules": ["first"], "take_over_constant_data": False},
    ],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_a_plan_equals_the_report_of_the_lowering(options: dict[str, Any]) -> None:
    program = exported(Network(), 2, 4)
    before = str(program), {k: v.clone() for k, v in program.state_dict.items()}
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), **options)
    planned = partitioner.plan(program)
    assert partitioner.reports == ()
    # The program is as it was, and usable.
    assert str(program) == before[0]
    torch.testing.assert_close(dict(program.state_dict), before[1], rtol=0, atol=0)
    assert not any("delegation_tag" in node.meta for node in program.graph.nodes)
    to_edge_transform_and_lower(program, partitioner=[partitioner])
    assert partitioner.report == planned
    assert partitioner.reports == (planned,)


def test_a_plan_does_not_raise_for_calls_on_the_cpu() -> None:
    assert len(plan(exported(Network(), 2, 4), lower_full_graph=True).undelegated) == 1


# Nodes


def test_nodes_have_module_source_arguments_and_costs(report: DelegationReport) -> None:
    linear, _, asinh, _ = report.nodes
    assert (linear.module, linear.module_class) == ("first", "torch.nn.modules.linear.Linear")
    assert linear.source is not None
    assert Path(linear.source.file).name == "partitioned.py"
    assert linear.source.function == "forward"
    assert linear.source.code == "y = torch.tanh(self.first(x))"
    assert asinh.place.startswith("root (Network), partitioned.py:")
    assert asinh.inputs == (report.nodes[1].name,)
    assert asinh.arguments == asinh.results == ("float32[2, 4]",)
    assert linear.arguments == ("float32[2, 4]", "float32[4, 4]", "float32[4]")
    assert linear.weight_bytes == 4 * (4 * 4 + 4)
    assert linear.flops == 2 * 4 * (2 * 4 + 1)


FRAME = '  File "{}", line {}, in forward\n    {}\n'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/me/model.py", "/me/layer.py", torch.nn.functional.__file__], "layer.py:2"),
        (["/venv/transformers/model.py", torch.nn.functional.__file__], "model.py:1"),
        (["/me/model.py", "/lib/python3.13/site-packages/torch/nn/functional.py"], "model.py:1"),
        (["/me/model.py", "/build/torch/nn/functional.py"], "model.py:1"),
        ([torch.nn.functional.__file__], "functional.py:1"),
        ([], None),
    ],
)
def test_the_source_is_the_innermost_line_of_the_users_code(
    files: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "/build/torch/nn/functional.py" in files:
        monkeypatch.setattr(torch, "__file__", "/build/torch/__init__.py")
    source_lines._installed_folders.cache_clear()
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = "".join(
        FRAME.format(file, n, "y = f(x)") for n, file in enumerate(files, start=1)
    )
    found = source_of(node)
    source_lines._installed_folders.cache_clear()
    assert (None if found is None else str(found)) == expected


# Partitions


def test_partitions_have_sizes_and_flops(report: DelegationReport) -> None:
    first, second = report.partitions
    assert (first.tag, first.nodes) == ("coreml_0", 2)
    assert first.ops == (("aten.linear.default", 1), ("aten.tanh.default", 1))
    assert first.weight_bytes == 4 * (4 * 4 + 4)
    assert (first.inputs, first.input_bytes) == (1, 4 * 8)
    assert (first.outputs, first.output_bytes) == (1, 4 * 8)
    assert second.weight_bytes == 4 * (4 * 3 + 3)
    assert (second.outputs, second.output_bytes) == (1, 4 * 6)
    assert first.flops + second.flops + 8 == report.flops.total
    assert report.weights.ratio == 1.0


def test_constants_outside_are_inputs_of_the_partition() -> None:
    (only,) = plan(
        exported(Network(supported=True), 2, 4), take_over_constant_data=False
    ).partitions
    assert only.weight_bytes == 0
    assert (only.inputs, only.input_bytes) == (5, 4 * (8 + 20 + 15))


def test_states_are_neither_inputs_nor_outputs_of_the_partition() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total * 2.0

    (kept,) = plan(exported(Total(), 3)).partitions
    assert (kept.state_bytes, kept.inputs, kept.outputs) == (12, 1, 1)
    (passed,) = plan(exported(Total(), 3), take_over_mutable_buffer=False).partitions
    assert (passed.state_bytes, passed.inputs, passed.outputs) == (0, 2, 2)


@pytest.mark.parametrize(
    ("function", "given", "target", "demanded_by"),
    [
        (torch.sigmoid, None, "iOS15", ()),
        (torch.sigmoid, "iOS16", "iOS16", ("minimum_deployment_target",)),
        (
            lambda x: torch.relu(nn.functional.pixel_unshuffle(x, 2)),
            None,
            "iOS16",
            ("aten.pixel_unshuffle.default",),
        ),
        (lambda x: (x, torch.zeros(2).cos()), None, "iOS18", ("a model without inputs",)),
    ],
    ids=["base", "given", "op", "no inputs"],
)
def test_the_cause_of_the_deployment_target_is_named(
    function: Callable[[torch.Tensor], Any],
    given: str | None,
    target: str,
    demanded_by: tuple[str, ...],
) -> None:
    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    asked = {} if given is None else {"minimum_deployment_target": coremltools().target[given]}
    found = plan(exported(Function(), 1, 1, 4, 4), compile_specs=fp32_specs(**asked))
    (partition,) = found.partitions
    assert (partition.target, partition.demanded_by) == (target, demanded_by)
    content = json.loads(found.to_json())["partitions"][0]
    assert (content["target"], content["demanded_by"]) == (target, list(demanded_by))
    assert f", {target} {'for' if demanded_by else 'or later'}" in found.to_table()
    assert f"<td>{target}" in found.to_html()


def test_the_report_of_a_graph_without_operations() -> None:
    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    empty = plan(exported(Identity(), 3))
    assert (empty.coverage, empty.weights.ratio, empty.flops.ratio) == (1.0, 1.0, 1.0)
    assert str(empty).startswith("0 of 0 nodes delegated (100.0%) in 0 partition(s)")
    assert "<svg" in empty.to_html()


# Obstacles


class Twice(nn.Module):
    """Two operators that Core ML lacks; one splits, the other is last."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(torch.asinh(torch.relu(x)))
        z = torch.relu(torch.asinh(y))
        return z, torch.acosh(z)


def test_obstacles_are_ranked_by_the_gain_if_supported() -> None:
    found = plan(exported(Twice(), 6), skip_ops_for_coreml_delegation=["acosh"])
    assert len(found.partitions) == 3
    assert found.first_split == "aten_asinh_default"
    asinh, acosh = found.obstacles
    assert asinh.ops == ("aten.asinh.default",)
    assert asinh.nodes == ("aten_asinh_default", "aten_asinh_default_1")
    assert (asinh.partitions_if_lifted, asinh.partitions_merged) == (1, 2)
    assert asinh.flops == 12
    assert (acosh.code, acosh.partitions_if_lifted, acosh.partitions_merged) == ("skipped", 3, 0)


def test_calls_kept_out_by_one_option_are_one_obstacle() -> None:
    class Double(Network):
        def __init__(self) -> None:
            super().__init__(supported=True)
            self.second = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())

    found = plan(exported(Double(), 2, 4), skip_modules=["second"])
    # Two calls of different ops, one wish.
    assert {(o.title, len(o.nodes)) for o in found.obstacles} == {
        ("'second' is in skip_modules", 2)
    }
    assert found.first_split is None


def test_refused_calls_at_the_end_do_not_split_the_graph() -> None:
    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.asinh(torch.relu(x))

    found = plan(exported(Last(), 3))
    assert found.first_split is None
    assert [o.partitions_merged for o in found.obstacles] == [0]


# Forms


def test_the_json_form_is_complete(report: DelegationReport) -> None:
    content = json.loads(report.to_json())
    sections = {"summary", "partitions", "obstacles", "buffers", "folds", "nodes", "precision"}
    assert set(content) == {"schema_version", *sections}
    assert content["partitions"][0]["ops"] == {"aten.linear.default": 1, "aten.tanh.default": 1}
    (obstacle,) = content["obstacles"]
    assert obstacle["code"] == "no-rule"
    assert obstacle["nodes"] == ["aten_asinh_default"]
    source = content["nodes"][2]["source"]
    assert set(source) == {"file", "line", "function", "code"}


def test_the_table_names_sizes_and_remedies() -> None:
    text = str(plan(exported(Network(), 2, 4), skip_modules=["second"]))
    assert "  coreml_0: 2 nodes, 80 FLOPs, 80 B of weights, 32 B in, 32 B out, iOS15" in text
    assert "      -> Remove it from the list" in text
    assert " 57.1% of 140 B of weights, " in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_450_000, "2.5 MB"), (3 * 10**12, "3.0 TB")],
)
def test_quantities_have_decimal_prefixes(count: int, text: str) -> None:
    assert quantity(count, "B") == text
