"""Caches of keys and values, and of whole states, behind the interface of ``transformers``.

A layer with a sliding window keeps as many rows as it needs: position p lies in row p modulo the
number of rows. Which position a row has follows from the number of tokens so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import Call, Segment
from coreml_delegate.llm.states import Name, Span, State, StateLayer, read_states, take_states
from coreml_delegate.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
else:  # which says what to install if it is missing
    Cache, CacheLayerMixin = transformers().Cache, transformers().cache_utils.CacheLayerMixin

_NOWHERE = 2**30
"""Position of a row that has no token: later than all, so that no token sees it."""

# Layers of transformers' caches: whether they keep keys and values, and whether states.
_KINDS: Mapping[str, tuple[bool, bool]] = {
    "DynamicLayer": (True, False),
    "DynamicSlidingWindowLayer": (True, False),
    "LinearAttentionLayer": (False, True),
    "LinearAttentionAndFullAttentionLayer": (True, True),
    "LinearAttentionAndSlidingWindowAttentionLayer": (True, True),
    "DummyLayer": (False, False),
}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Contents of the cache of one layer: keys and values of each token, whole states, or both.

    Attributes:
        keys: Heads and width of its keys; None if it keeps no keys and values.
        values: Heads and width of its values; None without keys.
        window: Number of tokens that a token sees, itself included; None for all.
        states: Tensors that each call replaces.
    """

    keys: tuple[int, int] | None
    values: tuple[int, int] | None
    window: int | None
    states: tuple[State, ...] = ()

    @property
    def replaced(self) -> tuple[bool, ...]:
        """Whether a call replaces a tensor, for each in the order of ``empty``."""
        return (False,) * (2 if self.keys else 0) + (True,) * len(self.states)

    def rows(self, context: int, ahead: int) -> int:
        """Return how many rows keys and values need.

        Args:
            context: Number of tokens of the longest text.
            ahead: Rows that a call writes before it attends, beyond the first.
        """
        return min(context, self.window or context) + ahead

    def empty(self, context: int, ahead: int) -> dict[str, torch.Tensor]:
        """Return the tensors of an empty cache by name; see ``rows``."""
        made: dict[str, torch.Tensor] = {}
        for name, sizes in (("keys", self.keys), ("values", self.values)):
            if sizes:
                heads, width = sizes
                made[name] = torch.zeros(1, heads, self.rows(context, ahead), width)
        for state in self.states:
            kind, number = state.name
            made[f"{kind}_{number}"] = torch.zeros(state.shape)
        return made


def read_layers(cache: DynamicCache) -> tuple[LayerCache, ...]:
    """Return what each layer keeps, given a cache of ``transformers`` that has seen a token.

    Raises:
        LoweringError: A layer keeps something else than keys, values and states, or shares them.
    """
    layers: list[LayerCache] = []
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        keys: torch.Tensor | None = getattr(layer, "keys", None)
        values: torch.Tensor | None = getattr(layer, "values", None)
        sizes = [(rows.shape[1], rows.shape[3]) for rows in (keys, values) if rows is not None]
        states = read_states(layer)
        if (len(sizes) == 2, bool(states)) != _KINDS.get(kind):
            raise LoweringError(
                f"layer {index} of the model does not keep keys and values or states of its own",
                got=kind,
                expected="attention, a convolution or a recurrence in every layer",
            )
        window = getattr(layer, "sliding_window", None)
        key_sizes, value_sizes = sizes or (None, None)
        layers.append(LayerCache(key_sizes, value_sizes, window, states))
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


class _PassedHybrid(StateLayer, _PassedLayer):
    """Rows and states that are inputs of the call."""

    def __init__(self, states: Mapping[Name, torch.Tensor], span: Span, *args: Any) -> None:
        _PassedLayer.__init__(self, *args[:-1], sliding=args[-1])
        StateLayer.__init__(self, states, span, write=False)


class _KeptHybrid(StateLayer, _KeptLayer):
    """Rows and states that are buffers of a module."""

    def __init__(self, states: Mapping[Name, torch.Tensor], span: Span, *args: Any) -> None:
        _KeptLayer.__init__(self, *args[:-1], sliding=args[-1])
        StateLayer.__init__(self, states, span, write=True)


def passed_caches(
    layers: Sequence[LayerCache],
    past: Sequence[torch.Tensor],
    position: torch.Tensor,
    call: Call,
    *,
    length: int,
    placed: bool,
    last: torch.Tensor | None = None,
) -> Cache:
    """Return caches that are inputs of a call.

    Args:
        layers: What each layer keeps.
        past: Tensors of each layer in turn; keys and values are [1, kv_heads, S, width].
        position: Number of tokens before the call, [1], int64.
        call: Keeps the segments.
        length: Number L of the call's tokens.
        placed: Whether the columns have to be in the order of their positions.
        last: Index of the last token that is no padding, [1]; None if there is no padding.
    """
    span = Span(position, length, last)
    own = position + torch.arange(length)
    known: dict[tuple[int, bool], torch.Tensor] = {}

    def columns(rows: int, *, ring: bool) -> torch.Tensor:
        if (rows, ring) not in known:
            known[rows, ring] = (
                torch.arange(rows + length - 1)
                if placed
                else torch.cat((_past_positions(rows, position, ring=ring), own))
            )
        return known[rows, ring]

    made: list[Any] = []
    tensors = iter(past)
    for layer in layers:
        if not layer.keys:
            made.append(StateLayer(take_states(layer.states, tensors), span, write=False))
            continue
        segment = next(tensors), next(tensors)
        rows, sliding = segment[0].shape[2], layer.window is not None
        places = columns(rows, ring=layer.window == rows)
        if layer.states:
            states = take_states(layer.states, tensors)
            made.append(_PassedHybrid(states, span, segment, call, places, position, sliding))
        else:
            kind = _PlacedLayer if placed else _PassedLayer
            made.append(kind(segment, call, places, position, sliding=sliding))
    return Cache(layers=made)


def new_tensors(cache: Cache) -> list[torch.Tensor]:
    """Return what a call has made for each layer in turn: rows of its own tokens, and states."""
    made: list[torch.Tensor] = []
    layers: list[Any] = cache.layers
    for layer in layers:
        made += getattr(layer, "new", None) or ()
        made += getattr(layer, "replaced", ())
    return made


def kept_caches(
    layers: Sequence[LayerCache],
    buffers: Sequence[torch.Tensor],
    position: torch.Tensor,
    *,
    length: int,
    last: torch.Tensor | None = None,
) -> Cache:
    """Return caches that are buffers of a module.

    Args:
        layers: What each layer keeps.
        buffers: Tensors of each layer in turn.
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens, padding included.
        last: Index of the last token that is no padding, [1]; None if there is no padding.
    """
    span = Span(position, length, last)
    own = position + torch.arange(length)
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def places(rows: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        if rows not in known:
            ring = window is not None and rows == window + length - 1
            known[rows] = (
                (own % rows, _ring_positions(rows, position + (length - 1)))
                if ring
                else (own, torch.arange(rows))
            )
        return known[rows]

    made: list[Any] = []
    tensors = iter(buffers)
    for layer in layers:
        if not layer.keys:
            made.append(StateLayer(take_states(layer.states, tensors), span, write=True))
            continue
        segment = next(tensors), next(tensors)
        at, columns = places(segment[0].shape[2], layer.window)
        sliding = layer.window is not None
        if layer.states:
            states = take_states(layer.states, tensors)
            made.append(_KeptHybrid(states, span, segment, at, columns, position, sliding))
        else:
            made.append(_KeptLayer(segment, at, columns, position, sliding=sliding))
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
