"""The stock runtime with a registered delegate, against eager torch and the Python host."""

from __future__ import annotations

import copy
import gc
import logging
import os
import struct
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from executorch.runtime import Runtime
from support.delegated import modules, scalar, two_methods
from support.eager_backend import BACKEND_ID, EagerDelegate
from support.gates import needs_compiler
from support.programs import CASES, export_case
from support.tolerances import ATOL_RTOL

from coreml_delegate.errors import (
    BlobFormatError,
    EngineUnavailableError,
    ExecutionError,
    InputError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime.program import stock
from coreml_delegate.runtime.program.delegate_interface import DelegatePayload
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.program.stock import StockProgram


def check_close(actual: list[object], expected: object) -> None:
    atol, rtol = ATOL_RTOL["fp32"]
    wanted = list(expected) if isinstance(expected, tuple) else [expected]
    torch.testing.assert_close(actual, wanted, atol=atol, rtol=rtol)


def load_mixed(loader=EagerDelegate, data: bytes | None = None) -> StockProgram:
    stock.register(loader, backend_id=BACKEND_ID)
    return StockProgram(two_methods() if data is None else data)


class Altered:
    """A loader whose delegates do something to their results first."""

    def __init__(self, alter):
        self.alter = alter

    def __call__(self, payload: DelegatePayload):
        inner, alter = EagerDelegate(payload), self.alter

        class Delegate:
            input_count = inner.input_count
            native = None

            def __call__(self, inputs):
                return alter(inner(inputs))

        return Delegate()


# --- programs without delegates -----------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_both_hosts_equal_eager(name: str) -> None:
    module, data = export_case(name)
    module = copy.deepcopy(module)  # buffers change
    program = StockProgram(data)
    python = PythonProgram(data, EagerDelegate)
    assert program.method_names == python.method_names
    for inputs in CASES[name].inputs:
        expected = module(*inputs)
        outputs = program.run("forward", inputs)
        check_close(outputs, expected)
        check_close(outputs, tuple(python.run("forward", inputs)))


def test_from_a_path(tmp_path: Path) -> None:
    module, data = export_case("arithmetic")
    path = tmp_path / "model.pte"
    path.write_bytes(data)
    inputs = CASES["arithmetic"].example
    check_close(StockProgram(path).run("forward", inputs), module(*inputs))


def test_inputs_of_any_strides() -> None:
    module, data = export_case("convolutions")
    program = StockProgram(data)
    (x,) = CASES["convolutions"].example
    for same in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().mT):
        check_close(program.run("forward", [same]), module(x))


def test_outputs_are_safe_to_keep() -> None:
    _, data = export_case("arithmetic")
    program = StockProgram(data)
    x, y = CASES["arithmetic"].example
    first = program.run("forward", [x, y])
    kept = tuple(output.clone() for output in first)
    program.run("forward", [x + 1, y - 1])
    check_close(first, kept)


def test_refusals() -> None:
    with pytest.raises(BlobFormatError, match="not an ExecuTorch program"):
        StockProgram(b"nonsense")
    data = export_case("arithmetic")[1]
    program = StockProgram(data)
    with pytest.raises(ProgramError, match="no such method: got 'other', expected 'forward'"):
        program.run("other", [])
    with pytest.raises(InputError, match="another number of inputs: got 0, expected 2"):
        program.run("forward", [])
    with pytest.raises(UnsupportedOpError, match=r"no kernel .* got aten::zz\.Tensor_out"):
        StockProgram(data.replace(b"aten::gt", b"aten::zz")).load_method()


@pytest.mark.parametrize("nbytes", [2**45, 2**62])
def test_more_memory_than_there_is(nbytes: int) -> None:
    data = export_case("arithmetic")[1]
    (sizes,) = (method.arena_sizes for method in PteProgram.open(data).methods)
    planned = struct.pack(f"<I{len(sizes)}q", len(sizes), *sizes)
    assert data.count(planned) == 1
    damaged = data.replace(planned, struct.pack("<I2q", 2, 0, nbytes))
    with pytest.raises(ProgramError, match=f"does not fit into memory: got {nbytes} bytes"):
        StockProgram(damaged)


def test_a_backend_that_is_not_registered() -> None:
    data = two_methods().replace(BACKEND_ID.encode(), b"NoSuchBackendYet")
    with pytest.raises(ProgramError, match="backend the runtime does not have: got NoSuchBackend"):
        StockProgram(data).load_method()


# --- delegates ----------------------------------------------------------------------------------


@needs_compiler
def test_delegates_equal_eager() -> None:
    loaded: list[EagerDelegate] = []

    def loader(payload: DelegatePayload) -> EagerDelegate:
        loaded.append(EagerDelegate(payload))
        return loaded[-1]

    program = load_mixed(loader)
    for rows in (5, 1, 6, 2, 6):
        x = torch.randn(rows, 4)
        check_close(program.run("forward", [x]), modules()["forward"](x))
    x = torch.randn(2)
    check_close(program.run("other", [x]), modules()["other"](x))
    assert [(d.payload.method_name, d.calls) for d in loaded] == [
        ("forward", 5),
        ("forward", 5),
        ("other", 1),
    ]


@needs_compiler
def test_the_runtime_itself_runs_delegates(tmp_path: Path) -> None:
    stock.register(EagerDelegate, backend_id=BACKEND_ID)
    path = tmp_path / "model.pte"
    path.write_bytes(two_methods())
    method = Runtime.get().load_program(path).load_method("forward")
    x = torch.randn(3, 4)
    check_close(method.execute([x]), modules()["forward"](x))


@needs_compiler
def test_the_last_loader_registered_wins() -> None:
    x = torch.randn(2, 4)
    before = load_mixed(Altered(lambda results: [result * 0 for result in results]))
    before.load_method("forward")
    after = load_mixed(EagerDelegate)
    check_close(after.run("forward", [x]), modules()["forward"](x))
    assert before.run("forward", [x])[1].abs().sum() == 0


@needs_compiler
def test_results_are_cast_and_scalars_may_come_as_one_element() -> None:
    loader = Altered(lambda results: [result.double().reshape(1) for result in results])
    x = torch.randn(3)
    check_close(load_mixed(loader, scalar()).run("forward", [x]), x.sum())


@needs_compiler
def test_a_delegate_is_dropped_with_its_program() -> None:
    loaded: list[weakref.ref[EagerDelegate]] = []

    def loader(payload: DelegatePayload) -> EagerDelegate:
        delegate = EagerDelegate(payload)
        loaded.append(weakref.ref(delegate))
        return delegate

    program = load_mixed(loader)
    program.load_method("other")
    assert loaded[0]() is not None
    del program
    gc.collect()
    assert loaded[0]() is None


@needs_compiler
def test_named_data_is_for_loading_only() -> None:
    payloads: list[DelegatePayload] = []

    def loader(payload: DelegatePayload) -> EagerDelegate:
        payloads.append(payload)
        return EagerDelegate(payload)

    program = load_mixed(loader)
    program.load_method("forward")
    with pytest.raises(ProgramError, match="named data can be read only while"):
        payloads[0].named_data("anything")


@needs_compiler
@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda results: results[:-1], "wrong number of outputs"),
        (lambda results: [r.unsqueeze(0) for r in results], "wrong shape: got .* expected rank 2"),
        (
            lambda results: [r.repeat(9, 1) for r in results],
            r"cannot resize .* got shape \[54, 3\]",
        ),
    ],
)
def test_delegate_results_of_wrong_count_or_shape_are_errors(alter, reason: str) -> None:
    program = load_mixed(Altered(alter))
    with pytest.raises(ExecutionError, match=reason):
        program.run("forward", [torch.randn(6, 4)])


@needs_compiler
def test_a_failing_delegate_and_the_program_after_it() -> None:
    failing = [True]

    def alter(results):
        if failing[0]:
            raise ZeroDivisionError("on purpose")
        return results

    program = load_mixed(Altered(alter))
    x = torch.randn(2, 4)
    with pytest.raises(
        ExecutionError, match="failed to run method 'forward': got on purpo"
    ) as info:
        program.run("forward", [x])
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    failing[0] = False
    check_close(program.run("forward", [x]), modules()["forward"](x))


@needs_compiler
def test_our_own_errors_arrive_as_they_are() -> None:
    def refuse(payload: DelegatePayload):
        raise InputError("this delegate is not for us")

    with pytest.raises(InputError, match="this delegate is not for us") as info:
        load_mixed(refuse).load_method("forward")
    assert info.value.__notes__ == ["in a delegate of method 'forward' on the stock runtime"]


@needs_compiler
def test_an_interrupt_arrives_as_one() -> None:
    def alter(results):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_mixed(Altered(alter)).run("forward", [torch.randn(2, 4)])


@needs_compiler
def test_callers_of_the_plain_runtime_find_the_traceback_in_the_log(caplog) -> None:
    def alter(results):
        raise ZeroDivisionError("on purpose")

    stock.register(Altered(alter), backend_id=BACKEND_ID)
    method = Runtime.get().load_program(two_methods()).load_method("forward")
    with (
        caplog.at_level(logging.ERROR, logger="coreml_delegate"),
        pytest.raises(RuntimeError, match="0x1"),
    ):
        method.execute([torch.randn(2, 4)])
    (record,) = caplog.records
    assert record.getMessage() == "executing a delegate failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@needs_compiler
def test_threads_take_turns() -> None:
    program = load_mixed()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for rows in (1, 3, 6) * 5:
                x = torch.randn(rows, 4)
                check_close(program.run("forward", [x]), modules()["forward"](x))
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_compiler
@pytest.mark.slow
def test_a_process_that_used_threads_on_the_plain_runtime_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(two_methods())
    script = textwrap.dedent(
        f"""
        import threading, torch
        from coreml_delegate.runtime.program import stock
        from support.eager_backend import EagerDelegate
        from executorch.runtime import Runtime
        stock.register(EagerDelegate, backend_id={BACKEND_ID!r})
        programs = [Runtime.get().load_program({str(path)!r}) for _ in range(4)]
        methods = [program.load_method("forward") for program in programs]
        # The runtime's first call starts its thread pool and logs meanwhile, which lets another
        # thread wait for that very pool while holding the interpreter: upstream, and a deadlock.
        methods[0].execute([torch.randn(3, 4)])
        def work(method):
            for _ in range(50):
                method.execute([torch.randn(3, 4)])
        threads = [threading.Thread(target=work, args=(method,)) for method in methods]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print("done")
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        timeout=120,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr[-2000:]


@needs_compiler
def test_the_name_of_another_backend_is_taken() -> None:
    with pytest.raises(EngineUnavailableError, match="another backend of this name already"):
        stock.register(EagerDelegate, backend_id="XnnpackBackend")
