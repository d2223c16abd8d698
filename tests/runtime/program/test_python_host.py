"""The Python host against eager torch, and its refusals."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import threading
from collections.abc import Sequence

import pytest
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from support.delegated import modules, one_input, scalar, two_methods
from support.eager_backend import BACKEND_ID, EagerDelegate, lower
from support.programs import CASES, Arithmetic, Counter, export, export_case
from support.tolerances import ATOL_RTOL

from coreml_delegate.errors import (
    ExecutionError,
    InputError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime.program import host, kernels
from coreml_delegate.runtime.program.delegate_interface import DelegatePayload
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.pte import PteProgram


def no_delegates(payload: DelegatePayload) -> EagerDelegate:
    raise AssertionError("this program has no delegates")


def outputs_of(result: object) -> list[object]:
    return list(result) if isinstance(result, tuple) else [result]


def check_close(actual: list[object], expected: list[object]) -> None:
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def load_mixed(loader=EagerDelegate) -> PythonProgram:
    return PythonProgram(two_methods(), loader, backend_id=BACKEND_ID)


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    module, data = export_case(name)
    module = copy.deepcopy(module)  # buffers change
    program = PythonProgram(data, no_delegates)
    assert program.method_names == ("forward",)
    for inputs in CASES[name].inputs:
        expected = outputs_of(module(*inputs))
        check_close(program.run("forward", inputs), expected)


class Rounded(torch.nn.Module):
    """Rounds to integers of 8 bits and back, by ExecuTorch's kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        rounded = ops.quantize_per_tensor.default(x * 2, 0.1, 0, -128, 127, torch.int8)
        return ops.dequantize_per_tensor.default(rounded, 0.1, 0, -128, 127, torch.int8) + 1


def test_kernels_of_executorch_give_tensors_of_any_size() -> None:
    """They end the process if a result that they resize has another rank."""
    importlib.import_module("executorch.kernels.quantized")
    batch = {0: torch.export.Dim("batch", max=8)}
    data = export(Rounded(), (torch.randn(3, 2, 4, 5),), (batch,))
    program = PythonProgram(data, no_delegates)
    for size in (3, 8, 1):
        x = torch.randn(size, 2, 4, 5)
        check_close(program.run("forward", (x,)), [Rounded()(x)])


def test_from_a_path(tmp_path) -> None:
    module, data = export_case("convolutions")
    path = tmp_path / "model.pte"
    path.write_bytes(data)
    program = PythonProgram(path, no_delegates)
    (x,) = CASES["convolutions"].example
    check_close(program.run("forward", [x]), [module(x)])
    assert path.read_bytes() == data


def test_inputs_of_any_strides() -> None:
    module, data = export_case("convolutions")
    program = PythonProgram(data, no_delegates)
    (x,) = CASES["convolutions"].example
    for same in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().mT):
        check_close(program.run("forward", [same]), [module(x)])


def test_inputs_that_require_gradients() -> None:
    module, data = export_case("unplanned_io")
    program = PythonProgram(data, no_delegates)
    inputs = [x.clone().requires_grad_() for x in CASES["unplanned_io"].example]
    check_close(program.run("forward", inputs), outputs_of(module(*CASES["unplanned_io"].example)))


def test_outputs_are_safe_to_keep_and_inputs_untouched() -> None:
    _, data = export_case("arithmetic")
    program = PythonProgram(data, no_delegates)
    x, y = CASES["arithmetic"].example
    before = x.clone()
    first = program.run("forward", [x, y])
    kept = [output.clone() for output in first]
    program.run("forward", [x + 1, y - 1])
    check_close(first, kept)
    assert torch.equal(x, before)


def test_buffers_belong_to_the_loaded_program() -> None:
    _, data = export_case("counter")
    one, two = (PythonProgram(data, no_delegates) for _ in range(2))
    ones = torch.ones(2)
    check_close(one.run("forward", [ones]), [torch.tensor([8.0, 10.0])])
    check_close(one.run("forward", [ones]), [torch.tensor([10.0, 12.0])])
    check_close(two.run("forward", [ones]), [torch.tensor([8.0, 10.0])])


# --- delegates ----------------------------------------------------------------------------------


def test_delegates_of_two_methods() -> None:
    loaded: list[EagerDelegate] = []

    def loader(payload: DelegatePayload) -> EagerDelegate:
        loaded.append(EagerDelegate(payload))
        return loaded[-1]

    program = load_mixed(loader)
    assert not loaded  # methods are prepared when first used
    for rows in (5, 1, 6, 2):
        x = torch.randn(rows, 4)
        check_close(program.run("forward", [x]), outputs_of(modules()["forward"](x)))
    assert [(d.payload.method_name, d.calls) for d in loaded] == [("forward", 4)] * 2
    program.load_method("other")
    assert loaded[-1].payload.method_name == "other"
    x = torch.randn(2)
    check_close(program.run("other", [x]), [modules()["other"](x)])


class Altered:
    """A delegate whose results are altered on the way."""

    def __init__(self, alter):
        self.alter = alter

    def __call__(self, payload: DelegatePayload):
        inner = EagerDelegate(payload)

        class Delegate:
            input_count = inner.input_count
            native = None
            alter = staticmethod(self.alter)

            def __call__(self, inputs):
                return self.alter(inner(inputs))

        return Delegate()


@pytest.mark.parametrize(("shared_with_cpu", "copied"), [(False, False), (True, True)])
def test_an_input_for_delegates_alone_is_not_copied(shared_with_cpu: bool, copied: bool) -> None:
    taken: list[int] = []

    def loader(payload: DelegatePayload):
        inner = EagerDelegate(payload)

        class Delegate:
            input_count = inner.input_count
            native = None

            def __call__(self, inputs):
                taken.extend(tensor.data_ptr() for tensor in inputs)
                return inner(inputs)

        return Delegate()

    module, pte = one_input(shared_with_cpu=shared_with_cpu)
    program = PythonProgram(pte, loader, backend_id=BACKEND_ID)
    x = torch.randn(3, 4)
    for strided in (x, torch.randn(4, 3).T):
        check_close(program.run("forward", [strided]), outputs_of(module(strided)))
    assert (x.data_ptr() not in taken) is copied


class Viewed(torch.nn.Module):
    """A delegate, and a kernel that reads the delegate's input or result in another shape."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x):
        y = torch.relu(x) + x
        return y, torch.sin((x if self.of == "input" else y).view(4, 3))


@pytest.mark.parametrize("of", ["input", "result"])
def test_a_kernel_reads_a_view_of_what_a_delegate_uses(of: str) -> None:
    """No instruction is left of the view: its tensor lies where the planner puts its source."""
    module, x = Viewed(of), torch.randn(3, 4)
    pte = lower({"forward": (module, (x,), None)}, "aten.relu.default", "aten.add.Tensor")
    (method,) = PteProgram.open(pte).methods
    assert set(method.operators) == {"aten::sin.out"}
    program = PythonProgram(pte, EagerDelegate, backend_id=BACKEND_ID)
    check_close(program.run("forward", [x]), outputs_of(module(x)))


def test_results_are_cast_to_the_programs_dtype() -> None:
    program = load_mixed(Altered(lambda results: [result.double() for result in results]))
    x = torch.randn(2, 4)
    outputs = program.run("forward", [x])
    assert {output.dtype for output in outputs} == {torch.float32}
    check_close(outputs, outputs_of(modules()["forward"](x)))


def test_a_scalar_may_come_as_one_element() -> None:
    loader = Altered(lambda results: [result.reshape(1) for result in results])
    program = PythonProgram(scalar(), loader, backend_id=BACKEND_ID)
    x = torch.randn(3)
    check_close(program.run("forward", [x]), [x.sum()])


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda results: results[:-1], "wrong number of outputs: got"),
        (lambda results: [r.unsqueeze(0) for r in results], "wrong shape: got .* expected rank 2"),
        (lambda results: [r.repeat(9, 1) for r in results], "delegate 0 .* failed: .*resiz"),
    ],
)
def test_delegate_results_of_wrong_count_or_shape_are_errors(alter, reason: str) -> None:
    program = load_mixed(Altered(alter))
    with pytest.raises(ExecutionError, match=reason):
        program.run("forward", [torch.randn(6, 4)])


def test_a_failing_delegate_is_named_and_the_program_survives() -> None:
    failing = [True]

    def alter(results):
        if failing[0]:
            raise ZeroDivisionError("on purpose")
        return results

    program = load_mixed(Altered(alter))
    x = torch.randn(2, 4)
    with pytest.raises(
        ExecutionError,
        match=r"delegate 0 \(instruction 0 of method 'forward'\) failed: on purpose: "
        r"got arguments \(float32\[2, 4\]",
    ) as caught:
        program.run("forward", [x])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    failing[0] = False
    check_close(program.run("forward", [x]), outputs_of(modules()["forward"](x)))


def test_our_own_errors_pass_with_a_note() -> None:
    def alter(results):
        raise InputError("input 'x' is wrong")

    with pytest.raises(InputError, match="input 'x' is wrong") as caught:
        load_mixed(Altered(alter)).run("forward", [torch.randn(2, 4)])
    assert caught.value.__notes__ == ["in delegate 0 (instruction 0 of method 'forward')"]


def test_a_delegate_of_another_backend() -> None:
    program = PythonProgram(two_methods(), EagerDelegate)
    with pytest.raises(
        ProgramError, match="another backend: got EagerTestBackend, expected CoreMLBackend"
    ):
        program.run("forward", [torch.randn(2, 4)])


def test_a_delegate_that_wants_more_inputs_than_it_gets() -> None:
    def loader(payload: DelegatePayload):
        delegate = EagerDelegate(payload)
        delegate.placeholders = ["x"] * 9
        return delegate

    with pytest.raises(ProgramError, match="takes more inputs than the program passes"):
        load_mixed(loader).load_method("forward")


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([], r"another number of inputs: got 0, expected 1: float32\[<=6, <=4\]"),
        (
            [torch.randn(7, 4)],
            r"input 0 .* wrong shape: got float32\[7, 4\] \(7 in dimension 0, at most 6\), "
            r"expected float32\[<=6, <=4\]",
        ),
        ([torch.randn(4)], r"got float32\[4\]"),
        ([torch.ones(2, 4, dtype=torch.int64)], r"wrong dtype: got int64\[2, 4\]"),
        ([3], "is no tensor: got 3"),
        ([torch.randn(2, 4).to_sparse()], "not a dense tensor on the CPU: got torch.sparse_coo"),
        ([torch.empty(2, 4, device="meta")], "got torch.strided on meta"),
    ],
)
def test_wrong_inputs_are_refused(inputs: list[object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_mixed().run("forward", inputs)


def test_an_input_fixed_at_export() -> None:
    class Scale(torch.nn.Module):
        def forward(self, x, factor):
            return x * factor

    x = torch.randn(3)
    program = PythonProgram(export(Scale(), (x, 2)), no_delegates)
    check_close(program.run("forward", [x, 2]), [x * 2])
    with pytest.raises(InputError, match=r"input 1 .* was fixed at export: got 3, expected 2"):
        program.run("forward", [x, 3])


def test_unknown_operator() -> None:
    data = export_case("arithmetic")[1].replace(b"aten::gt", b"aten::zz")
    with pytest.raises(UnsupportedOpError, match=r"got aten::zz\.Tensor_out\. Import the library"):
        PythonProgram(data, no_delegates).load_method()


def test_a_failing_kernel_is_named() -> None:
    data = export_case("data_dependent")[1]
    with pytest.raises(
        ExecutionError, match=r"aten::full\.out \(instruction \d+ of method 'forward'\) failed"
    ) as caught:
        PythonProgram(data, no_delegates).run("forward", [torch.tensor([90, 1])])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_run_that_failed_leaves_no_loop_counter_behind(monkeypatch) -> None:
    name = "executorch_prim::eq.Scalar"
    calls: list[int] = []

    def eq(a, b):
        calls.append(a)
        if len(calls) == 2:  # in the second turn of the loop, its counter advanced
            raise ZeroDivisionError("on purpose")
        return a == b

    failing = dataclasses.replace(kernels.find_kernel(name), function=eq)
    monkeypatch.setitem(kernels._OWN, name, failing)
    module, data = export_case("rows")
    program = PythonProgram(data, no_delegates)
    inputs = CASES["rows"].example
    with pytest.raises(
        ExecutionError, match=r"eq\.Scalar \(instruction \d+ .* got arguments \(2, 3"
    ):
        program.run("forward", inputs)
    check_close(program.run("forward", inputs), [module(*inputs)])


# --- external data ------------------------------------------------------------------------------


def test_constants_outside_the_program() -> None:
    module = torch.nn.Linear(3, 2).eval()
    x = torch.randn(1, 3)
    manager = to_edge(
        torch.export.export(module, (x,)),
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    ).to_executorch(
        ExecutorchBackendConfig(
            external_constants=lambda node: "weights",
        )
    )
    stored = {
        "weight": memoryview(module.weight.detach().numpy()).cast("B"),
        "bias": memoryview(module.bias.detach().numpy()).cast("B"),
    }
    program = PythonProgram(PteProgram.open(manager.buffer).with_external(stored.get), no_delegates)
    check_close(program.run("forward", [x]), [module(x)])
    with pytest.raises(
        ProgramError, match=r"keeps 2 tensor\(s\) outside the .pte: got weight \(no"
    ):
        PythonProgram(manager.buffer, no_delegates)


# --- several methods and threads ----------------------------------------------------------------


def test_methods_keep_their_buffers_apart() -> None:
    """Activations of one method must not land in the buffers of another."""
    ones = torch.ones(2)
    program = to_edge(
        {
            "count": torch.export.export(Counter(), (ones,)),
            "calculate": torch.export.export(Arithmetic(), (ones.view(1, 2), ones.view(1, 2))),
        },
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    ).to_executorch(CASES["counter"].config)
    host = PythonProgram(program.buffer, no_delegates)
    check_close(host.run("count", [ones]), [torch.tensor([8.0, 10.0])])
    host.run("calculate", [ones.view(1, 2) * 50, ones.view(1, 2)])
    check_close(host.run("count", [ones]), [torch.tensor([10.0, 12.0])])


def test_methods_that_share_a_buffer() -> None:
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(2))

        def put(self, x):
            self.state.copy_(x)
            return x + 1

        def get(self, x):
            self.state.add_(x)
            return self.state.clone()

    class Method(torch.nn.Module):
        def __init__(self, shared, name):
            super().__init__()
            self.shared, self.name = shared, name

        def forward(self, x):
            return getattr(self.shared, self.name)(x)

    shared, x = Shared(), torch.tensor([3.0, 4.0])
    program = to_edge(
        {name: torch.export.export(Method(shared, name), (x,)) for name in ("put", "get")},
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    ).to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True),
            emit_mutable_buffer_names=True,
        )
    )
    host = PythonProgram(program.buffer, no_delegates)
    host.run("put", [x])
    check_close(host.run("get", [torch.ones(2)]), [x + 1])
    check_close(host.run("get", [torch.ones(2)]), [x + 2])


def test_threads_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_count", lambda: 2)
    module, data = one_input(shared_with_cpu=True)
    meeting = threading.Barrier(2, timeout=60)

    class Meeting(EagerDelegate):
        """A delegate that waits in each call for another one."""

        def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            meeting.wait()
            return super().__call__(inputs)

    program = PythonProgram(data, Meeting, backend_id=BACKEND_ID)
    inputs = [torch.randn(3, 4) for _ in range(2)]
    results: dict[int, list[object]] = {}

    def call(number: int) -> None:
        results[number] = program.run("forward", [inputs[number]])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        check_close(results[number], outputs_of(module(inputs[number])))


def test_threads_take_turns_at_what_is_kept() -> None:
    _, data = export_case("zero_counter")
    program = PythonProgram(data, no_delegates)
    threads = [
        threading.Thread(
            target=lambda: [program.run("forward", [torch.ones(2)]) for _ in range(20)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_close(program.run("forward", [torch.zeros(2)]), [torch.full((2,), 80.0)])
