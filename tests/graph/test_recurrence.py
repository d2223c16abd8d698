"""LSTM layers that JAX scans over a sequence become one op, and what differs stays a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from support.stablehlo_runs import check_function

STEPS, BATCH, INPUTS, UNITS = 5, 2, 3, 4
_RANDOM = np.random.default_rng(0)


def _numbers(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape).astype(np.float32)


_X = _numbers(STEPS, BATCH, INPUTS)
_STATE = (_numbers(BATCH, UNITS), _numbers(BATCH, UNITS))
_INPUT, _RECURRENT = _numbers(INPUTS, 4 * UNITS), _numbers(UNITS, 4 * UNITS)
_INPUTS, _RECURRENTS = (np.split(weights, 4, 1) for weights in (_INPUT, _RECURRENT))
_BIAS = _numbers(4 * UNITS)
_SQUARE = _numbers(UNITS, 4 * UNITS)
Cell = Callable[[Any, Any], Any]


def _cell(
    gates: Callable[[Any, Any], Any] = lambda x, h: x @ _INPUT + h @ _RECURRENT + _BIAS,
    order: str = "ifgo",
    squash: Callable[[Any], Any] = jnp.tanh,
    opened: Callable[[Any, Any], Any] = lambda gate, _: jax.nn.sigmoid(gate),
) -> Cell:
    def step(carry: Any, x: Any) -> Any:
        hidden, cell = carry
        found = gates(x, hidden)
        split = found if isinstance(found, list) else jnp.split(found, 4, axis=-1)
        i, f, g, o = (split[order.index(letter)] for letter in "ifgo")
        cell = opened(f, cell) * cell + opened(i, cell) * jnp.tanh(g)
        hidden = opened(o, cell) * squash(cell)
        return (hidden, cell), hidden

    return step


def _returning(result: Callable[[Any, Any, Any], Any], cell: Cell | None = None) -> Cell:
    def step(carry: Any, x: Any) -> Any:
        after, _ = (cell or _cell())(carry, x)
        return after, result(carry, after, x)

    return step


def _scan(cell: Cell, **options: Any) -> Callable[..., Any]:
    return lambda x, *state: lax.scan(cell, state, x, **options)


def _flax(kind: Any) -> Callable[..., Any]:
    cell = kind(INPUTS, UNITS, rngs=nnx.Rngs(0))
    return lambda x, h, c: lax.scan(cell, (c, h), x)


def _two_layers(x: Any, h: Any, c: Any) -> Any:
    _, first = lax.scan(_cell(), (h, c), x)
    weights = _numbers(UNITS, 4 * UNITS)
    second = _cell(lambda x, h: x @ weights + h @ _RECURRENT)
    return lax.scan(second, (jnp.zeros_like(h), jnp.zeros_like(c)), first)[1]


LAYERS: dict[str, Callable[..., Any]] = {
    "two products": _scan(_cell()),
    "one product": _scan(
        _cell(lambda x, h: jnp.concatenate([h, x], -1) @ np.concatenate([_RECURRENT, _INPUT]))
    ),
    "gates in another order": _scan(_cell(order="ogfi")),
    "transposed weights": _scan(_cell(lambda x, h: x @ _INPUT + h @ _RECURRENT.T.copy().T)),
    "gates of their own": _scan(
        _cell(lambda x, h: [x @ w + h @ r for w, r in zip(_INPUTS, _RECURRENTS, strict=True)])
    ),
    "flax": _flax(nnx.LSTMCell),
    "flax, optimized": _flax(nnx.OptimizedLSTMCell),
    "two layers": _two_layers,
    "no sequence": lambda x, h, c: lax.scan(_cell(), (h, c), x)[0],
    "zeros to begin with": lambda x: lax.scan(_cell(), (jnp.zeros((BATCH, UNITS)),) * 2, x)[1],
}

OTHERS: dict[str, Callable[..., Any]] = {
    "peepholes": _scan(_cell(opened=lambda gate, cell: jax.nn.sigmoid(gate + cell))),
    "another activation": _scan(_cell(squash=jnp.sin)),
    "no logistic function": _scan(_cell(opened=lambda gate, _: jnp.exp(-jnp.exp(gate)))),
    "cell states": _scan(_returning(lambda _, after, x: after[1])),
    "the states before": _scan(_returning(lambda before, _, x: before[0])),
    "rows of the input": _scan(_returning(lambda _, after, x: x * after[0].sum())),
    "reverse": _scan(_cell(), reverse=True),
    "a state that is normalized": _scan(_cell(lambda x, h: x @ _INPUT + (h * 2) @ _RECURRENT)),
    "half of the steps": lambda x, h, c: lax.fori_loop(
        0, 2, lambda n, carry: _cell()(carry, x[n])[0], (h, c)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_lstm_becomes_one_op(name: str) -> None:
    arguments = (_X,) if name == "zeros to begin with" else (_X, *_STATE)
    ops = _ops(check_function(LAYERS[name], *arguments))
    assert ops.count("lstm") == (2 if name == "two layers" else 1)
    assert "while_loop" not in ops


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_lstm_stays_a_loop(name: str) -> None:
    ops = _ops(check_function(OTHERS[name], _X, *_STATE))
    assert "while_loop" in ops
    assert "lstm" not in ops


@pytest.mark.parametrize(
    "cell",
    [
        _cell(lambda x, h: x.T @ _SQUARE + h @ _SQUARE),
        _returning(lambda _, after, x: after[0].T, _cell(lambda x, h: x @ _SQUARE + h @ _SQUARE)),
    ],
    ids=["rows of the input", "rows of the result"],
)
def test_transposed_squares_are_not_taken_for_what_they_transpose(cell: Cell) -> None:
    squares = _numbers(STEPS, UNITS, UNITS)
    check_function(_scan(cell), squares, squares[0], squares[1])


def _ops(program: Any) -> list[str]:
    return [op.type for op in program.executable.model.function.block.walk()]
