"""Unpatched transformers still has the faults that each patch mends, and the private names."""

from __future__ import annotations

import inspect
import sys
import threading
from importlib import import_module
from typing import Any

import pytest
from support.checkpoints import tiny_model
from support.llm_families import FAMILIES

from coreml_delegate.llm.attention import Call, active_call
from coreml_delegate.patches import patched
from coreml_delegate.patches.third_party import torchvision_importable
from coreml_delegate.patches.transformers import recurrence

RECURRENCES = [
    ("mamba", "MambaMixer", "mamba_selective_scan"),
    ("mamba2", "Mamba2Mixer", "mamba2_chunk_scan"),
    ("qwen3_next", "Qwen3NextGatedDeltaNet", "torch_chunk_gated_delta_rule"),
]


def _module(family: str) -> Any:
    with torchvision_importable():
        return import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.mark.parametrize("family", ["gemma3", "mellum"])
def test_models_iterate_sets_of_layer_types(family: str) -> None:
    assert "in set(self.config.layer_types)" in inspect.getsource(_module(family))


def test_sets_are_in_order_in_the_own_thread() -> None:
    model = tiny_model("mellum", **FAMILIES["mellum"].changes)
    names = vars(sys.modules[type(model).__module__])
    texts = [f"{number:03d}" for number in range(100)]
    others: list[type] = []
    with active_call(Call(), model), active_call(Call(), model):
        assert list(names["set"](reversed(texts))) == texts
        assert {"a", "b"} == names["set"]("ab")
        thread = threading.Thread(target=lambda: others.append(type(names["set"]("ab"))))
        thread.start()
        thread.join()
    assert others == [set]
    assert "set" not in names


@pytest.mark.parametrize(("family", "kind", "name"), RECURRENCES)
def test_a_module_calls_its_recurrence_by_a_global_name(family: str, kind: str, name: str) -> None:
    module = _module(family)
    code = inspect.unwrap(getattr(module, kind).forward)
    assert name in code.__code__.co_names
    original = code.__globals__[name]
    with patched(recurrence(code, name, "ours".format)):
        assert code.__globals__[name]() == "ours"
    assert code.__globals__[name] is original


def test_scans_of_mamba_1_begin_at_zero() -> None:
    """A scan that took the state before the call would make ours unnecessary."""
    parameters = inspect.signature(_module("mamba").mamba_selective_scan).parameters
    assert not [name for name in parameters if "initial" in name]


def test_configurations_name_the_functions_in_private() -> None:
    configuration = import_module("transformers").PreTrainedConfig
    for name in ("_attn_implementation", "_experts_implementation"):
        assert isinstance(inspect.getattr_static(configuration, name), property)
