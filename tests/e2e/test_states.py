"""Mutable buffers against eager torch, call after call: as states, and passed in and out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend.backend_api import to_backend
from support.lowering import Lowered, fp32_specs, lower
from support.partitioned import delegate_functions
from support.stateful import CASES, Buffers, Case
from support.tolerances import ATOL_RTOL

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import ContractError
from coreml_delegate.lowering.states import STARTED
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime.mil.program import StateType
from coreml_delegate.targets import Opset

CALLS = 4
ENGINES = ("reference", "openvino")


# One process lowers a model, for all its tests. All but every third model are slow.
_EACH = [
    pytest.param(
        name,
        marks=[
            pytest.mark.xdist_group(f"states of {name}"),
            *([pytest.mark.slow] if n % 3 else []),
        ],
    )
    for n, name in enumerate(CASES)
]


@functools.cache
def lowered(name: str, precision: Precision = Precision.FLOAT32, *, inside: bool = True) -> Lowered:
    case = CASES[name]
    specs = fp32_specs(compute_precision=precision)
    return lower(case.make(), case.inputs(0), compile_specs=specs, take_over_mutable_buffer=inside)


@functools.cache
def program_of(
    name: str, precision: Precision = Precision.FLOAT32, *, inside: bool = True
) -> bytes:
    return lowered(name, precision, inside=inside).pte


def assert_equal_eager(program: Any, case: Case, precision: str) -> None:
    module = case.make().eval()
    atol, rtol = ATOL_RTOL[precision]
    for call in range(CALLS):
        expected = module(*case.inputs(call))
        expected = list(expected) if isinstance(expected, tuple) else [expected]
        actual = program.run("forward", list(case.inputs(call)))
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def states(edge: Any) -> list[str]:
    params = [p for function in delegate_functions(edge) for p in function.params]
    return sorted(p.name for p in params if isinstance(p.type, StateType))


@pytest.mark.parametrize("name", _EACH)
def test_buffers_that_can_be_states_are(name: str) -> None:
    case, result = CASES[name], lowered(name)
    assert [name for name in states(result.edge) if name != STARTED] == sorted(case.states)
    buffers = result.report.buffers
    assert {b.name for b in buffers if b.is_state} == set(case.states)
    assert {b.name: b.reason for b in buffers if not b.is_state} == dict(case.outside)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", _EACH)
def test_calls_in_turn_equal_eager(name: str, engine: str) -> None:
    # Core ML's states are fp16, whatever the model computes in.
    precision = "fp16" if CASES[name].states else "fp32"
    program = runtime.load_program(program_of(name), engine=engine)
    assert_equal_eager(program, CASES[name], precision)


UNASKED = (
    "attention by index_copy",
    "convolution cache",
    "initial flags",
    "initial infinity",
    "several updates",
    "shift",
    "two partitions",
)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", UNASKED)
def test_no_state_is_made_unasked(name: str) -> None:
    result = lowered(name, inside=False)
    assert states(result.edge) == []
    assert {b.reason for b in result.report.buffers} == {
        "take_over_mutable_buffer=False was asked for"
    }
    program = runtime.load_program(program_of(name, inside=False))
    assert_equal_eager(program, CASES[name], "fp32")


ON_STOCK = (
    "attention by index_copy",
    "initial values of several",
    "initial values outside",
    "int32 from 3000 on",
    "scalar",
)


@pytest.mark.parametrize("name", ON_STOCK)
def test_on_the_stock_runtime(name: str) -> None:
    assert_equal_eager(runtime.load_program(program_of(name), host="stock"), CASES[name], "fp16")


HALF = ("attention by index_put", "initial values of several", "initial flags", "several updates")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HALF)
def test_in_half_precision(name: str, engine: str) -> None:
    pte = program_of(name, Precision.FLOAT16)
    assert_equal_eager(runtime.load_program(pte, engine=engine), CASES[name], "fp16")


def test_equal_bytes() -> None:
    case = CASES["initial values of several"]
    first, second = (lower(case.make(), case.inputs(0)).pte for _ in range(2))
    assert first == second


def test_a_target_without_states_is_an_error_only_if_there_are_any() -> None:
    specs = fp32_specs(minimum_deployment_target=Opset.iOS17)
    case = CASES["int64 scalar"]
    result = lower(case.make(), case.inputs(0), compile_specs=specs)
    assert_equal_eager(runtime.load_program(result.pte), case, "fp32")
    case = CASES["several buffers"]
    with pytest.raises(ContractError, match=r"need iOS18: got .* iOS17 and count, mean\."):
        lower(case.make(), case.inputs(0), compile_specs=specs)


def test_initial_values_in_the_report() -> None:
    expected = {"add_": "zero", "initial values": "constant", "initial values outside": "stored"}
    for name, initial in expected.items():
        buffers = lowered(name).report.buffers
        assert {b.name: b.initial for b in buffers} == {"total": initial}


def test_the_report_as_text() -> None:
    text = str(lowered("initial values").report)
    assert "total  float32[4]  state of coreml_0, kept as float16, at first a constant" in text
    text = str(lowered("int64 scalar").report)
    assert "count  int64[]  passed in and out: it is int64: Core ML states are fp16" in text
    (buffer,) = lowered("initial values").report.to_dict()["buffers"]
    assert (buffer["name"], buffer["nbytes"], buffer["partition"]) == ("total", 16, "coreml_0")


def test_integers_without_a_partitioner() -> None:
    """Where nothing can pass them in and out, what fp16 may not hold is an error."""
    case = CASES["int32"]
    edge = to_edge(torch.export.export(case.make().eval(), case.inputs(0)))
    with pytest.raises(ContractError, match=r"'count' cannot be a Core ML state: got torch.int32"):
        to_backend(CoreMLBackend.__name__, edge.exported_program(), fp32_specs())


def test_a_read_buffer_is_a_constant() -> None:
    module = Buffers(lambda m, x: x + m.offset, offset=torch.ones(4))
    result = lower(module, (torch.zeros(4),))
    assert result.report.buffers == ()
    assert states(result.edge) == []


def test_plan_knows_the_states() -> None:
    case = CASES["initial values"]
    exported = torch.export.export(case.make().eval(), case.inputs(0))
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    planned = partitioner.plan(exported)
    to_edge_transform_and_lower(exported, partitioner=[partitioner])
    assert planned.buffers == partitioner.report.buffers
