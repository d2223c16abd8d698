"""Reset, snapshot and restore: of a model's states, and of all that a program keeps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs, lower
from support.stateful import CASES
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.runtime.program.pte import PteProgram

HOSTS = ("python", "stock")
ENGINES = ("reference", "openvino")


@functools.cache
def pte(name: str, *, inside: bool = True) -> bytes:
    case = CASES[name]
    return lower(case.make(), case.inputs(0), take_over_mutable_buffer=inside).pte


def calls(program: Any, name: str, *numbers: int) -> list[torch.Tensor]:
    return [program.run("forward", list(CASES[name].inputs(n)))[0] for n in numbers]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["several buffers", "initial values"])
def test_a_restored_program_repeats_its_outputs(name: str, host: str, engine: str) -> None:
    program = runtime.load_program(pte(name), host=host, engine=engine)
    first = calls(program, name, 0, 1)
    snapshot = program.snapshot_state()
    then = calls(program, name, 2, 3)
    program.restore_state(snapshot)
    assert_equal(calls(program, name, 2, 3), then)
    program.reset_state()
    assert_equal(calls(program, name, 0, 1), first)
    other = runtime.load_program(pte(name), host=host, engine=engine)
    assert_equal(calls(other, name, 0, 1), first)  # nothing is shared
    other.reset_state()
    other.restore_state(snapshot)
    assert_equal(calls(other, name, 2, 3), then)


def test_a_snapshot_is_plain_arrays_that_nothing_changes() -> None:
    program = runtime.load_program(pte("several buffers"))
    fresh = program.snapshot_state()
    assert {name: (array.dtype, array.shape) for name, array in fresh.items()} == {
        "forward.0.count": (np.dtype(np.float16), (1,)),
        "forward.0.mean": (np.dtype(np.float16), (4,)),
    }
    calls(program, "several buffers", 0)
    assert not any(array.any() for array in fresh.values())
    after = program.snapshot_state()
    assert after["forward.0.count"] == 1
    after["forward.0.count"][:] = 7
    assert program.snapshot_state()["forward.0.count"] == 1


@pytest.mark.parametrize("name", ["initial values", "int32 from 3000 on"])
def test_snapshots_include_buffers_outside_of_delegates(name: str) -> None:
    data = pte(name, inside=False)
    program = runtime.load_program(data)
    first = calls(program, name, 0, 1)
    snapshot = program.snapshot_state()
    ((place, array),) = snapshot.items()
    assert place.startswith("forward.buffer.")
    assert array.dtype in (np.float32, np.int32)
    then = calls(program, name, 2)
    program.reset_state()
    assert_equal(calls(program, name, 0, 1), first)
    program.restore_state(snapshot)
    assert_equal(calls(program, name, 2), then)


@pytest.mark.parametrize("operation", ["reset_state", "snapshot_state"])
def test_the_stock_runtime_does_not_expose_its_own_buffers(operation: str) -> None:
    program = runtime.load_program(pte("initial values", inside=False), host="stock")
    with pytest.raises(ProgramError, match=r"got 1 mutable buffer\(s\) outside of delegates"):
        getattr(program, operation)()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("forward.0.mean"), "snapshot lacks states: .* forward.0.mean as well"),
        (lambda s: s.update(other=np.zeros(1)), "no such state: got 'other', expected forward.0.c"),
        (
            lambda s: s.update({"forward.0.mean": np.zeros(5)}),
            r"'forward.0.mean' has another shape: got \(5,\), expected \(4,\)",
        ),
        (
            lambda s: s.update({"forward.0.mean": np.zeros(4, complex)}),
            "'forward.0.mean' has another dtype: got complex128, expected float16",
        ),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_snapshots_that_do_not_fit_change_nothing(host: str, change: Any, message: str) -> None:
    program = runtime.load_program(pte("several buffers"), host=host)
    calls(program, "several buffers", 0)
    before = program.snapshot_state()
    wrong = {name: array + 1 for name, array in before.items()}
    change(wrong)
    with pytest.raises(InputError, match=message):
        program.restore_state(wrong)
    after = program.snapshot_state()
    assert all(np.array_equal(after[name], array) for name, array in before.items())


def test_programs_without_states() -> None:
    data = lower(nn.ReLU(), (torch.zeros(3),)).pte
    for host in HOSTS:
        program = runtime.load_program(data, host=host)
        assert program.snapshot_state() == {}
        program.restore_state({})
        program.reset_state()


def test_methods_have_separate_states() -> None:
    case = CASES["add_"]
    specs = fp32_specs()
    programs = {
        name: torch.export.export(CASES[kind].make().eval(), case.inputs(0))
        for name, kind in (("one", "add_"), ("two", "several buffers"))
    }
    edge = to_edge_transform_and_lower(
        programs, partitioner=[CoreMLPartitioner(compile_specs=specs)]
    )
    data = edge.to_executorch().buffer
    for host in HOSTS:
        program = runtime.load_program(data, host=host)
        program.run("one", list(case.inputs(0)))
        snapshot = program.snapshot_state()
        assert sorted(snapshot) == ["one.0.total", "two.0.count", "two.0.mean"]
        assert snapshot["one.0.total"].any()
        assert not snapshot["two.0.count"].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_a_model(engine: str) -> None:
    (info,) = PteProgram.open(pte("add_")).method("forward").delegates
    model = runtime.load_blob(info.processed, engine=engine)
    state, other = model.make_state(), model.make_state()
    assert state is not None
    assert other is not None
    (x,) = CASES["add_"].inputs(0)
    inputs = {model.input_names[0]: x.numpy()}
    (first,) = model.predict(inputs, state).values()
    held = state.snapshot()
    np.testing.assert_array_equal(held["total"], x.numpy().astype(np.float16))
    model.predict(inputs, state)
    assert not other.snapshot()["total"].any()
    other.restore(held)
    model.predict(inputs, other)
    np.testing.assert_array_equal(other.snapshot()["total"], state.snapshot()["total"])
    state.reset()
    (again,) = model.predict(inputs, state).values()
    np.testing.assert_array_equal(again, first)
    with pytest.raises(InputError, match="snapshot lacks states: got nothing, expected total"):
        state.restore({})
