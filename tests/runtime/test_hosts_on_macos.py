"""The choice of a host where Core ML is, by machines that only look like one."""

from __future__ import annotations

import functools

import pytest
import torch
from support import core_ml
from support.kept_and_flexible import Counting, counting_steps, lower_stateful
from support.lowering import lower
from support.tolerances import ATOL_RTOL

from coreml_delegate import runtime
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.runtime import EngineOptions, hosts
from coreml_delegate.runtime.program import shim

REFUSED = "ExecuTorch's Core ML backend for macOS keeps no state, which forward has"


@functools.cache
def stateful() -> bytes:
    return lower_stateful(Counting())


@functools.cache
def stateless() -> bytes:
    return lower(torch.nn.ReLU(), (torch.ones(3),)).pte


class _Stock:
    """Stands in for the loaded program of ExecuTorch's runtime."""

    host_name = "stock"
    method_names = ()

    def __init__(self, _pte, *, rejected_hosts, **_options):
        self.rejected_hosts = rejected_hosts


@pytest.fixture(autouse=True)
def _like_a_mac(monkeypatch):
    monkeypatch.setattr(shim, "load_shim", lambda: pytest.fail("the shim is loaded"))
    monkeypatch.setattr(shim, "unavailable_reason", lambda: pytest.fail("it is asked for"))
    monkeypatch.setattr(hosts, "StockProgram", _Stock)
    with core_ml.strict():
        yield


@pytest.fixture
def without_python(monkeypatch):
    def refuse(method):
        raise ProgramError("a delegate of another backend", got="XnnpackBackend")

    monkeypatch.setattr(hosts.python, "check_support", refuse)


def test_states_run_on_the_python_host_by_core_ml():
    program = runtime.load_program(stateful())
    assert (program.host_name, program.rejected_hosts) == ("python", {})
    module = Counting()
    atol, rtol = ATOL_RTOL["fp16"]
    for step in counting_steps():
        expected = list(module(*step))
        torch.testing.assert_close(program.run("forward", step), expected, atol=atol, rtol=rtol)
    (delegate,) = program.delegates("forward")
    assert delegate.model.engine_name == "coreml"
    assert delegate.python_reason == "Core ML is called in Python"
    program.reset_state()
    first = counting_steps()[0]
    torch.testing.assert_close(program.run("forward", first), list(Counting()(*first)))


def test_the_stock_host_runs_what_the_python_host_cannot(without_python):
    for options in ({}, {"engine": "coreml"}, {"options": EngineOptions(threads=1)}):
        program = runtime.load_program(stateless(), **options)
        assert program.host_name == "stock"
        assert list(program.rejected_hosts) == ["python"]


@pytest.mark.parametrize(
    ("options", "demand"),
    [
        ({"engine": "reference"}, "engine='reference'"),
        ({"options": EngineOptions(precision="bf16")}, "precision='bf16'"),
        ({"options": EngineOptions(exact_nan=True)}, "exact_nan=True"),
        ({"options": EngineOptions(dynamic_quantization=True)}, "dynamic_quantization=True"),
        (
            {"options": EngineOptions(compute_unit="cpu_only")},
            "a compute unit beside the program's own",
        ),
    ],
)
def test_the_stock_host_has_no_engine_of_ours(options, demand, without_python):
    program = runtime.load_program(stateless(), **options)
    assert program.host_name == "python"
    assert program.rejected_hosts["stock"] == (f"Core ML's own backend does not take {demand}",)
    for ask in (
        lambda: runtime.load_program(stateless(), host="stock", **options),
        lambda: runtime.register(**options),
    ):
        with pytest.raises(OptionError, match=f"got {demand}"):
            ask()


def test_states_do_not_run_on_the_stock_host_unasked(without_python, caplog):
    program = runtime.load_program(stateful())
    assert program.host_name == "python"
    assert program.rejected_hosts["stock"] == (REFUSED,)
    assert f"the stock host cannot ({REFUSED})" in caplog.text


def test_an_explicit_host_decides(caplog):
    without, with_states = stateless(), stateful()
    caplog.clear()  # lowering them says something, too
    assert runtime.load_program(without, host="stock").host_name == "stock"
    assert not caplog.records
    assert runtime.load_program(with_states, host="stock").host_name == "stock"
    assert [record.getMessage() for record in caplog.records] == [REFUSED]


def test_nothing_is_registered():
    runtime.register()
    runtime.register(engine="coreml")
