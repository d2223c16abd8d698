"""Attention and mask functions, registered in the interfaces of ``transformers``.

A mask evaluates the model's own mask function on pairs of positions, so causal, sliding and chunked
attention need no code here. The cache gives the position of each column of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.patches import patched
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.patches.transformers import ordered_sets

NAME = "coreml_delegate"
"""Name of the functions in the interfaces of ``transformers``."""

MASKED = -3e4
"""Score of a hidden token: its softmax is zero in fp32 and fp16, and unlike infinity every kernel
accepts it."""

Segment = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of S tokens, each [B, kv_heads, S, width]."""

# Arguments of attention functions that do not affect the result, or that the mask includes.
_INERT = frozenset(
    (
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
    )
)


class Call:
    """The segments and masks of one call of a model.

    ``transformers`` passes concatenated keys to attention functions, and no cache. The segments of
    these keys are looked up here, so that the concatenation itself is dead code in the graph.

    Attributes:
        attended: Whether the model has called the attention function.
        positions: Positions of the call's tokens [L] and of the columns of the scores [S], for
            relative position biases; None if the model has no biases.
        visible_ends: Last position that each of the call's tokens sees, [L], if a token sees later
            ones; None if it sees none.
        source_length: Number of samples of a recording without padding, [1]; None for others.
        features: Features [1, L, width] that layers add to their results, from the first layer on.
    """

    def __init__(self) -> None:
        self.attended = False
        self.visible_ends: torch.Tensor | None = None
        self.features: Sequence[torch.Tensor] = ()
        self.source_length: torch.Tensor | None = None
        self.positions: tuple[torch.Tensor, torch.Tensor] | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor, Sequence[Segment]]] = []
        self._stacked: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def join(self, segments: Sequence[Segment]) -> Segment:
        """Return the segments concatenated along their tokens, and record them."""
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*segments, strict=True))
        self._parts.append((keys, values, segments))
        return keys, values

    def segments(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """Return the segments of concatenated keys and values, or the pair itself."""
        for joined_keys, joined_values, segments in self._parts:
            if joined_keys is keys and joined_values is values:
                return segments
        return ((keys, values),)

    def stack(self, mask: torch.Tensor, group: int) -> torch.Tensor:
        """Return a mask [1, 1, L, S] repeated for the heads of a group: [1, 1, group * L, S]."""
        if group == 1:
            return mask
        for source, count, stacked in self._stacked:
            if source is mask and count == group:
                return stacked
        stacked = torch.cat([mask] * group, dim=2)
        self._stacked.append((mask, group, stacked))
        return stacked


_CALL: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """Return the current call."""
    return _CALL.get()


@contextmanager
def active_call(call: Call, model: nn.Module) -> Generator[None]:
    """Make ``call`` the current call, and iterate sets of the model's own code in sorted order."""
    token = _CALL.set(call)
    try:
        with patched(*ordered_sets(model.modules())):
            yield
    finally:
        _CALL.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over segments of keys and values, without concatenating or repeating them.

    softmax(softcap * tanh(scaling * Q K^T / softcap) + bias + mask) V, with grouped queries.

    Args:
        module: The module that calls the function.
        query: [B, heads, L, width].
        key: [B, kv_heads, S, width], returned by the cache.
        value: [B, kv_heads, S, width of a value].
        attention_mask: [1, 1, L or 1, S], added to the scores; None if all tokens are visible.
        scaling: Factor of the scores; None for ``width ** -0.5``.
        softcap: Bound of the scores before the mask, or None.
        s_aux: Attention sinks: score of a column without a token, [heads], or None.
        position_bias: [1, heads, L, S], added to the scores, or None.
        options: Further arguments, which must not affect the result.

    Returns:
        [B, L, heads, width of a value], and no weights.

    Raises:
        LoweringError: The model passes an argument that is not implemented.
    """
    check_arguments(module, options)
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    call = current_call()
    call.attended = True
    segments = call.segments(key, value)
    # Queries of a group are stacked along the tokens, so that keys are not repeated per head.
    grouped = (query * (width**-0.5 if scaling is None else scaling)).reshape(
        batch, kv_heads, -1, width
    )
    segment_scores = [grouped @ keys.transpose(-1, -2) for keys, _ in segments]
    scores = torch.cat(segment_scores, dim=-1) if len(segment_scores) > 1 else segment_scores[0]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias.reshape(1, kv_heads, -1, position_bias.shape[-1])
    if attention_mask is not None:
        scores = scores + call.stack(attention_mask, heads // kv_heads)
    sizes = [keys.shape[2] for keys, _ in segments]
    if s_aux is not None:
        sink = s_aux.view(1, kv_heads, -1, 1).expand(batch, -1, -1, length)
        sink = sink.reshape(batch, kv_heads, -1, 1)
        scores, sizes = torch.cat((scores, sink), dim=-1), [*sizes, 1]
    parts = torch.softmax(scores, dim=-1).split(sizes, dim=-1)
    attended = parts[0] @ segments[0][1]
    for part, (_, values) in zip(parts[1 : len(segments)], segments[1:], strict=True):
        attended = attended + part @ values
    return attended.reshape(batch, heads, length, -1).transpose(1, 2), None


def check_arguments(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse arguments of an attention function that might affect the result.

    Args:
        module: The module that calls the function.
        options: The arguments.

    Raises:
        LoweringError: An argument is not implemented.
    """
    for name, value in options.items():
        if value is not None and name not in _INERT:
            raise LoweringError(
                f"{type(module).__name__} passes an unsupported argument to attention", got=name
            )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    *,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """Return the additive mask [1, 1, L, S]: 0 for a visible token, else ``MASKED``.

    Args:
        batch_size: Ignored: texts have equal lengths.
        q_length: Number L of the call's tokens.
        kv_length: Number S of columns.
        q_offset: Position of the call's first token.
        kv_offset: Positions [S] of all columns, or the position of the first.
        mask_function: Whether a token sees another, by their positions.
        dtype: Type of the mask.
        options: Further arguments of the interface, ignored.
    """
    del batch_size, options
    rows = torch.arange(q_length) + q_offset
    is_table = isinstance(kv_offset, torch.Tensor)
    columns = kv_offset if is_table else torch.arange(kv_length) + kv_offset
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long)  # index of the batch, and of the head
    rows, columns = rows[None, None, :, None], columns[None, None, None, :]
    visible = mask_function(first, first, rows, columns)
    call = _CALL.get(None)  # the form for the neural engine computes masks before a call
    ends = None if call is None else call.visible_ends
    if ends is not None:
        # No window ends before a later token, so this holds for all mask functions.
        visible = visible | ((columns > rows) & (columns <= ends[None, None, :, None]))
    return torch.where(visible, 0.0, MASKED).to(dtype)


_library = transformers()
_library.AttentionInterface.register(NAME, attend)
_library.AttentionMaskInterface.register(NAME, mask)
