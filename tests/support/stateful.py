"""Modules with mutable buffers, and the inputs of their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]


class Buffers(nn.Module):
    """A module whose ``forward`` is a function of itself and the inputs.

    Args:
        body: Called as ``forward``.
        buffers: Initial values.
    """

    def __init__(self, body: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.body(self, *inputs)


class Attention(nn.Module):
    """One head over a cache of keys and values, written at a position that is an input."""

    def __init__(self, width: int = 8, length: int = 6, *, by_index: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.by_index = by_index
        # ExecuTorch cannot write back a buffer whose new value has a gradient.
        self.requires_grad_(requires_grad=False)
        self.register_buffer("keys", torch.zeros(1, length, width))
        self.register_buffer("values", torch.zeros(1, length, width))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if self.by_index:
            self.keys[:, position] = key
            self.values[:, position] = value
        else:
            self.keys.index_copy_(1, position, key)
            self.values.index_copy_(1, position, value)
        scores = query @ self.keys.transpose(-1, -2) / x.shape[-1] ** 0.5
        seen = torch.arange(self.keys.shape[1]) <= position[:, None]
        weights = scores.masked_fill(~seen, -1e4).softmax(-1)
        return self.out(weights @ self.values)


def _accumulate(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x)
    return m.total * 2.0


def _read_around(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = m.total * 0.5
    m.total.mul_(0.5).add_(x)
    m.total[0] = 1.0
    return before, m.total + 1.0


def _several(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1.0)
    m.mean.lerp_(x, 0.25)
    return (x - m.mean) / m.count


def _side_by_side(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two new values at the end, which nothing reads in this run."""
    y = x * (m.count + m.total)
    m.count.add_(1.0)
    m.total.add_(x)
    return y


def _convolution_cache(m: Any, x: torch.Tensor) -> torch.Tensor:
    window = torch.cat([m.past, x], dim=-1)
    m.past.copy_(window[..., x.shape[-1] :])
    return window.sum(-1)


def _shift(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.older.copy_(m.newer)
    m.newer.copy_(x)
    return m.older + m.newer * 2.0


def _returned(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x)
    return m.total


def _old_returned(m: Any, x: torch.Tensor) -> torch.Tensor:
    old = m.total.clone()
    m.total.add_(x)
    return old


def _never_read(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last.copy_(x * 3.0)
    return x + 1.0


def _index_put(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    m.total[i] = x
    return m.total * 2.0


def _index_copy(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    m.total.index_copy_(0, i, x)
    return m.total * 2.0


def _slice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total[1:3, ::2] = x
    return m.total * 2.0


def _scatter(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    m.total.scatter_(0, i, x)
    return m.total + 1.0


def _roll(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.ring.copy_(torch.cat([m.ring[1:], x[None]]))
    return m.ring.mean(0)


def _counter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return x * m.count


def _seen(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen = m.seen | (x > 0.5)
    m.seen.copy_(seen)
    return torch.where(seen, x, x * 0.0), seen


def _maximum(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.best.copy_(torch.maximum(m.best, x.amax()))
    return x - m.best


def _asinh(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x)
    return torch.asinh(m.total)


def _read_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.asinh(m.total * 2.0 + x)
    m.total.copy_(y + 1.0)
    return y * 2.0


@dataclass(frozen=True)
class Case:
    """A stateful module and calls of it.

    Attributes:
        make: Builds equal modules.
        inputs: Inputs of call number n.
        states: The buffers that become Core ML states.
        outside: Why another buffer does not become a state, by buffer.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    states: tuple[str, ...] = ()
    outside: tuple[tuple[str, str], ...] = ()


def _values(*shape: int) -> Callable[[int], Inputs]:
    # Multiples of 1/8: what fp16 holds exactly, sums of a few of them included.
    def inputs(call: int) -> Inputs:
        generator = torch.Generator().manual_seed(call)
        return (torch.randint(-16, 16, shape, generator=generator) / 8.0,)

    return inputs


def _with(inputs: Callable[[int], Inputs], extra: Callable[[int], torch.Tensor]) -> Any:
    return lambda call: (*inputs(call), extra(call))


def _moved(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.older.copy_(m.newer)
    m.newer.add_(x)
    return m.older * 0.5 + m.newer


def _uint8(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last.copy_((x * x).to(torch.uint8))
    return x + m.last.to(torch.float32)


def _flags(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.logical_or_(x > 0.5)
    return torch.where(m.seen, x, -x)


_ROW = torch.arange(4.0) / 4.0
_INTEGERS = "Core ML states are fp16, which has integers up to 2048"
_OLD = "its old value is returned, or becomes that of another buffer"
_TOO = "its new value is also returned"
_UNREAD = "nothing reads it before it is written"
_CPU = "aten.asinh.default (aten_asinh_default), on the CPU, reads or writes it"
_SHARED = "several partitions use it (coreml_0, coreml_1)"
_ONE = torch.ones(1, dtype=torch.int32)

CASES: dict[str, Case] = {
    "add_": Case(lambda: Buffers(_accumulate, total=torch.zeros(4)), _values(4), ("total",)),
    "several updates": Case(
        lambda: Buffers(_read_around, total=torch.zeros(3, 4)), _values(3, 4), ("total",)
    ),
    "several buffers": Case(
        lambda: Buffers(_several, count=torch.zeros(1), mean=torch.zeros(4)),
        _values(4),
        ("count", "mean"),
    ),
    # pytorch/executorch#21855: nothing that reads it writes it back itself.
    "convolution cache": Case(
        lambda: Buffers(_convolution_cache, past=torch.zeros(1, 2, 3)), _values(1, 2, 2), ("past",)
    ),
    "shift": Case(
        lambda: Buffers(_shift, older=torch.zeros(4), newer=torch.zeros(4)),
        _values(4),
        outside=(("older", _UNREAD), ("newer", _OLD)),
    ),
    "moved": Case(
        lambda: Buffers(_moved, older=torch.zeros(4), newer=torch.zeros(4)),
        _values(4),
        outside=(("older", _UNREAD), ("newer", _OLD)),
    ),
    "returned": Case(
        lambda: Buffers(_returned, total=torch.zeros(4)), _values(4), outside=(("total", _TOO),)
    ),
    "old value returned": Case(
        lambda: Buffers(_old_returned, total=torch.zeros(4)), _values(4), ("total",)
    ),
    "never read": Case(
        lambda: Buffers(_never_read, last=torch.zeros(4)), _values(4), outside=(("last", _UNREAD),)
    ),
    "index_put": Case(
        lambda: Buffers(_index_put, total=torch.zeros(5, 4)),
        _with(_values(2, 4), lambda call: torch.tensor([call % 5, (call + 2) % 5])),
        ("total",),
    ),
    "index_copy": Case(
        lambda: Buffers(_index_copy, total=torch.zeros(5, 4)),
        _with(_values(2, 4), lambda call: torch.tensor([call % 5, (call + 2) % 5])),
        ("total",),
    ),
    "slice": Case(lambda: Buffers(_slice, total=torch.zeros(4, 4)), _values(2, 2), ("total",)),
    "scatter": Case(
        lambda: Buffers(_scatter, total=torch.zeros(5, 4)),
        _with(_values(1, 4), lambda call: torch.full((1, 4), call % 5)),
        ("total",),
    ),
    "ring": Case(lambda: Buffers(_roll, ring=torch.zeros(3, 4)), _values(4), ("ring",)),
    "scalar": Case(lambda: Buffers(_maximum, best=torch.zeros(())), _values(4), ("best",)),
    "bool": Case(
        lambda: Buffers(_flags, seen=torch.zeros(4, dtype=torch.bool)), _values(4), ("seen",)
    ),
    "bool, returned": Case(
        lambda: Buffers(_seen, seen=torch.zeros(4, dtype=torch.bool)),
        _values(4),
        outside=(("seen", _TOO),),
    ),
    "uint8": Case(
        lambda: Buffers(_uint8, last=torch.zeros(4, dtype=torch.uint8)),
        _values(4),
        outside=(("last", _UNREAD),),
    ),
    "int32": Case(
        lambda: Buffers(_counter, count=_ONE * 0),
        _values(4),
        outside=(("count", f"it is int32: {_INTEGERS}"),),
    ),
    "int32 from 3000 on": Case(
        lambda: Buffers(_counter, count=_ONE * 3000),
        _values(4),
        outside=(("count", f"it is int32: {_INTEGERS}"),),
    ),
    "int64 scalar": Case(
        lambda: Buffers(_counter, count=torch.zeros((), dtype=torch.int64)),
        _values(4),
        outside=(("count", f"it is int64: {_INTEGERS}"),),
    ),
    "initial values": Case(lambda: Buffers(_accumulate, total=_ROW), _values(4), ("total",)),
    "initial values of several": Case(
        lambda: Buffers(_several, count=torch.full((1,), 2.0), mean=_ROW),
        _values(4),
        ("count", "mean"),
    ),
    "initial flags": Case(
        lambda: Buffers(_flags, seen=torch.tensor([True, False, True, False])),
        _values(4),
        ("seen",),
    ),
    "initial values outside": Case(
        lambda: Buffers(_returned, total=_ROW), _values(4), outside=(("total", _TOO),)
    ),
    "initial infinity": Case(
        lambda: Buffers(_maximum, best=torch.tensor(-float("inf"))), _values(4), ("best",)
    ),
    "seen outside": Case(
        lambda: Buffers(_asinh, total=torch.zeros(4)), _values(4), outside=(("total", _CPU),)
    ),
    "two partitions": Case(
        lambda: Buffers(_read_twice, total=torch.zeros(4)),
        _values(4),
        outside=(("total", _SHARED),),
    ),
    "attention by index_copy": Case(
        Attention,
        _with(_values(1, 1, 8), lambda call: torch.tensor([call % 6])),
        ("keys", "values"),
    ),
    "attention by index_put": Case(
        lambda: Attention(by_index=True),
        _with(_values(1, 1, 8), lambda call: torch.tensor([call % 6])),
        ("keys", "values"),
    ),
    "new values one after the other": Case(
        lambda: Buffers(_side_by_side, count=torch.zeros(4), total=torch.zeros(4)),
        _values(4),
        ("count", "total"),
    ),
}
