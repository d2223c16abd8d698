"""What the patches of torch are for, on torch without them."""

from __future__ import annotations

import torch
from torch.export import Dim, ExportedProgram, export

from coreml_delegate.patches import patched
from coreml_delegate.patches.torch import SKIP_GUARD_CODE


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
