"""Rotary position embeddings as tables, because position times frequency is too large for fp16.

RoPE (arXiv:2104.09864) rotates each pair of channels (i, i + d/2) of queries and keys at position p
by the angle p * f_i, with f_i = base^(-2i/d). Scalings change the frequencies: linear f_i / s; NTK
base * s^(d/(d-2)); YaRN (arXiv:2309.00071) mixes f_i and f_i / s by wavelength, and multiplies
cosines and sines by 0.1 ln(s) + 1. The tables are computed by the model's own module, so they
include its scaling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError

_SUFFIX = "inv_freq"


class RotaryTables(nn.Module):
    """Rotary embedding by lookup of cosines and sines.

    Args:
        tables: Cosines and sines, each [positions, R], by layer type; None for all layers.
        config: Configuration of the embedding, which the model's code reads.
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
        LoweringError: The embedding does not return cosines and sines.
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
    tables, early = table(positions), table(positions[:2])
    if not _is_pair(tables, context):
        raise LoweringError(
            f"{type(module).__name__} is a position embedding of a form that is not supported",
            expected="cosines and sines of each position",
        )
    if any(not torch.equal(full[:, :2], part) for full, part in zip(tables, early, strict=True)):
        raise OptionError(
            "the position embedding depends on the length of the text",
            got=f"a context of {context} tokens",
            remedy="Export with a shorter --context",
        )
    cos, sin = tables
    return cos[0].clone(), sin[0].clone()


def _is_pair(tables: Any, context: int) -> bool:
    return (
        isinstance(tables, tuple)
        and len(tables) == 2
        and all(
            isinstance(table, torch.Tensor)
            and table.is_floating_point()
            and table.shape[:2] == (1, context)
            for table in tables
        )
    )
