"""Rotary position embeddings as tables, because a position times a frequency does not fit fp16."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError

_SUFFIX = "inv_freq"


class RotaryTables(nn.Module):
    """Cosines and sines of all positions, looked up.

    Args:
        tables: Cosines and sines, each [positions, R], by type of layer; None if types do not
            matter.
        config: Configuration of the embedding, which models read.
    """

    def __init__(
        self, tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]], config: Any
    ) -> None:
        super().__init__()
        self.config = config
        for kind, (cos, sin) in tables.items():
            self.register_buffer(_name("cos", kind), cos, persistent=False)
            self.register_buffer(_name("sin", kind), sin, persistent=False)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, L, R] of positions [B, L], or [3, B, L], equal for text."""
        del x
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        cos, sin = (self.get_buffer(_name(kind, layer_type)) for kind in ("cos", "sin"))
        return cos[position_ids], sin[position_ids]


def _name(kind: str, layer_type: str | None) -> str:
    return kind if layer_type is None else f"{kind}_{layer_type}"


def tabulate_positions(model: nn.Module, context: int) -> None:
    """Replace the rotary embeddings of a model by tables.

    Args:
        model: Changed.
        context: Number of positions.

    Raises:
        OptionError: The embedding of a position depends on the length of the text.
        LoweringError: The embedding is no pair of cosines and sines.
    """
    for parent, name, module in list(_embeddings(model)):
        kinds: Any = [None]
        if "layer_type" in inspect.signature(module.forward).parameters:
            kinds = getattr(module, "layer_types", kinds)
        tables = {kind: _table(module, kind, context) for kind in kinds}
        setattr(parent, name, RotaryTables(tables, getattr(module, "config", None)))


def _embeddings(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, module in parent.named_children():
            if any(key.endswith(_SUFFIX) for key, _ in module.named_buffers(recurse=False)):
                yield parent, name, module


@torch.no_grad()
def _table(module: nn.Module, kind: str | None, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    options = {} if kind is None else {"layer_type": kind}

    def table(positions: torch.Tensor) -> Any:
        return module(torch.zeros(1), positions[None], **options)

    positions = torch.arange(context)
    found, early = table(positions), table(positions[:2])
    if not _is_pair(found, context):
        raise LoweringError(
            f"{type(module).__name__} is a position embedding of a form that is not supported",
            expected="cosines and sines of each position",
        )
    if any(not torch.equal(all_[:, :2], some) for all_, some in zip(found, early, strict=True)):
        raise OptionError(
            "the position embedding depends on the length of the text",
            got=f"a context of {context} tokens",
            remedy="Export with a shorter --context",
        )
    cos, sin = found
    return cos[0].clone(), sin[0].clone()


def _is_pair(found: Any, context: int) -> bool:
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            isinstance(table, torch.Tensor)
            and table.is_floating_point()
            and table.shape[:2] == (1, context)
            for table in found
        )
    )
