"""Random MIL programs of tensors with few different sizes, so that many dimensions are equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.mil import Arrays, MilFunction, mb

_RANKS = (2, 3, 4, 4, 5)
_MOST = 512  # elements of a tensor


def draw_program(source: random.Random, steps: int) -> tuple[MilFunction, Arrays]:
    """Draw a builder function of one to three inputs of one shape, and values for them.

    Args:
        source: Source of the random choices.
        steps: Number of ops, beside the constants they need.
    """
    size = source.choice((2, 3, 4))
    shape = [source.choice((size, size, size, 1, 2)) for _ in range(source.choice(_RANKS))]
    numbers = np.random.default_rng(source.randrange(1 << 30))
    seed = source.randrange(1 << 30)
    inputs = {
        f"x{n}": numbers.standard_normal(shape).astype(np.float32)
        for n in range(source.randint(1, 3))
    }

    def function(**variables: Any) -> Any:
        choices = random.Random(seed)
        values = list(variables.values())
        for _ in range(steps):
            step = choices.choice(_STEPS)
            x = choices.choice([*values, *[values[-1]] * 3])
            values += step(choices, x, values)
        results = values[len(variables) :] or [mb.tanh(x=values[0])]
        return results[-choices.randint(1, 2) :]

    return function, inputs


def _constant(source: random.Random, shape: Sequence[int]) -> np.ndarray:
    numbers = np.random.default_rng(source.randrange(1 << 30))
    return numbers.standard_normal(shape).astype(np.float32)


def _transpose(source: random.Random, x: Any, _: Any) -> list[Any]:
    return [mb.transpose(x=x, perm=source.sample(range(x.rank), x.rank))] if x.rank else []


def _swap(source: random.Random, x: Any, _: Any) -> list[Any]:
    """Swap two neighbouring dimensions before the last, like the transposes of attention."""
    if x.rank < 3:
        return []
    order = list(range(x.rank))
    axis = source.randrange(x.rank - 2)
    order[axis : axis + 2] = order[axis + 1], order[axis]
    return [mb.transpose(x=x, perm=order)]


def _reshape(source: random.Random, x: Any, _: Any) -> list[Any]:
    """Merge two neighbouring dimensions, split one, or add or remove a dimension of size 1."""
    shape = list(x.shape)
    axis = source.randrange(x.rank) if x.rank else 0
    options = [[*shape[:axis], 1, *shape[axis:]]] if x.rank < 5 else []
    if axis + 1 < x.rank:
        options.append([*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]])
    if 0 < x.rank < 5:
        options += [
            [*shape[:axis], factor, shape[axis] // factor, *shape[axis + 1 :]]
            for factor in (2, 3, 4)
            if shape[axis] % factor == 0
        ]
    return [mb.reshape(x=x, shape=source.choice(options))] if options else []


def _squeeze(_: random.Random, x: Any, __: Any) -> list[Any]:
    axes = [n for n, size in enumerate(x.shape) if size == 1]
    return [mb.squeeze(x=x, axes=axes[:1])] if axes and x.rank > 1 else []


def _with_constant(source: random.Random, x: Any, _: Any) -> list[Any]:
    shape = [source.choice((size, size, 1)) for size in x.shape][source.randint(0, x.rank) :]
    op = source.choice((mb.add, mb.mul, mb.sub, mb.maximum))
    operands = [x, _constant(source, shape)]
    source.shuffle(operands)
    return [op(x=operands[0], y=operands[1])]


def _of_two(source: random.Random, x: Any, values: list[Any]) -> list[Any]:
    y = source.choice([value for value in values if value.shape == x.shape])
    axis = source.randrange(x.rank) if x.rank else None
    if axis is not None and np.prod(x.shape) < _MOST and source.random() < 0.2:
        return [mb.concat(values=[x, y], axis=axis)]
    return [source.choice((mb.add, mb.mul))(x=x, y=y)]


def _unary(source: random.Random, x: Any, _: Any) -> list[Any]:
    return [source.choice((mb.tanh, mb.relu, mb.abs, mb.sigmoid))(x=x)]


def _softmax(source: random.Random, x: Any, _: Any) -> list[Any]:
    return [mb.softmax(x=x, axis=source.randrange(x.rank))] if x.rank else []


def _reduce(source: random.Random, x: Any, _: Any) -> list[Any]:
    if x.rank < 2:
        return []
    axes = source.sample(range(x.rank), source.choice((1, 1, 2)))
    op = source.choice((mb.reduce_mean, mb.reduce_max, mb.reduce_sum))
    return [op(x=x, axes=axes, keep_dims=source.random() < 0.5)] if len(axes) < x.rank else []


def _norm(source: random.Random, x: Any, _: Any) -> list[Any]:
    if not x.rank:
        return []
    axes = list(range(x.rank))[-source.randint(1, 2) :]
    if source.random() < 0.3:
        axes = source.sample(range(x.rank), 1)
    shape = [x.shape[axis] for axis in axes]
    gamma = _constant(source, shape) if source.random() < 0.5 else None
    return [mb.layer_norm(x=x, axes=axes, gamma=gamma, epsilon=np.float32(1e-3))]


def _index(source: random.Random, x: Any, _: Any) -> list[Any]:
    if x.rank < 2:
        return []
    axis = source.randrange(x.rank)
    index = source.randrange(x.shape[axis])
    keep = [n != axis for n in range(x.rank)]
    begin = [0 if other else index for other in keep]
    end = [0 if other else index + 1 for other in keep]
    squeeze = [not other for other in keep]
    return [
        mb.slice_by_index(
            x=x, begin=begin, end=end, begin_mask=keep, end_mask=keep, squeeze_mask=squeeze
        )
    ]


def _split(source: random.Random, x: Any, _: Any) -> list[Any]:
    axes = [n for n, size in enumerate(x.shape) if size > 1]
    if not axes:
        return []
    axis = source.choice(axes)
    parts = mb.split(x=x, num_splits=x.shape[axis], axis=axis)
    squeezes = x.rank > 1 and source.random() < 0.6
    return [mb.squeeze(x=part, axes=[axis]) for part in parts] if squeezes else list(parts)


def _matmul(source: random.Random, x: Any, values: list[Any]) -> list[Any]:
    if x.rank < 2:
        return []
    flags = source.random() < 0.3, source.random() < 0.4
    depth = x.shape[-2 if flags[0] else -1]
    fits = [
        y
        for y in values
        if y.rank == x.rank
        and y.shape[:-2] == x.shape[:-2]
        and y.shape[-1 if flags[1] else -2] == depth
    ]
    if not fits or source.random() < 0.3:
        shape = [depth, source.choice((depth, x.shape[0]))]
        fits = [_constant(source, shape[::-1] if flags[1] else shape)]
    return [mb.matmul(x=x, y=source.choice(fits), transpose_x=flags[0], transpose_y=flags[1])]


def _attention(source: random.Random, x: Any, values: list[Any]) -> list[Any]:
    if not 3 <= x.rank <= 4:
        return []
    query, key, value = x, *source.choices([v for v in values if v.shape == x.shape], k=2)
    if source.random() < 0.6 and x.rank == 4:
        query, key, value = (mb.transpose(x=v, perm=[0, 2, 1, 3]) for v in (query, key, value))
    scores = mb.matmul(x=query, y=key, transpose_x=False, transpose_y=True)
    if source.random() < 0.4:
        scores = mb.mul(x=scores, y=np.float32(0.5))
    if source.random() < 0.4:
        scores = mb.add(x=scores, y=_constant(source, scores.shape[-2:]))
    result = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=value)
    if x.rank == 4 and source.random() < 0.6:
        result = mb.transpose(x=result, perm=[0, 2, 1, 3])
    return [result]


def _batch_norm(source: random.Random, x: Any, _: Any) -> list[Any]:
    if not 3 <= x.rank <= 4:
        return []
    mean, gamma, beta = (_constant(source, [x.shape[1]]) for _ in range(3))
    return [mb.batch_norm(x=x, mean=mean, variance=np.abs(mean) + 1, gamma=gamma, beta=beta)]


def _convolution(source: random.Random, x: Any, _: Any) -> list[Any]:
    if not 3 <= x.rank <= 5:
        return []
    channels = x.shape[1]
    groups = source.choice((1, channels))
    kernel = [source.choice((1, 1, size)) for size in x.shape[2:]]
    results = groups * source.choice((1, channels // groups, x.shape[0]))
    weight = _constant(source, [results, channels // groups, *kernel])
    bias = _constant(source, [results]) if source.random() < 0.5 else None
    padding = source.choice(("same", "valid"))
    return [mb.conv(x=x, weight=weight, bias=bias, pad_type=padding, groups=groups)]


Step = Callable[[random.Random, Any, list[Any]], list[Any]]

_STEPS: tuple[Step, ...] = (
    _transpose,
    _transpose,
    _swap,
    _swap,
    _reshape,
    _reshape,
    _squeeze,
    _with_constant,
    _with_constant,
    _of_two,
    _unary,
    _softmax,
    _reduce,
    _norm,
    _index,
    _split,
    _matmul,
    _matmul,
    _attention,
    _attention,
    _batch_norm,
    _convolution,
)
"""Each appends what it makes of a value, and maybe of others; nothing if it cannot."""
