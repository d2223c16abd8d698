"""Unpatched torch still has the faults that each patch mends, and the private names it uses."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

from coreml_delegate.patches import patched
from coreml_delegate.patches.torch import (
    SKIP_GUARD_CODE,
    replace_in_signature,
    schema_of,
    with_parts,
    wrapped_kernels,
)
from coreml_delegate.patches.torch_ranges import ValueRanges


class _Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        return x[:half] + x[half : 2 * half] if x.shape[0] % 2 == 0 else x


def _rebuild(program: ExportedProgram) -> ExportedProgram:
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def test_a_new_program_has_code_of_its_guards() -> None:
    program = export(_Halves(), (torch.ones(8),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert _rebuild(program)._guards_code
    with patched(SKIP_GUARD_CODE):
        assert _rebuild(program)._guards_code == []


def test_the_parts_of_a_program_are_private_attributes() -> None:
    """A part that torch renames would be set beside the one that it reads."""
    program = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    names = ("constants", "graph_module", "graph_signature", "module_call_graph", "state_dict")
    for name in names:
        part = copy.deepcopy(getattr(program, name))
        changed = with_parts(program, **{name: part})
        assert getattr(changed, name) is part
        assert getattr(program, name) is not part
        with pytest.raises(RuntimeError, match=f"Unable to set ExportedProgram's {name}"):
            setattr(program, name, part)


def test_the_signature_follows_replaced_results() -> None:
    program = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    (result,), module = program.graph.output_node().args[0], program.graph_module
    with module.graph.inserting_after(result):
        copied = module.graph.node_copy(result)
    with replace_in_signature(module, program):
        result.replace_all_uses_with(copied)
    assert program.graph_signature.user_outputs == (copied.name,)


def _run_in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_python_kernels_change_in_one_thread() -> None:
    """Torch takes a Python kernel of an op from a table that all threads share."""
    op, original = torch.ops.aten.rnn_tanh.input, dict(torch.ops.aten.rnn_tanh.input.py_kernels)
    key = next(iter(original))

    def error_without_arguments() -> str:
        with pytest.raises(TypeError) as raised:
            op.py_kernels[key]()
        return str(raised.value)

    with wrapped_kernels([op], lambda kernel: lambda *arguments: "ours"):
        assert op.py_kernels[key]() == "ours"
        assert "missing" in _run_in_thread(error_without_arguments)
    assert op.py_kernels == original


def test_only_operators_have_schemas() -> None:
    assert schema_of(torch.ops.aten.add.Tensor).arguments[0].name == "self"
    assert not hasattr(torch.ops.aten.add.Tensor, "schema")
    assert schema_of(len) is None


def test_ranges_of_sizes_are_of_a_private_class() -> None:
    program = export(_Halves(), (torch.ones(8),), dynamic_shapes=({0: Dim.DYNAMIC(max=64)},))
    (bounds,) = program.range_constraints.values()
    assert type(bounds) is ValueRanges
    assert not hasattr(torch.export, "ValueRanges")
