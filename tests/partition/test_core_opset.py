"""Operators outside the core ATen opset: ExecuTorch's check, and what excepts them from it."""

from __future__ import annotations

import logging

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from ops import core_opset_table
from support.lowering import fp32_specs
from support.tolerances import ATOL_RTOL
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram

from coreml_delegate import CoreMLPartitioner, runtime

RANDN, RAND = torch.ops.aten.randn_like.default, torch.ops.aten.rand_like.default


class Noisy(torch.nn.Module):
    """Two such operators that Core ML takes, and a composite one that it keeps whole."""

    def forward(self, x):
        x = torch.nn.functional.gelu(x)
        return (torch.randn_like(x) + torch.rand_like(x)) * 0 + x


class Cumulative(torch.nn.Module):
    """One that Core ML takes, and one that it does not."""

    def forward(self, x):
        return torch.rand_like(x) * 0 + torch.logcumsumexp(x, 0)


def exported(module: torch.nn.Module) -> ExportedProgram:
    return torch.export.export(module, (torch.randn(4, 3),))


def test_what_core_ml_takes_is_excepted(caplog):
    program = exported(Noisy())
    with pytest.raises(SpecViolationError, match="not in Core ATen opset"):
        to_edge_transform_and_lower(program, partitioner=[CoreMLPartitioner()])
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), strict=True)
    with caplog.at_level(logging.WARNING, "coreml_delegate"):
        config = partitioner.edge_compile_config(program)
    assert not caplog.records
    assert config._check_ir_validity
    assert config._core_aten_ops_exception_list == [RAND, RANDN]
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)
    x = torch.randn(4, 3)
    (result,) = runtime.load_program(edge.to_executorch().buffer).run("forward", [x])
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(result, torch.nn.functional.gelu(x), atol=atol, rtol=rtol)


def test_what_stays_on_the_cpu_is_named_and_still_refused(caplog):
    program = exported(Cumulative())
    partitioner = CoreMLPartitioner()
    with caplog.at_level(logging.WARNING, "coreml_delegate.partition.partitioner"):
        config = partitioner.edge_compile_config(program)
    assert config._core_aten_ops_exception_list == [RAND]
    start = "ExecuTorch refuses aten.logcumsumexp.default, outside the core"
    assert any(record.getMessage().startswith(start) for record in caplog.records)
    with pytest.raises(SpecViolationError, match=r"aten\.logcumsumexp\.default"):
        to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)


def test_a_program_of_core_operators_needs_no_exception():
    program = exported(torch.nn.Linear(3, 4))
    assert CoreMLPartitioner().edge_compile_config(program)._core_aten_ops_exception_list == []


def test_the_table_of_the_core_opset_is_that_of_today():
    text = core_opset_table.PAGE.read_text()
    assert core_opset_table.page(text) == text, "run python -m tests.ops.core_opset_table"
