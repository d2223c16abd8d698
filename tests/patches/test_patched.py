"""Patches of other libraries hold for one block in one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coreml_delegate.patches import Patch, patched


class _Library:
    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"


def _patch(owner: Any, name: str, replacement: Callable[..., Any] | None = None) -> Patch:
    def shout(original: Callable[..., str]) -> Callable[..., str]:
        return lambda *arguments: original(*arguments).upper() + "!"

    return Patch(lambda: owner, name, replacement or shout, "a test", None, "pytest", ("9", "8"))


@pytest.mark.parametrize("name", ["method", "static"])
def test_an_attribute_is_replaced_in_the_block(name: str) -> None:
    before = vars(_Library)[name]
    with patched(_patch(_Library, name)):
        assert getattr(_Library(), name)() == f"{name.upper()}!"
        with patched(_patch(_Library, name)):
            assert getattr(_Library(), name)() == f"{name.upper()}!!"
        assert getattr(_Library(), name)() == f"{name.upper()}!"
    assert vars(_Library)[name] is before


def test_an_error_ends_the_patch() -> None:
    before = vars(_Library)["method"]
    with pytest.raises(KeyError), patched(_patch(_Library, "method")):
        raise KeyError
    assert vars(_Library)["method"] is before


def test_other_threads_call_the_original() -> None:
    """Two threads whose blocks begin and end in turn, and one without a block."""
    module = SimpleNamespace(name=lambda: "name")
    before = module.name
    steps = [threading.Event() for _ in range(3)]
    seen: dict[str, str] = {}

    def other() -> None:
        with patched(_patch(module, "name", lambda original: lambda: f"other {original()}")):
            steps[0].set()
            assert steps[1].wait(10)
            seen["other"] = module.name()
        steps[2].set()

    thread = threading.Thread(target=other)
    with patched(_patch(module, "name")):
        thread.start()
        assert steps[0].wait(10)
        seen["own"] = module.name()
    seen["without"] = module.name()
    steps[1].set()
    assert steps[2].wait(10)
    thread.join()
    assert seen == {"own": "NAME!", "without": "name", "other": "other name"}
    assert module.name is before


def test_a_builtin_is_replaced_for_one_module() -> None:
    module = ModuleType("module")
    exec("def count(values): return len(values)", vars(module))
    with patched(_patch(module, "len", lambda original: lambda values: -original(values))):
        assert module.count("abc") == -3
        assert len("abc") == 3
    assert "len" not in vars(module)


def test_state_of_one_block() -> None:
    module = SimpleNamespace(name=lambda: "name")

    def record(calls: list[str], original: Callable[[], str]) -> Callable[[], str]:
        return lambda: calls.append(original()) or "recorded"

    calls: list[str] = []
    with patched(_patch(module, "name", record).with_state(calls)):
        assert module.name() == "recorded"
    assert calls == ["name"]


def test_an_untested_release_is_a_warning_that_names_the_patch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = SimpleNamespace(lookup=lambda: None)
    patch = Patch(
        lambda: module, "lookup", lambda original: original, "a test", None, "pytest", ("0.1",)
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with patched(patch):
                pass
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the patch of lookup was tested with pytest 0.1, not with ")


def test_a_function_that_a_build_lacks_is_none_afterwards() -> None:
    module = SimpleNamespace(optional=None)
    with patched(_patch(module, "optional", lambda original: lambda: original)):
        assert module.optional() is None
    assert module.optional is None
