"""Attention and masks for the modules of ``transformers``, registered by name in its interfaces.

Masks are what the model's own mask function says of two positions, so causal, sliding and chunked
attention need no code here. A cache says which position each column of the scores has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.third_party import transformers

NAME = "coreml_delegate"
"""Name under which ``transformers`` finds the functions."""

_LIBRARY = "transformers."

MASKED = -3e4
"""Score of a hidden token: softmax makes it zero in fp32 and fp16, and unlike infinity every kernel
takes it."""

Segment = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [B, kv_heads, S, width] of S tokens."""

# Arguments of attention functions that do not change the result, or that the mask implies.
_INERT = frozenset(
    (
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
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

    ``transformers`` hands its attention functions keys that are joined, and no cache. What joined
    keys are made of is looked up here, so that the joined ones are not computed.

    Attributes:
        attended: Whether the model has called the attention function.
        positions: Of the call's tokens [L] and of the columns of the scores [S], for biases by
            distance; None if the model has none.
    """

    def __init__(self) -> None:
        self.attended = False
        self.positions: tuple[torch.Tensor, torch.Tensor] | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor, Sequence[Segment]]] = []
        self._stacked: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def join(self, segments: Sequence[Segment]) -> Segment:
        """Return the segments joined along their tokens, and remember them."""
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*segments, strict=True))
        self._parts.append((keys, values, segments))
        return keys, values

    def segments(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Segment]:
        """Return what was joined to these keys and values; themselves if nothing was."""
        for joined_keys, joined_values, segments in self._parts:
            if joined_keys is keys and joined_values is values:
                return segments
        return ((keys, values),)

    def stack(self, mask: torch.Tensor, group: int) -> torch.Tensor:
        """Return a mask [1, 1, L, S] repeated for each head of a group: [1, 1, group * L, S]."""
        if group == 1:
            return mask
        for known, count, stacked in self._stacked:
            if known is mask and count == group:
                return stacked
        made = torch.cat([mask] * group, dim=2)
        self._stacked.append((mask, group, made))
        return made


_CALL: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """Return the call that is being computed."""
    return _CALL.get()


@contextmanager
def calling(call: Call, model: nn.Module) -> Generator[None]:
    """Let the attention function look up the segments of a call.

    What the model's own code does with each element of a set, it does in order meanwhile: for masks
    and rotations of types of layers, whose names have another order in every process, and so would
    the operations of the program.
    """
    token = _CALL.set(call)
    names = [space for space in _namespaces(model) if "set" not in space]
    for space in names:
        space["set"] = _OrderedSet
    try:
        yield
    finally:
        for space in names:
            del space["set"]
        _CALL.reset(token)


class _OrderedSet(set[Any]):
    """A set whose elements come in the order of their texts."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Return the names that the code of a model's modules knows, one of ``transformers`` each."""
    modules = {type(module).__module__ for module in model.modules()}
    return [vars(sys.modules[name]) for name in sorted(modules) if name.startswith(_LIBRARY)]


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the segments of keys and values, without joining or repeating them.

    Args:
        module: Calls the function.
        query: [B, heads, L, width].
        key: [B, kv_heads, S, width], as the cache returned them.
        value: [B, kv_heads, S, width of a value].
        attention_mask: [1, 1, L or 1, S], added to the scores; None if all tokens are visible.
        scaling: Factor of the scores; None for one by the root of the width.
        softcap: Bound of the scores before the mask, or None.
        s_aux: Score of a column without a token for each head, [heads], or None.
        position_bias: [1, heads, L, S], added to the scores, or None.
        others: Arguments that must not matter.

    Returns:
        [B, L, heads, width of a value], and no weights.

    Raises:
        LoweringError: The model asks for something that is not implemented.
    """
    _check_arguments(module, others)
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    call = current_call()
    call.attended = True
    segments = call.segments(key, value)
    # Queries of a group are stacked along their tokens, so that keys are not repeated for each.
    grouped = (query * (width**-0.5 if scaling is None else scaling)).reshape(
        batch, kv_heads, -1, width
    )
    scores = [grouped @ keys.transpose(-1, -2) for keys, _ in segments]
    joined = torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]
    if softcap is not None:
        joined = torch.tanh(joined / softcap) * softcap
    if position_bias is not None:
        joined = joined + position_bias.reshape(1, kv_heads, -1, position_bias.shape[-1])
    if attention_mask is not None:
        joined = joined + call.stack(attention_mask, heads // kv_heads)
    sizes = [keys.shape[2] for keys, _ in segments]
    if s_aux is not None:
        sink = s_aux.view(1, kv_heads, -1, 1).expand(batch, -1, -1, length)
        sink = sink.reshape(batch, kv_heads, -1, 1)
        joined, sizes = torch.cat((joined, sink), dim=-1), [*sizes, 1]
    parts = torch.softmax(joined, dim=-1).split(sizes, dim=-1)
    attended = parts[0] @ segments[0][1]
    for part, (_, values) in zip(parts[1 : len(segments)], segments[1:], strict=True):
        attended = attended + part @ values
    return attended.reshape(batch, heads, length, -1).transpose(1, 2), None


def _check_arguments(module: nn.Module, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and name not in _INERT:
            raise LoweringError(
                f"{type(module).__name__} attends in a way that is not supported", got=name
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
    **others: Any,
) -> torch.Tensor:
    """Return what is added to the scores [1, 1, L, S]: 0 for a visible token, else ``MASKED``.

    Args:
        batch_size: Ignored: texts have equal lengths.
        q_length: Number L of the call's tokens.
        kv_length: Number S of columns.
        q_offset: Position of the call's first token.
        kv_offset: Positions [S] of all columns, or the position of the first.
        mask_function: Whether a token sees another, by their positions.
        dtype: Of the mask.
        others: Further arguments of the interface.
    """
    del batch_size, others
    rows = torch.arange(q_length) + q_offset
    is_table = isinstance(kv_offset, torch.Tensor)
    columns = kv_offset if is_table else torch.arange(kv_length) + kv_offset
    none = torch.zeros(1, 1, 1, 1, dtype=torch.long)  # of the batch, and of the head
    seen = mask_function(none, none, rows[None, None, :, None], columns[None, None, None, :])
    return torch.where(seen, 0.0, MASKED).to(dtype)


_library = transformers()
_library.AttentionInterface.register(NAME, attend)
_library.AttentionMaskInterface.register(NAME, mask)
