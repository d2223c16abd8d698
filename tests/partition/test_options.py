"""``CoreMLPartitioner``: the values of its options, and its copies."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from support.lowering import fp32_specs
from support.partitioned import Network, example

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.targets import ComputeUnit


def test_documented_options_have_their_defaults() -> None:
    partitioner = CoreMLPartitioner()
    assert partitioner.options == CompileOptions()
    assert partitioner.options.compute_unit is ComputeUnit.ALL
    assert partitioner.options.precision is Precision.FLOAT16
    assert partitioner.options.deployment_target is None
    assert partitioner.delegation_spec.backend_id == "CoreMLBackend"
    assert partitioner.delegation_spec.compile_specs == CompileOptions().to_specs()


def test_options_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        CoreMLPartitioner(["aten.add.Tensor"])  # pyright: ignore[reportCallIssue]


def test_compile_specs_are_recorded_in_canonical_form() -> None:
    partitioner = CoreMLPartitioner(compile_specs=[CompileSpec("compute_units", b"ane")])
    written = {s.key: s.value for s in partitioner.delegation_spec.compile_specs}
    assert written["compute_units"] == b"cpu_and_ne"
    assert written["model_compute_precision"] == b"float16"


@pytest.mark.parametrize(
    ("options", "clash"),
    [
        ({"skip_ops_for_coreml_delegation": ["aten.add"]}, "skip_ops_for_coreml_delegation"),
        ({"take_over_mutable_buffer": False}, "take_over_mutable_buffer"),
        ({"take_over_constant_data": False}, "take_over_constant_data"),
        (
            {"take_over_constant_data": False, "take_over_mutable_buffer": False},
            "take_over_mutable_buffer, take_over_constant_data",
        ),
    ],
)
def test_lower_full_graph_excludes_options_that_leave_calls_to_the_cpu(
    options: dict[str, Any], clash: str
) -> None:
    with pytest.raises(OptionError) as raised:
        CoreMLPartitioner(lower_full_graph=True, **options)
    assert str(raised.value) == (
        f"lower_full_graph=True leaves nothing to the CPU: got together with {clash}. "
        "Drop these options, or set lower_full_graph=False"
    )


def test_an_unknown_compile_spec_is_an_error() -> None:
    with pytest.raises(OptionError, match="unknown compile spec: got 'units'"):
        CoreMLPartitioner(compile_specs=[CompileSpec("units", b"all")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_partition_nodes": "2"}, "min_partition_nodes must be an integer: got str '2'"),
        ({"max_partitions": 1.5}, "max_partitions must be an integer: got float 1.5"),
        ({"compile_specs": "x"}, "compile_specs must be a list of CompileSpec: got str 'x'"),
        ({"compile_specs": [3]}, "compile_specs must be a list of CompileSpec: got int 3"),
        ({"compile_specs": 3}, "compile_specs must be a list of CompileSpec: got int 3"),
        ({"node_filter": 3}, "node_filter must be a function of a node of the graph"),
        ({"keep_fp32": {"ops": ["add"]}}, "keep_fp32 must be a function of a node of the graph"),
        ({"only_ops": 3}, "only_ops must be a list of operator names: got int 3"),
        ({"only_ops": [3]}, "only_ops must be a list of operator names: got int 3"),
        ({"skip_ops_for_coreml_delegation": {"add": 1}}, "must be a list of operator names"),
        ({"only_modules": 3}, "only_modules must be a list of paths and classes of modules"),
        ({"skip_modules": [3]}, "skip_modules takes paths and classes of modules: got 3"),
        ({"strict": "no"}, "strict must be a bool: got str 'no'"),
        ({"lower_full_graph": None}, "lower_full_graph must be a bool"),
        ({"take_over_constant_data": 1}, "take_over_constant_data must be a bool: got int 1"),
        ({"take_over_mutable_buffer": "yes"}, "take_over_mutable_buffer must be a bool"),
        (
            {"compile_specs": [CompileSpec("pass_pipeline", b'["nope"]')]},
            "unknown coremltools pass: got 'nope'",
        ),
        (
            {"compile_specs": [CompileSpec("keep_fp32", b'{"ops": ["nope"]}')]},
            "keep_fp32 names an unknown MIL op: got 'nope'",
        ),
    ],
)
def test_option_values_of_the_wrong_kind_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        CoreMLPartitioner(**options)


def test_options_do_not_change_with_the_lists_of_the_caller() -> None:
    specs, skipped = fp32_specs(), ["tanh"]
    partitioner = CoreMLPartitioner(compile_specs=specs, skip_ops_for_coreml_delegation=skipped)
    specs[:] = [CompileSpec("units", b"all")]
    skipped[:] = ["nothing of this name"]
    module, inputs = Network(supported=True).eval(), example(2, 4)
    report = partitioner.plan(torch.export.export(module, inputs))
    assert [n.op for n in report.undelegated] == ["aten.tanh.default"]


# Copies


def is_no_tanh(node: Any) -> bool:
    return "tanh" not in str(node.target)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda partitioner: pickle.loads(pickle.dumps(partitioner)),
}


class Named(CoreMLPartitioner):
    """A partitioner with an attribute of the user's own."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self.name = name


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_has_the_same_options_and_reports(kind: str) -> None:
    original = Named("n", compile_specs=fp32_specs(), node_filter=is_no_tanh, strict=False)
    module, inputs = Network().eval(), example(2, 4)
    exported = torch.export.export(module, inputs)
    before = COPIES[kind](original)
    assert before.reports == ()
    edge = to_edge_transform_and_lower(exported, partitioner=[original])
    after = COPIES[kind](original)
    assert after.name == "n"
    assert after.options == original.options
    assert after.delegation_spec == original.delegation_spec
    assert after.reports == original.reports
    assert [n.op for n in after.report.undelegated] == ["aten.tanh.default", "aten.asinh.default"]
    for made in (before, after):
        lowered = to_edge_transform_and_lower(exported, partitioner=[made])
        assert made.report == original.report
        assert lowered.to_executorch().buffer == edge.to_executorch().buffer
    assert len(original.reports) == 1
    assert [len(made.reports) for made in (before, after)] == [1, 2]


@pytest.mark.parametrize("option", ["node_filter", "keep_fp32"])
def test_a_partitioner_with_a_lambda_can_be_copied_but_not_pickled(option: str) -> None:
    options: dict[str, Any] = {option: lambda _: True}
    partitioner = CoreMLPartitioner(**options)
    assert copy.deepcopy(partitioner).options == partitioner.options
    with pytest.raises(OptionError, match=f"a partitioner with this {option} cannot be pickled"):
        pickle.dumps(partitioner)
