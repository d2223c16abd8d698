"""Tables of rotary embeddings."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import tiny_model
from support.llm_families import FAMILIES
from torch import nn

from coreml_delegate.llm.attention import Call, calling
from coreml_delegate.llm.positions import tabulate_positions

CONTEXT = 32
KINDS = ("full_attention", "sliding_attention")


class Rotations(nn.Module):
    """The cosines and sines of types of layers, in the order of ``KINDS``, asked for in another."""

    def __init__(self, rotary: nn.Module, order: tuple[str, ...]) -> None:
        super().__init__()
        self.rotary = rotary
        self.order = order

    def forward(self, positions: torch.Tensor) -> list[torch.Tensor]:
        with calling(Call()):
            made = {kind: self.rotary(torch.zeros(1), positions, kind) for kind in self.order}
        return [table for kind in KINDS for table in made[kind]]


@pytest.fixture(scope="module")
def rotary() -> nn.Module:
    model = tiny_model("gemma3_text", **FAMILIES["gemma3_text"].changes)
    tabulate_positions(model, CONTEXT)
    return model.model.rotary_emb


def test_the_order_in_which_a_model_asks_changes_no_program(rotary):
    """Models go through a set of texts, whose order differs between processes."""
    programs = [
        torch.export.export(Rotations(rotary, order), (torch.arange(5)[None],))
        for order in (KINDS, KINDS[::-1])
    ]
    first, second = (program.graph_module.code for program in programs)
    assert first == second


def test_tables_equal_the_rotations_of_transformers(rotary):
    unchanged = tiny_model("gemma3_text", **FAMILIES["gemma3_text"].changes).model.rotary_emb
    positions = torch.tensor([[3, 0, 31]])
    found = Rotations(rotary, KINDS)(positions)
    expected = [table for kind in KINDS for table in unchanged(torch.zeros(1), positions, kind)]
    for table, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(table, wanted, rtol=0, atol=1e-6)
