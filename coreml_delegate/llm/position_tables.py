"""Positions of encoder-decoder models as tables: learnt ones, sines, and biases by distance.

The modules of ``transformers`` infer the position of a key from its place. Here the place of a
cached key says nothing, so biases are looked up by positions. The classes of distances of T5 are
logarithms, which fp16 would round to another class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coreml_delegate.llm.attention import current_call


class DistanceBias(nn.Module):
    """Biases of the scores of a decoder, by the distance of the positions that a call attends to.

    Args:
        table: [distances, heads].
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        """Return the biases [L, S, heads]; ``classes`` [L, S] of distances by place are ignored."""
        del classes
        rows, columns = _positions()
        table = self.get_buffer("table")
        # Columns without a token are later than all rows, and hidden by the mask.
        return table[(rows[:, None] - columns[None, :]).clamp(0, table.shape[0] - 1)]


class FixedBias(nn.Module):
    """Biases of the scores of an encoder, whose texts have one length.

    Args:
        biases: [N, N, heads].
    """

    def __init__(self, biases: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("biases", biases, persistent=False)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        """Return the biases; ``classes`` [N, N] of distances are ignored."""
        del classes
        return self.get_buffer("biases")


class PositionTable(nn.Module):
    """Embeddings of the positions of a call; padding behind the context gets the last one.

    Args:
        table: [positions, width].
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the embeddings [1, L, width]; arguments, by which models differ, are ignored."""
        del args, kwargs
        rows, _ = _positions()
        table = self.get_buffer("table")
        return table[rows.clamp(max=table.shape[0] - 1) if rows.shape[0] > 1 else rows][None]


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    found = current_call().positions
    if found is None:
        raise TypeError("the call has no positions")
    return found


@torch.no_grad()
def tabulate_distances(model: Any, *, context: int, source: int) -> None:
    """Replace the biases by distance of an encoder-decoder model; others have none.

    Args:
        model: Changed.
        context: Tokens of the decoder's longest text.
        source: Tokens of the encoder's texts.
    """
    for module in _biased(model.get_decoder()):
        behind = module.compute_bias(1, context, past_seen_tokens=context - 1)[0, :, 0]
        module.relative_attention_bias = DistanceBias(behind.flip(-1).t().contiguous())
    for module in _biased(model.get_encoder()):
        behind, ahead = (
            module.compute_bias(1, source, past_seen_tokens=past)[0, :, 0]
            for past in (source - 1, 0)
        )
        by_distance = torch.cat((behind, ahead[:, 1:]), dim=-1).t()
        places = torch.arange(source)
        biases = by_distance[places[None, :] - places[:, None] + source - 1]
        module.relative_attention_bias = FixedBias(biases)


def _biased(stack: nn.Module) -> Iterator[Any]:
    for module in stack.modules():
        if hasattr(module, "compute_bias") and hasattr(module, "relative_attention_bias"):
            yield module


@torch.no_grad()
def tabulate_decoder_positions(model: Any, context: int) -> None:
    """Replace the embeddings of a decoder's positions by tables, which padding cannot exceed.

    Args:
        model: Changed.
        context: Tokens of the decoder's longest text.
    """
    # No token that is padding, which has no position.
    tokens = torch.full((1, context), (getattr(model.config, "pad_token_id", None) or 0) + 1)
    for parent in list(model.get_decoder().modules()):
        for name, module in list(parent.named_children()):
            if "PositionalEmbedding" in type(module).__name__:
                options: dict[str, Any] = {}
                if "position_ids" in inspect.signature(module.forward).parameters:
                    options["position_ids"] = torch.arange(context)
                table = module(tokens, **options)
                setattr(parent, name, PositionTable(table.reshape(context, -1).clone()))
