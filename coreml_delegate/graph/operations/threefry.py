"""Threefry-2x32 with 20 rounds: random bits from a key (k0, k1) and a counter (x, y).

First, the key is added to the counter. A round is ``x <- x + y; y <- rotate_left(y, r) ^ x``. After
each group of four rounds, the next words of (k0, k1, k0 ^ k1 ^ 0x1BD11BDA) are added, cyclically,
and the number of the group to y.
Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, const, ordered, wrap
from coreml_delegate.graph.operations.byte_tables import combine_constant, combine_words
from coreml_delegate.graph.operations.shifts import shift_right_word
from coreml_delegate.graph.tensor_types import DType, TensorType
from coreml_delegate.mil.compose import mb

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ROW = 1024


def compose(c: Composer, state: Var, bits: TensorType) -> tuple[Var, Var | None]:
    """Return the next state, and random bits of a type in XLA's layout.

    The state is int32 [4]: key and counter, each with its low word first.
    """
    if bits.is_empty:
        return state, None
    shape = bits.static_shape or (1,)
    axis = _split_axis(shape)
    half = (*shape[:axis], -(-shape[axis] // 2), *shape[axis + 1 :])
    count = int(np.prod(half))
    key_low, key_high, low, high = mb.split(x=state, num_splits=4, axis=0)
    new_low = mb.add(x=low, y=np.int32(count))
    new_words = [key_low, key_high, new_low, _carry_bit(new_low, low, high)]
    new_state = mb.concat(values=new_words, axis=0)
    totals = _totals(low, count)
    counters = (totals, _carry_bit(totals, low, high))
    words = _rounds((key_low, key_high), counters)
    # The two words of a counter become neighbours along the axis.
    outer, inner = int(np.prod(half[: axis + 1])), int(np.prod(half[axis + 1 :]))
    columns = [mb.reshape(x=word, shape=(outer, 1, inner)) for word in words]
    pairs = mb.concat(values=columns, axis=1)
    rows = (int(np.prod(shape[:axis])), 2 * half[axis], inner)
    result = mb.reshape(x=pairs, shape=rows)
    if shape[axis] % 2:
        result = mb.slice_by_size(x=result, begin=[0, 0, 0], size=[rows[0], shape[axis], inner])
    return new_state, wrap(c.reshape(result, bits.shape), bits.dtype)


def _split_axis(shape: tuple[int, ...]) -> int:
    """Return the axis that XLA halves: the first of even size, else the first longest."""
    even = [axis for axis, size in enumerate(shape) if size % 2 == 0]
    return even[0] if even else int(np.argmax(shape))


def _totals(low: Var, count: int) -> Var:
    """Return ``low + [0, 1, ..., count - 1]``; from 1,024 on, rows and columns are added."""
    if count <= _ROW:
        return mb.add(x=low, y=const(np.arange(count, dtype=np.int32)))
    rows = np.arange(-(-count // _ROW), dtype=np.int32)[:, None] * np.int32(_ROW)
    starts = mb.add(x=low, y=const(rows))
    grid = mb.add(x=starts, y=const(np.arange(_ROW, dtype=np.int32)))
    flat = mb.reshape(x=grid, shape=[-1])
    return mb.slice_by_size(x=flat, begin=[0], size=[count])


def _carry_bit(total: Var, low: Var, high: Var) -> Var:
    """Return the high word of a counter whose low word became ``total``: carry if it wrapped."""
    is_wrapped = mb.less(x=ordered(total, DType.UINT32), y=ordered(low, DType.UINT32))
    carry = mb.cast(x=is_wrapped, dtype="int32")
    return mb.add(x=high, y=carry)


def _rounds(key: tuple[Var, Var], counter: tuple[Var, Var]) -> tuple[Var, Var]:
    """Return two random words for each counter."""
    first, second = key
    mixed = combine_words(np.bitwise_xor, first, second)
    keys = (first, second, combine_constant(np.bitwise_xor, DType.UINT32, mixed, _PARITY))
    x, y = (mb.add(x=word, y=part) for word, part in zip(counter, key, strict=True))
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = mb.add(x=x, y=y)
            y = combine_words(np.bitwise_xor, _rotate_left(y, rotation), x)
        x = mb.add(x=x, y=keys[(group + 1) % 3])
        y = mb.add(x=y, y=mb.add(x=keys[(group + 2) % 3], y=np.int32(group + 1)))
    return x, y


def _rotate_left(x: Var, count: int) -> Var:
    """Return ``(x << count) | (x >>> 32 - count)``."""
    up = mb.mul(x=x, y=np.int32(1 << count))
    return mb.add(x=up, y=shift_right_word(x, 32 - count))
