"""The choice of the host that executes a program, and what is logged of it."""

from __future__ import annotations

import json

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.gates import needs_compiler
from support.lowering import fp32_specs
from support.programs import export_case
from support.tolerances import ATOL_RTOL

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import ProgramError, UnsupportedOpError
from coreml_delegate.runtime.program import stock
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")


class Perceptron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.second(torch.atan(self.first(x)))


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    return torch.export.export(Perceptron().eval(), (torch.randn(2, 4),))


@pytest.fixture(scope="module")
def pte(exported, tmp_path_factory):
    """XNNPACK has the linear layers, Core ML the arctangent between them."""
    partitioners = [XnnpackPartitioner(), CoreMLPartitioner(compile_specs=fp32_specs())]
    edge = to_edge_transform_and_lower(exported, partitioner=partitioners)
    path = tmp_path_factory.mktemp("hosts") / "beside.pte"
    path.write_bytes(edge.to_executorch().buffer)
    return path


@needs_compiler
def test_the_stock_host_runs_what_the_python_host_cannot(pte, exported, caplog):
    program = runtime.load_program(pte)
    assert program.host_name == "stock"
    reason = "method 'forward' has a delegate of another backend: XnnpackBackend"
    assert program.rejected_hosts == {"python": (reason,)}
    assert f"beside.pte runs on the stock host: the python host cannot ({reason})" in caplog.text
    x = torch.randn(2, 4)
    atol, rtol = ATOL_RTOL["fp32"]
    (actual,) = program.run("forward", [x])
    torch.testing.assert_close(actual, exported.module()(x), atol=atol, rtol=rtol)


@needs_compiler
def test_the_command_runs_such_a_program(pte, exported, tmp_path, capsys):
    source = tmp_path / "model.pt2"
    torch.export.save(exported, source)
    for command in (["run", str(pte)], ["verify", str(source), str(pte), "--min-sqnr", "100"]):
        assert main([*command, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)
        assert "warning: " in captured.err
        assert "beside.pte runs on the stock host: the python host cannot (" in captured.err
    assert main(["run", str(pte), "--host", "python"]) == 1
    assert "got XnnpackBackend, expected CoreMLBackend" in capsys.readouterr().err


@needs_compiler
def test_its_core_ml_delegates_are_traced(pte, tmp_path, capsys):
    folder = str(tmp_path / "packages")
    assert main(["extract", str(pte), "-o", folder, "--json"]) == 0
    names = [name for found in json.loads(capsys.readouterr().out) for name in found["delegates"]]
    assert main(["trace", str(pte), "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in traced] == names != ["forward_0"]
    assert {value["op"] for model in traced for value in model["worst"]} == {"atan"}


def test_without_the_stock_host_the_reasons_of_both_hosts_are_logged(pte, monkeypatch, caplog):
    monkeypatch.setattr(stock, "unavailable_reason", lambda: "no compiler")
    program = runtime.load_program(pte)
    assert program.host_name == "python"
    assert program.rejected_hosts["stock"] == ("no compiler",)
    assert "no host runs all of" in caplog.text
    assert "XnnpackBackend); the stock host cannot (no compiler)" in caplog.text
    with pytest.raises(ProgramError, match="another backend: got XnnpackBackend"):
        program.run("forward", [torch.randn(2, 4)])


@needs_compiler
def test_the_stock_host_takes_one_file_of_data(pte):
    program = runtime.load_program(pte, data=[])
    assert program.host_name == "python"
    assert program.rejected_hosts["stock"] == ("it takes one file of external data",)


@needs_compiler
def test_an_operator_that_no_host_has_is_an_error(caplog):
    data = export_case("arithmetic")[1].replace(b"aten::gt", b"aten::zz")
    program = runtime.load_program(data)
    assert program.host_name == "python"
    for reasons in program.rejected_hosts.values():
        assert [reason.rpartition(": ")[2] for reason in reasons] == ["aten::zz.Tensor_out"]
    assert program.rejected_hosts.keys() == {"python", "stock"}
    assert "no host runs all of <bytes>: " in caplog.text
    with pytest.raises(UnsupportedOpError, match=r"got aten::zz\.Tensor_out"):
        program.load_method()


def test_the_stock_host_is_not_asked_where_the_python_host_can(monkeypatch, caplog):
    monkeypatch.setattr(stock, "unavailable_reason", lambda: pytest.fail("asked"))
    program = runtime.load_program(export_case("arithmetic")[1])
    assert (program.host_name, program.rejected_hosts) == ("python", {})
    assert not caplog.records


@needs_compiler
def test_no_host_is_recommended_that_does_not_run_the_program():
    class Products(Perceptron):
        def forward(self, x):
            return super().forward(x).logcumsumexp(1)

    exported = torch.export.export(Products().eval(), (torch.randn(2, 4),))
    with torch.no_grad():
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner(), CoreMLPartitioner(compile_specs=fp32_specs())],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    program = bytes(edge.to_executorch().buffer)
    for host in ("auto", "python"):
        with pytest.raises(ProgramError, match="another backend: got XnnpackBackend") as raised:
            runtime.load_program(program, host=host).load_method()
        assert "the stock host does not run it either" in str(raised.value.remedy)
        assert "aten::logcumsumexp.out" in str(raised.value.remedy)
    with pytest.raises(UnsupportedOpError, match=r"got aten::logcumsumexp\.out") as refused:
        runtime.load_program(program, host="stock")
    assert "Python host" not in str(refused.value.remedy)
