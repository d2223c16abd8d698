"""Caches of keys, values and recurrent states with the interface of ``transformers``.

A layer with a sliding window has a ring buffer of R rows: position p is in row p mod R. The
position of a row follows from the number of tokens so far.

Cross-attention has keys and values of a source. The decoder's first call computes them from the
encoder's result, once per source; ``encode`` returns them. Later calls pass them to the decoder as
a filled cache.
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
from coreml_delegate.patches.third_party import transformers

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
else:  # its error names the package to install
    Cache, CacheLayerMixin = transformers().Cache, transformers().cache_utils.CacheLayerMixin
    EncoderDecoderCache = transformers().EncoderDecoderCache

_NO_POSITION = 2**30
"""Position of a row without a token: after all tokens, so that no token sees it."""

# Cache layers of transformers: whether they have keys and values, and whether states.
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
    """Shapes of one layer's cache: keys and values of each token, states, or both.

    Attributes:
        keys: Heads and width of the keys; None for a layer without keys and values.
        values: Heads and width of the values; None without keys.
        window: Number of tokens that a token sees, itself included; None for all.
        states: Tensors that each call replaces.
    """

    keys: tuple[int, int] | None
    values: tuple[int, int] | None
    window: int | None
    states: tuple[State, ...] = ()

    @property
    def replaced(self) -> tuple[bool, ...]:
        """Whether a call replaces the whole tensor, for each tensor of ``empty``."""
        return (False,) * (2 if self.keys else 0) + (True,) * len(self.states)

    def rows(self, context: int, ahead: int) -> int:
        """Return the number of rows of keys and values.

        Args:
            context: Number of tokens of the longest text.
            ahead: Rows after the first that a call writes before it attends.
        """
        return min(context, self.window or context) + ahead

    def empty(
        self, context: int, ahead: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of an empty cache by name; see ``rows``."""
        tensors: dict[str, torch.Tensor] = {}
        for name, sizes in (("keys", self.keys), ("values", self.values)):
            if sizes:
                heads, width = sizes
                shape = (1, heads, self.rows(context, ahead), width)
                tensors[name] = torch.zeros(shape, dtype=dtype)
        for state in self.states:
            kind, number = state.name
            tensors[f"{kind}_{number}"] = torch.zeros(state.shape, dtype=dtype)
        return tensors


def read_layers(cache: DynamicCache) -> tuple[LayerCache, ...]:
    """Return the layers of a cache of ``transformers`` that has processed a token.

    Raises:
        LoweringError: A layer has other contents than keys, values and states, or shares them.
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


class UnlimitedLayer(CacheLayerMixin):
    """A layer for one call."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer has no storage of its own."""

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1


class _Layer(UnlimitedLayer):
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

    def get_mask_sizes(self, query_length: int) -> Any:
        """Return the number of columns and their positions [S], which ``attention.mask`` takes."""
        del query_length
        return self._columns.shape[0], self._columns

    def get_seq_length(self) -> Any:
        """Return the number of tokens before the call, [1]."""
        return self._position


class _InputLayer(_Layer):
    """A layer whose past rows are inputs; the call's keys and values are appended."""

    def __init__(self, past: Segment, call: Call, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._past = past
        self._call = call
        self.new: Segment | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Store the call's keys and values; return all keys and values."""
        del args, kwargs
        self.new = (key_states, value_states)
        return self._call.join((self._past, self.new))


class _OrderedLayer(_InputLayer):
    """A layer whose past rows are inputs; the call's rows are written at their positions in a copy.

    For models that use the index of a column as its position.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Store the call's keys and values; return all keys and values."""
        del args, kwargs
        self.new = (key_states, value_states)
        length = key_states.shape[2]
        at = self._position + torch.arange(length)
        keys, values = (
            _with_rows(past, at, new) for past, new in zip(self._past, self.new, strict=True)
        )
        return keys, values


def _with_rows(past: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    rows = functional.pad(past, (0, 0, 0, new.shape[2] - 1)).clone()
    rows[:, :, at] = new
    return rows


class _BufferLayer(_Layer):
    """A layer whose rows are buffers of a module; the call writes its keys and values to them."""

    def __init__(self, buffers: Segment, rows: torch.Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffers = buffers
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Write the call's keys and values; return the buffers."""
        del args, kwargs
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._rows] = new
        return self._buffers


class _InputHybrid(StateLayer, _InputLayer):
    """A layer whose rows and states are inputs of the call."""

    def __init__(self, states: Mapping[Name, torch.Tensor], span: Span, *args: Any) -> None:
        _InputLayer.__init__(self, *args[:-1], sliding=args[-1])
        StateLayer.__init__(self, states, span, write=False)


class _BufferHybrid(StateLayer, _BufferLayer):
    """A layer whose rows and states are buffers of a module."""

    def __init__(self, states: Mapping[Name, torch.Tensor], span: Span, *args: Any) -> None:
        _BufferLayer.__init__(self, *args[:-1], sliding=args[-1])
        StateLayer.__init__(self, states, span, write=True)


def input_caches(
    layers: Sequence[LayerCache],
    past: Sequence[torch.Tensor],
    position: torch.Tensor,
    call: Call,
    *,
    length: int,
    ordered: bool,
    last: torch.Tensor | None = None,
) -> Cache:
    """Return a cache whose tensors are inputs of a call.

    Args:
        layers: Shapes of each layer's cache.
        past: Tensors of each layer in turn; keys and values are [1, kv_heads, S, width].
        position: Number of tokens before the call, [1], int64.
        call: Records the segments.
        length: Number L of the call's tokens.
        ordered: Whether the columns have to be in the order of their positions.
        last: Index of the last token that is not padding, [1]; None without padding.
    """
    span = Span(position, length, last)
    own = position + torch.arange(length)
    positions: dict[tuple[int, bool], torch.Tensor] = {}

    def column_positions(rows: int, *, ring: bool) -> torch.Tensor:
        if (rows, ring) not in positions:
            positions[rows, ring] = (
                torch.arange(rows + length - 1)
                if ordered
                else torch.cat((past_positions(rows, position, ring=ring), own))
            )
        return positions[rows, ring]

    caches: list[Any] = []
    tensors = iter(past)
    for layer in layers:
        if not layer.keys:
            caches.append(StateLayer(take_states(layer.states, tensors), span, write=False))
            continue
        segment = next(tensors), next(tensors)
        rows, sliding = segment[0].shape[2], layer.window is not None
        columns = column_positions(rows, ring=layer.window == rows)
        if layer.states:
            states = take_states(layer.states, tensors)
            caches.append(_InputHybrid(states, span, segment, call, columns, position, sliding))
        else:
            kind = _OrderedLayer if ordered else _InputLayer
            caches.append(kind(segment, call, columns, position, sliding=sliding))
    return Cache(layers=caches)


def as_computed(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the caches in the dtype in which a model computes, fp32."""
    return [_cast(cache, torch.float32) for cache in caches]


def as_stored(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return computed tensors in the dtype of the caches."""
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A cast without effect would be a call of the program.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def new_tensors(cache: Cache) -> list[torch.Tensor]:
    """Return the tensors that a call computed, layer by layer: rows of its tokens, and states."""
    tensors: list[torch.Tensor] = []
    layers: list[Any] = cache.layers
    for layer in layers:
        tensors += getattr(layer, "new", None) or ()
        tensors += getattr(layer, "replaced", ())
    return tensors


def buffer_caches(
    layers: Sequence[LayerCache],
    buffers: Sequence[torch.Tensor],
    position: torch.Tensor,
    *,
    length: int,
    last: torch.Tensor | None = None,
) -> Cache:
    """Return a cache whose tensors are buffers of a module.

    Args:
        layers: Shapes of each layer's cache.
        buffers: Tensors of each layer in turn.
        position: Number of tokens before the call, [1], int64.
        length: Number L of the call's tokens, padding included.
        last: Index of the last token that is not padding, [1]; None without padding.
    """
    span = Span(position, length, last)
    own = position + torch.arange(length)
    indices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rows_and_positions(rows: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        if rows not in indices:
            ring = window is not None and rows == window + length - 1
            indices[rows] = (
                (own % rows, _ring_positions(rows, position + (length - 1)))
                if ring
                else (own, torch.arange(rows))
            )
        return indices[rows]

    caches: list[Any] = []
    tensors = iter(buffers)
    for layer in layers:
        if not layer.keys:
            caches.append(StateLayer(take_states(layer.states, tensors), span, write=True))
            continue
        segment = next(tensors), next(tensors)
        at, columns = rows_and_positions(segment[0].shape[2], layer.window)
        sliding = layer.window is not None
        if layer.states:
            states = take_states(layer.states, tensors)
            caches.append(_BufferHybrid(states, span, segment, at, columns, position, sliding))
        else:
            caches.append(_BufferLayer(segment, at, columns, position, sliding=sliding))
    return Cache(layers=caches)


def past_positions(rows: int, position: torch.Tensor, *, ring: bool) -> torch.Tensor:
    """Return the position of each row's token before a call, [S], int64.

    Args:
        rows: Number S of rows.
        position: Number of tokens before the call, [1], int64.
        ring: Whether position p is in row p mod S.
    """
    if ring:
        return _ring_positions(rows, position - 1)
    indices = torch.arange(rows)
    return torch.where(indices < position, indices, _NO_POSITION)


def _ring_positions(rows: int, newest: torch.Tensor) -> torch.Tensor:
    """Return the position of each row's token, given the position of the newest token."""
    # No negative dividend, whose remainder is negative by ExecuTorch's kernel (1.5.1).
    latest = newest - (newest + torch.arange(rows, 0, -1)) % rows
    return torch.where(latest >= 0, latest, _NO_POSITION)


class _CrossLayer(UnlimitedLayer):
    """Keys and values of one layer, of a source or of the only token of a text."""

    is_sliding = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of the call's tokens and offset 0: a call sees its own tokens."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Segment:
        """Store keys and values; return them."""
        del args, kwargs
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def empty_caches(layers: int) -> EncoderDecoderCache:
    """Return empty self-attention and cross-attention caches for the first call."""
    own, cross = (Cache(layers=[_CrossLayer() for _ in range(layers)]) for _ in range(2))
    return EncoderDecoderCache(own, cross)


def cross_rows(cache: EncoderDecoderCache) -> list[torch.Tensor]:
    """Return the keys and values of the source, layer by layer."""
    layers: list[Any] = cache.cross_attention_cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def with_source(own: Cache, cross: Sequence[torch.Tensor]) -> EncoderDecoderCache:
    """Return the caches for later calls.

    Args:
        own: Self-attention cache of the decoder's text.
        cross: Keys and values of the source, layer by layer, each [1, heads, N, width].
    """
    layers: list[Any] = [_CrossLayer() for _ in own.layers]
    for index, layer in enumerate(layers):
        layer.update(cross[2 * index], cross[2 * index + 1])
    return EncoderDecoderCache(own, Cache(layers=layers))
