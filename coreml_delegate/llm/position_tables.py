"""Position tables of encoder-decoder models: learnt, sinusoidal, and relative biases.

The modules of ``transformers`` use a key's index as its position. The rows of our caches are not in
the order of positions, so biases are looked up by position. T5's buckets of relative positions are
logarithmic (arXiv:1910.10683, section 2.1), and fp16 would round some into another bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coreml_delegate.llm.attention import current_call


class DistanceBias(nn.Module):
    """Relative position biases of a decoder: bias[i, j] = table[p_i - p_j].

    Args:
        table: Biases by distance to an earlier token, [distances, heads].
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

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


class PositionTable(nn.Module):
    """Embeddings of a call's positions; padding after the context gets the last position's.

    Args:
        table: [positions, width].
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

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
