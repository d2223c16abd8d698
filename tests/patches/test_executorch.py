"""ExecuTorch's private interfaces behave as this package expects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_api import lower_all_submodules_to_backend, to_backend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.patches.executorch import forget_lowered, hide_from_search


def _backend(name: str, calls: list[str], label: str) -> type[BackendDetails]:
    def preprocess(*_: Any) -> PreprocessResult:
        calls.append(label)
        return PreprocessResult()

    def preprocess_multimethod(*_: Any) -> dict[str, list[PreprocessResult]]:
        calls.append(label)
        return {}

    functions = {
        "preprocess": staticmethod(preprocess),
        "preprocess_multimethod": staticmethod(preprocess_multimethod),
    }
    return type(name, (BackendDetails,), functions)


def _search_on_both_paths(name: str) -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    to_backend(name, program, [])
    lower_all_submodules_to_backend(name, {"forward": []}, {"forward": program})


def test_executorch_searches_backends_by_class_name() -> None:
    """``to_backend`` takes the first backend of a name; the lowering of all methods takes the last.

    Neither function finds a hidden backend.
    """
    calls: list[str] = []
    backends = [_backend("TwinBackend", calls, label) for label in ("first", "last")]
    hiding = type("HidingBackend", (BackendDetails,), {})
    _search_on_both_paths("TwinBackend")
    assert calls == ["first", "last"]
    calls.clear()
    hide_from_search("TwinBackend", keep=backends[0], base=hiding)
    _search_on_both_paths("TwinBackend")
    assert calls == ["first", "first"]


def _lowered_weight() -> weakref.ref[torch.Tensor]:
    """Lower a layer to a ``.pte``; return its weight, which nobody needs any more."""
    layer = torch.nn.Linear(3, 3)
    program = torch.export.export(layer, (torch.ones(2, 3),))
    to_edge_transform_and_lower(program, partitioner=[CoreMLPartitioner()]).to_executorch()
    return weakref.ref(layer.weight)


def test_executorch_and_torch_keep_the_last_lowered_program() -> None:
    weight = _lowered_weight()
    gc.collect()
    assert weight() is not None
    forget_lowered()
    gc.collect()
    assert weight() is None


def test_a_lowering_frees_the_program_that_was_lowered_before() -> None:
    weight = _lowered_weight()
    last = _lowered_weight()
    gc.collect()
    assert weight() is None
    assert last() is not None
