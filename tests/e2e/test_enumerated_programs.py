"""Programs with enumerated shapes: the document's example, and those delegated in part."""

from __future__ import annotations

import functools
import itertools

import coremltools as ct
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs
from support.tolerances import ATOL_RTOL

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import ContractError, InputError
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.summary import summarize_pte

ATOL, RTOL = ATOL_RTOL["fp32"]
LISTED = {"x": [[1, 5, 10], [4, 6, 10]], "y": [[3, 11], [5, 11]]}


class Model(torch.nn.Module):
    """The document's; in parts, an op that Core ML has not stands between two delegates."""

    def __init__(self, *, in_parts=False):
        super().__init__()
        torch.manual_seed(0)
        self.in_parts = in_parts
        self.linear1 = torch.nn.Linear(10, 5)
        self.linear2 = torch.nn.Linear(11, 5)

    def forward(self, x, y):
        z = self.linear1(x)
        if self.in_parts:
            z = torch.asinh(z.flatten(0, 1))
        return z.sum() + self.linear2(y)


def exported(model):
    dims = (
        {0: torch.export.Dim.AUTO(min=1, max=4), 1: torch.export.Dim.AUTO(min=5, max=6)},
        {0: torch.export.Dim.AUTO(min=3, max=5)},
    )
    return torch.export.export(
        model.eval(), (torch.randn(4, 6, 10), torch.randn(5, 11)), dynamic_shapes=dims
    )


def lower(model, **options):
    program = exported(model)
    specs = fp32_specs(**options)
    specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(program, LISTED))
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=not model.in_parts)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    return partitioner.report, edge.to_executorch().buffer


@functools.cache
def lowered(*, in_parts):
    return lower(Model(in_parts=in_parts), minimum_deployment_target=ct.target.iOS18)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("host", "engine"), [*itertools.product(("python", "stock"), ("openvino", "reference"))]
)
def test_listed_shapes_and_no_others(in_parts, host, engine):
    model = Model(in_parts=in_parts)
    _, pte = lowered(in_parts=in_parts)
    program = runtime.load_program(pte, host=host, engine=engine)
    for shapes in zip(*LISTED.values(), strict=True):
        inputs = [torch.randn(shape) for shape in shapes]
        (result,) = program.run("forward", inputs)
        torch.testing.assert_close(result, model(*inputs), atol=ATOL, rtol=RTOL)
    refused = {
        "not enumerated together": ((1, 5, 10), (5, 11)),
        r"'x' has a shape that is not enumerated: got \[2, 5, 10\]": ((2, 5, 10), (3, 11)),
        "has the wrong shape": ((2, 7, 12), (3, 11)),
    }
    for message, shapes in refused.items():
        with pytest.raises(InputError, match=message):
            program.run("forward", [torch.randn(shape) for shape in shapes])


def test_shapes_at_the_boundaries_of_parts():
    report, pte = lowered(in_parts=True)
    assert [dict(p.flexible) for p in report.partitions] == [
        {"x": "[1, 5, 10] | [4, 6, 10]"},
        {"y": "[3, 11] | [5, 11]", "aten_asinh_default": "[5, 5] | [24, 5]"},
    ]
    (method,) = PteProgram.open(pte).methods
    described = [
        {f.name: f.shapes for f in read_blob(d.processed)[0].functions["main"].inputs}
        for d in method.delegates
    ]
    assert described == [
        {"x": ((1, 5, 10), (4, 6, 10))},
        {"y": ((3, 11), (5, 11)), "aten_asinh_default": ((5, 5), (24, 5))},
    ]


def test_without_a_target_the_oldest_that_takes_them():
    report, _ = lower(Model(in_parts=True))
    assert [p.target for p in report.partitions] == ["iOS15", "iOS18"]
    assert "enumerated shapes of several inputs" in report.partitions[1].demanded_by


def test_several_inputs_need_a_target():
    with pytest.raises(ContractError, match=r"\(x, y\) need iOS18 .*target iOS17. Raise it, or"):
        lower(Model(), minimum_deployment_target=ct.target.iOS17)


def test_sizes_that_depend_on_data_stay():
    class Chosen(torch.nn.Module):
        def forward(self, x):
            return (x * 2)[x.sum(1) > 0].cos()

    program = torch.export.export(
        Chosen(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO(max=4)},)
    )
    specs = fp32_specs()
    listed = {"x": [[2, 3], [4, 3]]}
    specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(program, listed))
    partitioner = CoreMLPartitioner(compile_specs=specs)
    report = partitioner.plan(program)
    (reason,) = {str(n.reason) for n in report.undelegated if n.op == "aten.cos.default"}
    assert "does not follow from the enumerated shapes" in reason
    assert report.partitions[0].flexible == (("x", "[2, 3] | [4, 3]"),)


def test_equal_bytes():
    again = lower(Model(in_parts=True), minimum_deployment_target=ct.target.iOS18)[1]
    assert again == lowered(in_parts=True)[1]


def test_summary(tmp_path):
    path = tmp_path / "enumerated.pte"
    path.write_bytes(lowered(in_parts=False)[1])
    ((delegate,),) = (method["delegates"] for method in summarize_pte(path)["methods"])
    assert delegate["options"]["enumerated_shapes"] == (
        "x [1, 5, 10], y [3, 11] | x [4, 6, 10], y [5, 11]"
    )
    (function,) = delegate["model"]["functions"]
    assert function["inputs"][0]["enumerated_shapes"] == LISTED["x"]
