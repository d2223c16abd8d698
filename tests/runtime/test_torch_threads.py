"""Torch's thread count while a program with delegates runs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch
from support import delegated
from support.eager_backend import BACKEND_ID, EagerDelegate, lower
from torch import nn

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.program import instructions, kernels
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.threads import all_torch_threads, one_torch_thread

_THREADS = 3


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_afterwards() -> None:
    with one_torch_thread():
        assert torch.get_num_threads() == 1
        with all_torch_threads():
            assert torch.get_num_threads() == _THREADS
            assert torch.ones(1 << 20).sum() == 1 << 20
        assert torch.get_num_threads() == 1
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == _THREADS


def test_other_threads_keep_their_number() -> None:
    seen: list[int] = []
    with one_torch_thread():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [_THREADS]


def test_outside_of_a_program_nothing_changes() -> None:
    with all_torch_threads():
        assert torch.get_num_threads() == _THREADS


@pytest.mark.parametrize("is_long", [False, True])
def test_kernels_between_delegates_have_one_thread_unless_they_take_long(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    seen: list[int] = []

    def find_kernel(name: str) -> kernels.Kernel:
        kernel = kernels.find_kernel(name)

        def function(*args: object, **keywords: object) -> object:
            seen.append(torch.get_num_threads())
            return kernel.function(*args, **keywords)

        return dataclasses.replace(kernel, function=function)

    monkeypatch.setattr(instructions, "find_kernel", find_kernel)
    monkeypatch.setattr(instructions, "is_long", lambda *_: is_long)
    program = PythonProgram(delegated.two_methods(), EagerDelegate, backend_id=BACKEND_ID)
    program.run("forward", [torch.randn(5, 4)])
    assert set(seen) == {_THREADS if is_long else 1}
    assert torch.get_num_threads() == _THREADS


def test_the_number_is_restored_when_a_delegate_fails() -> None:
    def failing(payload):
        delegate = EagerDelegate(payload)

        class Failing:
            input_count = delegate.input_count
            native = None

            def __call__(self, inputs):
                raise ValueError("broken")

        return Failing()

    program = PythonProgram(delegated.two_methods(), failing, backend_id=BACKEND_ID)
    with pytest.raises(ExecutionError, match="broken"):
        program.run("forward", [torch.randn(5, 4)])
    assert torch.get_num_threads() == _THREADS


def test_a_program_without_delegates_keeps_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    seen: list[int] = []

    def find_kernel(name: str) -> kernels.Kernel:
        return dataclasses.replace(
            kernels.find_kernel(name),
            function=lambda *_, **__: seen.append(torch.get_num_threads()),
        )

    monkeypatch.setattr(instructions, "find_kernel", find_kernel)
    program = PythonProgram(
        lower({"forward": (Sine(), (torch.randn(3),), None)}), EagerDelegate, backend_id=BACKEND_ID
    )
    program.run("forward", [torch.randn(3)])
    assert set(seen) == {_THREADS}


@pytest.mark.parametrize(
    ("name", "shapes", "is_long"),
    [
        ("aten::tanh.out", {"self": (1, 64, 56, 56), "out": (1, 64, 56, 56)}, False),
        ("aten::tanh.out", {"self": (64, 64, 56, 56), "out": (64, 64, 56, 56)}, True),
        ("aten::mm.out", {"self": (512, 1024), "mat2": (1024, 1024), "out": (512, 1024)}, True),
        ("aten::mm.out", {"self": (1, 1024), "mat2": (1024, 1024), "out": (1, 1024)}, False),
        (
            "aten::convolution.out",
            {"input": (1, 64, 56, 56), "weight": (64, 64, 3, 3), "out": (1, 64, 56, 56)},
            False,
        ),
        (
            "aten::convolution.out",
            {"input": (1, 64, 112, 112), "weight": (64, 64, 3, 3), "out": (1, 64, 112, 112)},
            True,
        ),
        ("executorch_prim::add.Scalar", {}, False),
    ],
)
def test_long_kernels_by_their_shapes(
    name: str, shapes: dict[str, tuple[int, ...]], is_long: bool
) -> None:
    assert kernels.is_long(kernels.find_kernel(name), shapes) is is_long
