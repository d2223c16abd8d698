"""``CoreMLPartitioner``: options, verdicts on whole programs, flows, report."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend.backend_api import to_backend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from support.lowering import fp32_specs, lower, lower_core_aten, reasons
from support.partitioned import Network, assert_equal_eager, example
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.backend import owner_of
from coreml_delegate.errors import (
    LoweringError,
    OptionError,
    ProgramError,
    UnsupportedOperatorError,
)
from coreml_delegate.ops import ReasonCode

# Ops to skip


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "name",
    [
        "aten.tanh.default",
        "aten::tanh.default",
        "tanh.default",
        "aten.tanh",
        "aten::tanh",
        "tanh",
        "Tanh",
        " aten.tanh ",
    ],
)
def test_an_op_is_skipped_by_every_spelling_of_its_name(name: str) -> None:
    lowered = lower(Network(supported=True), example(2, 4), skip_ops_for_coreml_delegation=[name])
    assert lowered.operators == ("aten.tanh.default",)
    assert reasons(lowered.report) == {
        "aten.tanh.default": "aten.tanh.default is in skip_ops_for_coreml_delegation"
    }
    (node,) = lowered.report.undelegated
    assert node.reason is not None
    assert node.reason.code is ReasonCode.SKIPPED


def test_the_name_of_a_view_skips_its_copying_variant() -> None:
    class Permuted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.permute(1, 0) + 1.0

    lowered = lower(
        Permuted(), example(2, 4), skip_ops_for_coreml_delegation=["aten.permute.default"]
    )
    assert lowered.operators == ("aten.permute_copy.default",)


@pytest.mark.parametrize(
    ("name", "near"),
    [("aten.tahn.default", "tanh"), ("reluu", "relu"), ("zzzz", "an operator PyTorch has")],
)
def test_an_unknown_op_name_is_an_error_with_near_matches(name: str, near: str) -> None:
    with pytest.raises(OptionError, match="names an unknown operator") as raised:
        CoreMLPartitioner(skip_ops_for_coreml_delegation=[name])
    assert raised.value.got == repr(name)
    assert raised.value.expected is not None
    assert near in raised.value.expected


def test_an_unknown_overload_is_an_error_with_near_matches() -> None:
    with pytest.raises(OptionError, match="names an unknown overload") as raised:
        CoreMLPartitioner(skip_ops_for_coreml_delegation=["aten.add.Tensr"])
    assert raised.value.expected == "perhaps tensor"


def test_a_string_is_not_accepted_as_a_list_of_op_names() -> None:
    with pytest.raises(OptionError, match=r"a list of .*: got str 'aten.add', expected \['aten"):
        CoreMLPartitioner(skip_ops_for_coreml_delegation="aten.add")


# Decomposition


def test_a_composite_op_is_preserved_if_core_ml_takes_every_call() -> None:
    lowered = lower(Network(supported=True), example(2, 4))
    assert [n.op for n in lowered.report.nodes].count("aten.linear.default") == 2


def test_one_unsupported_call_decomposes_every_call_of_its_op() -> None:
    class TwoConvolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv1d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv1d(self.conv(x), x[:, :, :3])

    module, inputs = TwoConvolutions(), example(2, 2, 9)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    kept, keep_node = partitioner.ops_to_not_decompose(torch.export.export(module.eval(), inputs))
    assert torch.ops.aten.conv1d.default not in kept
    assert keep_node is None
    lowered = lower(module, inputs)
    assert lowered.operators == ("aten.convolution.default",)
    assert "is computed" in reasons(lowered.report)["aten.convolution.default"]
    assert_equal_eager(lowered.pte, module, inputs)


# The full graph


def test_a_full_graph_is_lowered_to_one_delegate() -> None:
    module, inputs = Network(supported=True), example(2, 4)
    lowered = lower(module, inputs, lower_full_graph=True)
    assert not lowered.operators
    assert lowered.report.coverage == 1.0
    assert len(lowered.report.partitions) == 1
    assert_equal_eager(lowered.pte, module, inputs)


def test_the_full_graph_error_lists_every_obstacle() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.asinh(torch.asinh(x)) + torch.tanh(x.double()).float()

    partitioner = CoreMLPartitioner(lower_full_graph=True)
    exported = torch.export.export(Several(), example(2))
    with pytest.raises(UnsupportedOperatorError) as raised:
        to_edge_transform_and_lower(exported, partitioner=[partitioner])
    text = str(raised.value)
    left = partitioner.report.undelegated
    assert text.startswith(f"Core ML cannot take {len(left)} node(s) of the graph: got 2 x ")
    assert (
        "2 x no Core ML translation of aten.asinh.default is known: "
        "aten_asinh_default, aten_asinh_default_1;"
    ) in text
    assert "argument 'self' is float64" in text
    assert "[Cast it in the model]" in text
    assert all(node.name in text and str(node.reason) in text for node in left)
    assert text.endswith(
        "Change the model, or lower with lower_full_graph=False and strict=False "
        "to run them on the CPU"
    )


# The report


def test_the_report_lists_delegated_and_undelegated_nodes_with_reasons() -> None:
    report = lower(Network(), example(2, 4)).report
    assert [n.op for n in report.undelegated] == ["aten.asinh.default"]
    assert len(report.delegated) + len(report.undelegated) == len(report.nodes)
    assert report.coverage == len(report.delegated) / len(report.nodes)
    linear = report.nodes[0]
    assert (linear.op, linear.module, linear.results) == (
        "aten.linear.default",
        "first",
        ("float32[2, 4]",),
    )
    (asinh,) = report.undelegated
    assert asinh.partition is None
    assert asinh.reason is not None
    assert asinh.reason.code is ReasonCode.NO_RULE


def test_the_report_as_json() -> None:
    report = lower(Network(), example(2, 4)).report
    text = report.to_json()
    assert text == lower(Network(), example(2, 4)).report.to_json()
    content = json.loads(text)
    assert content == json.loads(json.dumps(report.to_dict()))
    assert content["schema_version"] == 1
    weights = 4 * (4 * 4 + 4 + 4 * 3 + 3)
    assert content["summary"] == {
        "nodes": len(report.nodes),
        "delegated": len(report.delegated),
        "coverage": round(report.coverage, 6),
        "partitions": ["coreml_0", "coreml_1"],
        "first_split": "aten_asinh_default",
        "weights": {"delegated": weights, "total": weights, "coverage": 1.0},
        "flops": {
            "delegated": report.flops.delegated,
            "total": report.flops.total,
            "coverage": round(report.flops.ratio, 6),
        },
    }
    (left,) = [n for n in content["nodes"] if not n["delegated"]]
    assert left["reason"] == {
        "code": "no-rule",
        "text": "no Core ML translation of aten.asinh.default is known",
        "remedy": None,
    }


def test_the_report_as_table() -> None:
    report = lower(Network(), example(2, 4)).report
    lines = str(report).splitlines()
    delegated, nodes = len(report.delegated), len(report.nodes)
    assert lines[0] == (
        f"{delegated} of {nodes} nodes delegated ({delegated / nodes:.1%}) in 2 partition(s)"
    )
    start = lines.index("  on the CPU:")
    assert lines[start + 1].split(maxsplit=2) == [
        "aten.asinh.default",
        "1",
        "no Core ML translation of aten.asinh.default is known",
    ]
    assert lines[start + 2].startswith("      at root (Network), partitioned.py:")
    assert lines[start + 3].startswith("  first split by aten_asinh_default at root (Network)")
    assert lines[-1].split() == ["aten.asinh.default", "1", *["1", "fewer,", "8", "FLOPs", "more"]]


def test_asking_for_a_report_before_lowering_is_an_error() -> None:
    partitioner = CoreMLPartitioner()
    assert partitioner.reports == ()
    with pytest.raises(ProgramError, match="no report yet"):
        _ = partitioner.report


def test_every_method_has_its_report() -> None:
    module, inputs = Network(supported=True).eval(), example(2, 4)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    exported = torch.export.export(module, inputs)
    other = torch.export.export(Network().eval(), inputs)
    to_edge_transform_and_lower(
        {"forward": exported, "other": other},
        partitioner={"forward": [partitioner], "other": [partitioner]},
    )
    assert [r.coverage == 1.0 for r in partitioner.reports] == [True, False]
    assert partitioner.report is partitioner.reports[-1]


# Flows


def test_to_edge_and_to_backend_work_with_a_deprecation_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, inputs = Network(), example(2, 4)
    lower(module, inputs)
    assert "DEPRECATION WARNING" not in caplog.text
    lowered = lower_core_aten(module, inputs)
    assert caplog.text.count("DEPRECATION WARNING: to_edge() + to_backend()") == 1
    assert lowered.operators == ("aten.asinh.default",)
    assert "aten.addmm.default" in {n.op for n in lowered.report.delegated}
    assert_equal_eager(lowered.pte, module, inputs)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("value", "canonical"),
    [(b"cpu", b"cpu_only"), (b"gpu", b"cpu_and_gpu"), (b"ane", b"cpu_and_ne"), (b"all", b"all")],
)
def test_a_whole_program_is_lowered_by_the_name_of_the_backend(
    value: bytes, canonical: bytes
) -> None:
    module, inputs = Network(supported=True).eval(), example(2, 4)
    edge = to_edge(torch.export.export(module, inputs))
    specs = [
        CompileSpec("compute_units", value),
        CompileSpec("model_compute_precision", b"float32"),
    ]
    lowered = to_backend("CoreMLBackend", edge.exported_program(), specs)
    assert {s.key: s.value for s in lowered.compile_specs}["compute_units"] == canonical
    assert lowered.backend_id == CoreMLBackend.__name__
    program = to_edge(torch.export.export(Wrapper(lowered), inputs)).to_executorch()
    assert_equal_eager(program.buffer, module, inputs)


class Wrapper(nn.Module):
    """A module around a lowered module, as the oldest documents export it."""

    def __init__(self, lowered: Any) -> None:
        super().__init__()
        self.lowered = lowered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lowered(x)


def test_a_whole_program_with_an_unsupported_op_is_an_error() -> None:
    edge = to_edge(torch.export.export(Network().eval(), example(2, 4)))
    with pytest.raises(UnsupportedOperatorError, match=r"no Core ML translation of aten\.asinh"):
        to_backend("CoreMLBackend", edge.exported_program(), fp32_specs())


# Another backend of the same name


@pytest.fixture
def others() -> Iterator[Callable[[], Any]]:
    """Makes another backend of that name; all are gone after the test."""
    made: list[Any] = []

    def make() -> Any:
        members = {
            "preprocess": staticmethod(lambda *_: PreprocessResult(processed_bytes=b"other")),
            "__module__": f"elsewhere{len(made)}",
        }
        made.append(type("CoreMLBackend", (BackendDetails,), members))
        return made[-1]

    yield make
    made.clear()
    gc.collect()


def test_compile_specs_of_another_backend_of_this_name_go_to_it(others: Callable[[], Any]) -> None:
    other = others()
    module, inputs = Network(supported=True).eval(), example(2, 4)
    lowered = lower(module, inputs)
    assert_equal_eager(lowered.pte, module, inputs)
    assert [cls for cls in BackendDetails.__subclasses__() if cls.__name__ == "CoreMLBackend"] == [
        CoreMLBackend
    ]
    assert issubclass(other, BackendDetails)
    program = to_edge(torch.export.export(module, inputs)).exported_program()
    for specs, mine in (([], False), ([CompileSpec("a", b"")], False), (fp32_specs(), True)):
        made = to_backend("CoreMLBackend", program, specs)
        assert (made.processed_bytes != b"other") is mine
        assert made.backend_id == "CoreMLBackend"
    copies = pickle.loads(pickle.dumps(fp32_specs())), copy.deepcopy(fp32_specs())
    assert all(owner_of(specs) is CoreMLBackend for specs in copies)
    assert owner_of([]) is other


def test_two_other_backends_of_this_name_are_an_error(others: Callable[[], Any]) -> None:
    kept = others(), others()
    module, inputs = Network(supported=True).eval(), example(2, 4)
    assert lower(module, inputs).report.coverage == 1.0
    program = to_edge(torch.export.export(module, inputs)).exported_program()
    with pytest.raises(LoweringError) as raised:
        to_backend("CoreMLBackend", program, [])
    assert (
        "several backends beside this one are named CoreMLBackend: "
        "got elsewhere0.CoreMLBackend, elsewhere1.CoreMLBackend"
    ) in str(raised.value)
    del kept, raised
