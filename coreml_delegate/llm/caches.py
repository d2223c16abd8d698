"""Caches of keys and values, behind the interface of ``transformers``.

A layer with a sliding window keeps as many rows as it needs: position p lies in row p modulo the
number of rows. Which position a row has follows from the number of tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import Call, Segment
from coreml_delegate.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
else:  # which says what to install if it is missing
    Cache, CacheLayerMixin = transformers().Cache, transformers().cache_utils.CacheLayerMixin

_NOWHERE = 2**30
"""Position of a row that has no token: later than all, so that no token sees it."""

# Layers of transformers that keep nothing but keys and values.
_PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Sizes of the keys and values that one layer keeps of a token.

    Attributes:
        keys: Heads and width of its keys.
        values: Heads and width of its values.
        window: Number of tokens that a token sees, itself included; None for all.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None

    def rows(self, context: int, ahead: int) -> int:
        """Return how many rows its cache needs.

        Args:
            context: Number of tokens of the longest text.
            ahead: Rows that a call writes before it attends, beyond the first.
        """
        return min(context, self.window or context) + ahead

    def zeros(self, rows: int) -> Segment:
        """Return empty keys and values."""
        (key_heads, key_width), (value_heads, value_width) = self.keys, self.values
        return (
            torch.zeros(1, key_heads, rows, key_width),
            torch.zeros(1, value_heads, rows, value_width),
        )


def read_layers(cache: DynamicCache) -> tuple[LayerCache, ...]:
    """Return what each layer keeps, given a cache of ``transformers`` that has seen a token.

    Raises:
        LoweringError: A layer keeps something else than keys and values, or shares them.
    """
    layers: list[LayerCache] = []
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        keys: torch.Tensor | None = getattr(layer, "keys", None)
        values: torch.Tensor | None = getattr(layer, "values", None)
        if kind not in _PLAIN or keys is None or values is None:
            raise LoweringError(
                f"layer {index} of the model does not keep keys and values of its own",
                got=kind,
                expected="attention in every layer",
            )
        window = getattr(layer, "sliding_window", None)
        layers.append(
            LayerCache((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), window)
        )
    return tuple(layers)


class _Layer(CacheLayerMixin):
    """The cache of one layer during one call.

    Args:
        columns: Position of each column of the scores, [S], int64.
        position: Number of tokens before the call, [1], int64.
        sliding: Whether the layer has a window.
    """

    def __init__(self, columns: torch.Tensor, position: torch.Tensor, *, sliding: bool) -> None:
        super().__init__()
        self.is_sliding = sliding
        self._columns = columns
        self._position = position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is no storage of its own."""

    def get_mask_sizes(self, query_length: int) -> Any:
        """Return the number of columns and their positions [S], which ``attention.mask`` takes."""
        del query_length
        return self._columns.shape[0], self._columns

    def get_seq_length(self) -> Any:
        """Return the number of tokens before the call, [1]."""
        return self._position

    def get_max_length(self) -> int:
        """Return that there is no bound."""
        return -1


class _PassedLayer(_Layer):
    """Rows that are inputs of the call; its own keys and values are joined behind them."""

    def __init__(self, past: Segment, call: Call, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._past = past
        self._call = call
        self.new: Segment | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Take the call's own keys and values; return all."""
        del args, kwargs
        self.new = (key_states, value_states)
        return self._call.join((self._past, self.new))


class _PlacedLayer(_PassedLayer):
    """Rows that are inputs; the call's own keys and values are placed among them, in a copy.

    For models that infer a column's position from its place.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Take the call's own keys and values; return all."""
        del args, kwargs
        self.new = (key_states, value_states)
        length = key_states.shape[2]
        at = self._position + torch.arange(length)
        keys, values = (
            _placed(past, at, new) for past, new in zip(self._past, self.new, strict=True)
        )
        return keys, values


def _placed(past: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    rows = functional.pad(past, (0, 0, 0, new.shape[2] - 1)).clone()
    rows[:, :, at] = new
    return rows


class _KeptLayer(_Layer):
    """Buffers of a module, in which the call's own keys and values are written."""

    def __init__(self, buffers: Segment, rows: torch.Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffers = buffers
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Write the call's own keys and values; return all."""
        del args, kwargs
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._rows] = new
        return self._buffers


def passed_caches(
    layers: Sequence[LayerCache],
    past: Sequence[torch.Tensor],
    position: torch.Tensor,
    call: Call,
    *,
    length: int,
    placed: bool,
) -> Cache:
    """Return caches that are inputs of a call.

    Args:
        layers: What each layer keeps.
        past: Keys and values of each layer in turn, each [1, kv_heads, S, width].
        position: Number of tokens before the call, [1], int64.
        call: Keeps the segments.
        length: Number L of the call's tokens.
        placed: Whether the columns have to be in the order of their positions.
    """
    own = position + torch.arange(length)
    known: dict[tuple[int, bool], torch.Tensor] = {}
    made: list[Any] = []
    for index, layer in enumerate(layers):
        segment = past[2 * index], past[2 * index + 1]
        rows, ring = segment[0].shape[2], layer.window == segment[0].shape[2]
        if (rows, ring) not in known:
            known[rows, ring] = (
                torch.arange(rows + length - 1)
                if placed
                else torch.cat((_past_positions(rows, position, ring=ring), own))
            )
        kind = _PlacedLayer if placed else _PassedLayer
        made.append(
            kind(segment, call, known[rows, ring], position, sliding=layer.window is not None)
        )
    return Cache(layers=made)


def new_rows(cache: Cache) -> list[torch.Tensor]:
    """Return the keys and values of each layer in turn that a call has made of its own tokens."""
    layers: list[Any] = cache.layers
    return [tensor for layer in layers for tensor in layer.new]


def kept_caches(
    layers: Sequence[LayerCache],
    buffers: Sequence[Segment],
    position: torch.Tensor,
    *,
    length: int,
) -> Cache:
    """Return caches that are buffers of a module.

    Args:
        layers: What each layer keeps.
        buffers: Keys and values of each layer.
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens, padding included.
    """
    own = position + torch.arange(length)
    made: list[Any] = []
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, segment in zip(layers, buffers, strict=True):
        rows = segment[0].shape[2]
        if rows not in known:
            ring = layer.window is not None and rows == layer.window + length - 1
            known[rows] = (
                (own % rows, _ring_positions(rows, position + (length - 1)))
                if ring
                else (own, torch.arange(rows))
            )
        at, columns = known[rows]
        made.append(_KeptLayer(segment, at, columns, position, sliding=layer.window is not None))
    return Cache(layers=made)


def _past_positions(rows: int, position: torch.Tensor, *, ring: bool) -> torch.Tensor:
    if ring:
        return _ring_positions(rows, position - 1)
    places = torch.arange(rows)
    return torch.where(places < position, places, _NOWHERE)


def _ring_positions(rows: int, newest: torch.Tensor) -> torch.Tensor:
    """Return the position of each row's token, given that of the newest token."""
    latest = newest - (newest - torch.arange(rows)) % rows
    return torch.where(latest >= 0, latest, _NOWHERE)
