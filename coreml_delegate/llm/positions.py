"""Position embeddings and biases as tables.

**Rotary embeddings**: position times frequency is too large for fp16.
RoPE (arXiv:2104.09864) rotates each pair of channels (i, i + d/2) of queries and keys at position p
by the angle p * f_i, with f_i = base^(-2i/d). Scalings change the frequencies: linear f_i / s; NTK
base * s^(d/(d-2)); YaRN (arXiv:2309.00071) mixes f_i and f_i / s by wavelength, and multiplies
cosines and sines by 0.1 ln(s) + 1. The tables are computed by the model's own module, so they
include its scaling. Models that read images may rotate some channels by a row's time, others by its
height and its width (M-RoPE, arXiv:2409.12191, section 2.1); for text all three are its position.

**Encoder-decoder models**: learnt and sinusoidal embeddings, and relative biases. The modules of
``transformers`` use a key's index as its position. The rows of our caches are not in the order of
positions, so biases are looked up by position. T5's buckets of relative positions are logarithmic
(arXiv:1910.10683, section 2.1), and fp16 would round some into another bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import current_call

_SUFFIX = "inv_freq"


# Rotary embeddings


class RotaryTables(nn.Module):
    """Rotary embedding by lookup of cosines and sines.

    Args:
        tables: Cosines and sines, each [positions, R], by layer type; None for all layers.
        config: Configuration of the embedding, which the model's code reads.

    Attributes:
        kinds: The layer types.
        axes: 1 where a channel is rotated by an axis, else 0, [3, R]: time, height, width; None if
            the axes have equal positions.
    """

    axes: torch.Tensor | None

    def __init__(
        self, tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]], config: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.kinds = tuple(tables)
        for kind, (cos, sin) in tables.items():
            self.register_buffer(_name("cos", kind), cos, persistent=False)
            self.register_buffer(_name("sin", kind), sin, persistent=False)
        self.register_buffer("axes", None, persistent=False)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, L, R] of positions [B, L] or [3, B, L].

        Unless channels have axes, the three positions are equal.
        """
        del x
        cos, sin = (self.get_buffer(_name(kind, layer_type)) for kind in ("cos", "sin"))
        if self.axes is not None and position_ids.dim() == 3:
            axes = self.axes[:, None, None]
            return (cos[position_ids] * axes).sum(0), (sin[position_ids] * axes).sum(0)
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
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


@torch.no_grad()
def read_axes(model: nn.Module) -> torch.Tensor:
    """Return the axes of the channels of a model's rotary embedding; see ``RotaryTables``."""
    ((_, _, module),) = _embeddings(model)
    positions = torch.eye(3, dtype=torch.long)[:, None]  # axis, batch, token
    _, sin = module(torch.zeros(1), positions)
    return (sin[0] != 0).float()


def use_axes(model: nn.Module, axes: torch.Tensor) -> None:
    """Rotate channels by the positions of their axes; ``model`` has tables already."""
    for module in model.modules():
        if isinstance(module, RotaryTables):
            module.axes = axes


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


# Encoder-decoder models


class _Table(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)


class DistanceBias(_Table):
    """Relative position biases of a decoder: bias[i, j] = table[p_i - p_j].

    Args:
        table: Biases by distance to an earlier token, [distances, heads].
    """

    def forward(self, buckets: torch.Tensor) -> torch.Tensor:
        """Return the biases [L, S, heads]; ``buckets`` [L, S], by index, are ignored."""
        del buckets
        rows, columns = _positions()
        table = self.get_buffer("table")
        # Columns without a token have a later position than all rows; the mask hides them.
        return table[(rows[:, None] - columns[None, :]).clamp(0, table.shape[0] - 1)]


class FixedBias(nn.Module):
    """Relative position biases of an encoder for texts of one length.

    Args:
        biases: [N, N, heads].
    """

    def __init__(self, biases: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("biases", biases, persistent=False)

    def forward(self, buckets: torch.Tensor) -> torch.Tensor:
        """Return the biases; ``buckets`` [N, N] of distances are ignored."""
        del buckets
        return self.get_buffer("biases")


class PositionTable(_Table):
    """Embeddings of a call's positions; padding after the context gets the last position's.

    Args:
        table: [positions, width].
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the embeddings [1, L, width]; the model-dependent arguments are ignored."""
        del args, kwargs
        rows, _ = _positions()
        table = self.get_buffer("table")
        return table[rows.clamp(max=table.shape[0] - 1) if rows.shape[0] > 1 else rows][None]


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    positions = current_call().positions
    if positions is None:
        raise TypeError("the call has no positions")
    return positions


@torch.no_grad()
def tabulate_relative_biases(model: Any, *, context: int, source: int) -> None:
    """Replace the relative position biases, if any, of an encoder-decoder model by tables.

    Args:
        model: Changed.
        context: Tokens of the decoder's longest text.
        source: Tokens of the encoder's texts.
    """
    for module in _modules_with_bias(model.get_decoder()):
        earlier = module.compute_bias(1, context, past_seen_tokens=context - 1)[0, :, 0]
        module.relative_attention_bias = DistanceBias(earlier.flip(-1).t().contiguous())
    for module in _modules_with_bias(model.get_encoder()):
        earlier, later = (
            module.compute_bias(1, source, past_seen_tokens=past)[0, :, 0]
            for past in (source - 1, 0)
        )
        by_distance = torch.cat((earlier, later[:, 1:]), dim=-1).t()
        positions = torch.arange(source)
        biases = by_distance[positions[None, :] - positions[:, None] + source - 1]
        module.relative_attention_bias = FixedBias(biases)


def _modules_with_bias(stack: nn.Module) -> Iterator[Any]:
    for module in stack.modules():
        if hasattr(module, "compute_bias") and hasattr(module, "relative_attention_bias"):
            yield module


@torch.no_grad()
def tabulate_decoder_positions(model: Any, context: int) -> None:
    """Replace the position embeddings of a decoder by tables that padding cannot exceed.

    Args:
        model: Changed.
        context: Tokens of the decoder's longest text.
    """
    # Any token but padding, which has no position.
    tokens = torch.full((1, context), (getattr(model.config, "pad_token_id", None) or 0) + 1)
    for parent in list(model.get_decoder().modules()):
        for name, module in list(parent.named_children()):
            if "PositionalEmbedding" in type(module).__name__:
                options: dict[str, Any] = {}
                if "position_ids" in inspect.signature(module.forward).parameters:
                    options["position_ids"] = torch.arange(context)
                table = module(tokens, **options)
                setattr(parent, name, PositionTable(table.reshape(context, -1).clone()))
