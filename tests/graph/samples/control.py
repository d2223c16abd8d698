"""Samples of calls, branches and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph.samples.sample import Sample

from coreml_delegate.graph import DType

_LABELS = tuple(dtype.label for dtype in DType)
_X = np.array([[1, 0, 1], [0, 1, 1]])
_FEW = np.array([3.0, -1.0], np.float32)
_MORE = np.array([5.0, 2.0], np.float32)


def _count_to(b: Any, limit: Any, turn: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Return a loop of so many turns over given variables, without its counter."""

    def loop(*initial: Any) -> tuple[Any, ...]:
        def body(i: Any, *variables: Any) -> tuple[Any, ...]:
            return (b.add(i, b.constant(1)), *turn(*variables))

        def condition(i: Any, *_: Any) -> Any:
            return b.less(i, limit)

        return b.while_(condition, body, b.constant(0), *initial)[1:]

    return loop


def _times(b: Any, count: int, turn: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    return _count_to(b, b.constant(count), turn)


def _fibonacci(b: Any, n: Any) -> Any:
    loop = _count_to(b, n, lambda one, other: (other, b.add(one, other)))
    return loop(b.constant(0), b.constant(1))


def _nested(b: Any, n: Any) -> Any:
    def turn(total: Any, i: Any) -> tuple[Any, ...]:
        loop = _count_to(b, i, lambda total: (b.add(total, i),))
        (total,) = loop(total)
        (total,) = b.if_(
            b.less(i, b.constant(2)), lambda v: b.add(v, n), lambda v: v, total
        )  # ``n`` is captured from outside of both
        return total, b.add(i, b.constant(1))

    return _count_to(b, n, turn)(b.constant(0), b.constant(0))[0]


def _nested_result(n: int) -> np.ndarray:
    return np.array(sum(i * i + (n if i < 2 else 0) for i in range(n)), np.int32)


def _until_found(b: Any, x: Any) -> Any:
    """A loop whose only variables are a bool and an array."""

    def body(_: Any, v: Any) -> tuple[Any, Any]:
        return b.less(b.reduce_max(v, (0,)), b.constant(np.float32(100))), b.add(v, v)

    return b.while_(lambda goes_on, _: goes_on, body, b.constant(True), x)


_LOOPS = [
    *(
        Sample(
            "while",
            "swaps an argument and a constant",
            lambda b, x: _times(b, 3, lambda one, other: (other, one))(
                x, b.constant(np.zeros(x.shape, x.dtype.numpy), x.dtype)
            ),
            (_X.astype(label),),
            (np.zeros_like(_X).astype(label), _X.astype(label)),
        )
        for label in _LABELS
    ),
    *(
        Sample("while", f"{n} turns from constants", _fibonacci, (np.array(n, np.int32),), expected)
        for n, expected in (
            (0, (np.int32(0), np.int32(1))),
            (6, (np.int32(8), np.int32(13))),
        )
    ),
    Sample("while", "nested", _nested, (np.array(4, np.int32),), _nested_result(4)),
    Sample(
        "while",
        "returns a captured value, a constant and one value twice",
        lambda b, x, y: _times(b, 2, lambda u, v, w, z: (y, b.constant(7), z, z))(
            x, b.constant(0), x, b.add(x, y)
        ),
        (_FEW, _MORE),
        (_MORE, np.int32(7), _FEW + _MORE, _FEW + _MORE),
    ),
    Sample(
        "while",
        "one argument twice",
        lambda b, x: _times(b, 2, lambda u, v: (b.add(u, v), u))(x, x),
        (_FEW,),
        (3 * _FEW, 2 * _FEW),
    ),
    Sample(
        "while",
        "an argument is returned unchanged",
        lambda b, x, y: _times(b, 3, lambda u, v: (b.add(u, v), v))(x, y),
        (_FEW, _MORE),
        (_FEW + 3 * _MORE, _MORE),
    ),
    Sample(
        "while",
        "flag as a variable, rank 0",
        lambda b, x, f: _times(b, 3, lambda u, v: (b.multiply(u, u), b.not_(v)))(x, f),
        (np.array(2, np.float16), np.array(True)),
        (np.array(256, np.float16), np.array(False)),
    ),
    Sample("while", "until", _until_found, (_MORE,), (np.array(False), _MORE * 64)),
    Sample(
        "while",
        "empty variable",
        lambda b, x, e: _times(b, 3, lambda u, v: (b.add(u, u), b.add(v, v)))(x, e),
        (_FEW, np.zeros((0, 2), np.float32)),
        (_FEW * 8, np.zeros((0, 2), np.float32)),
    ),
    Sample(
        "while",
        "no turn",
        lambda b, x: b.while_(lambda u: b.constant(False), lambda u: b.add(u, u), x),
        (_FEW,),
        _FEW,
    ),
]


def _chosen(b: Any, p: Any, x: Any, y: Any) -> Any:
    return b.if_(
        p,
        lambda u, v: (v, b.add(u, v), u, b.constant(True)),
        lambda u, v: (b.constant(np.float32([0, 1])), u, u, b.constant(False)),
        x,
        y,
    )


_BRANCHES = [
    Sample(
        "if", "true", _chosen, (np.array(True), _FEW, _MORE), (_MORE, _FEW + _MORE, _FEW, np.True_)
    ),
    Sample(
        "if",
        "false",
        _chosen,
        (np.array(False), _FEW, _MORE),
        (np.array([0, 1], np.float32), _FEW, _FEW, np.False_),
    ),
    Sample(
        "if",
        "nested, of captured values alone",
        lambda b, p, x: b.if_(
            p,
            lambda: b.if_(b.not_(p), lambda: b.multiply(x, x), lambda: b.add(x, x)),
            lambda: x,
        ),
        (np.array(True), _FEW),
        2 * _FEW,
    ),
    Sample(
        "if",
        "known when it is built",
        lambda b, x: b.if_(b.constant(False), lambda: x, lambda: b.add(x, x)),
        (_FEW,),
        2 * _FEW,
    ),
    Sample(
        "if",
        "loop in a branch",
        lambda b, p, x: b.if_(
            p, lambda u: _times(b, 3, lambda v: (b.add(v, x),))(u)[0], lambda u: u, x
        ),
        (np.array(True), _FEW),
        4 * _FEW,
    ),
    Sample(
        "if",
        "empty operand",
        lambda b, p, x: b.if_(p, lambda u: (u, p), lambda u: (u, b.not_(p)), x),
        (np.array(False), np.zeros((0, 1), np.int8)),
        (np.zeros((0, 1), np.int8), np.True_),
    ),
    *(
        Sample(
            "case",
            f"index {index}",
            lambda b, k, x: b.case(
                k, [lambda u: u, lambda u: b.add(u, u), lambda u: b.multiply(u, u)], x
            ),
            (np.array(index, np.int32), _FEW),
            [_FEW, 2 * _FEW, _FEW * _FEW][index if 0 <= index < 3 else 2],
        )
        for index in (-1, 0, 1, 2, 3)
    ),
    Sample(
        "case",
        "one branch",
        lambda b, k: b.case(k, [lambda: b.add(k, k)]),
        (np.array(4, np.int32),),
        np.int32(8),
    ),
]


def _called(b: Any, x: Any) -> Any:
    def function(y: Any) -> tuple[Any, Any]:
        return _times(b, 2, lambda v: (b.add(v, y),))(y)[0], x

    closure = b.closure("function", function, x.type)
    (once, _) = b.call(closure, x)
    return b.call(closure, once)


_CALLS = [
    *(
        Sample(
            "call",
            "returns its arguments",
            lambda b, x: b.call(b.closure("both", lambda u, v: (v, u), x.type, x.type), x, x),
            (_X.astype(label),),
            (_X.astype(label), _X.astype(label)),
        )
        for label in _LABELS
    ),
    Sample("call", "twice, of a loop and a captured value", _called, (_FEW,), (9 * _FEW, _FEW)),
]

SAMPLES = [*_LOOPS, *_BRANCHES, *_CALLS]
