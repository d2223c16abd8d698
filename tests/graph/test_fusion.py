"""Layers that arrive in pieces become one op each, and compute what the pieces do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coreml_delegate import graph, stablehlo
from coreml_delegate.graph import views
from coreml_delegate.runtime import Model

ENGINES = ("reference", "openvino")
_RANDOM = np.random.default_rng(0)


def _numbers(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _layer_norm(x: Any, axes: Any = -1) -> Any:
    """As Flax does it, with the mean of squares."""
    mean = x.mean(axes, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(x).mean(axes, keepdims=True) - jnp.square(mean))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def _norm_of_deviations(x: Any, scale: Any, offset: Any) -> Any:
    variance = x.var(-1, keepdims=True)
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance + 1e-5) * scale + offset


def _attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, **keywords)


def _of_heads_last(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.4)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _finite_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As Flax does it; the scale is the queries'."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(8.0), k)
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


_X, _ROW = _numbers(2, 4, 8), _numbers(8)
_Q, _K, _V = _numbers(2, 5, 6, 8), _numbers(2, 7, 6, 8), _numbers(2, 7, 6, 8)
_FEW_K, _FEW_V = _K[:, :, :3], _V[:, :, :3]
# The last query has no key at all.
_MASK = (_RANDOM.random((2, 6, 5, 7)) < 0.6) & (np.arange(5) < 4)[:, None]

_LAYERS: dict[str, tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "softmax": ("softmax", jax.nn.softmax, (_X,)),
    "softmax of another axis": ("softmax", lambda x: jax.nn.softmax(x, 1), (_X,)),
    "softmax with -inf": ("softmax", jax.nn.softmax, (np.where(_X > 0, _X, -np.inf),)),
    "softmax of six dimensions": ("softmax", jax.nn.softmax, (_X.reshape(1, 2, 1, 4, 2, 4),)),
    "gelu": ("gelu", lambda x: jax.nn.gelu(x, approximate=False), (_X,)),
    "gelu by erf": ("gelu", lambda x: x / 2 * (1 + jax.lax.erf(x / np.sqrt(2))), (_X,)),
    "gelu by tanh": ("gelu", lambda x: jax.nn.gelu(x, approximate=True), (_X,)),
    "silu": ("silu", jax.nn.silu, (_X,)),
    "layer norm": ("layer_norm", _layer_norm, (_X,)),
    "layer norm of two axes": ("layer_norm", lambda x: _layer_norm(x, (1, 2)), (_X,)),
    "layer norm of deviations": ("layer_norm", _norm_of_deviations, (_X, _ROW, _ROW)),
    "attention": ("scaled_dot_product_attention", _attention, (_Q, _K, _V)),
    "attention, causal": (
        "scaled_dot_product_attention",
        lambda q, k, v: _attention(q, k, v, is_causal=True, scale=0.3),
        (_Q, _K, _V),
    ),
    "attention, masked": (
        "scaled_dot_product_attention",
        lambda q, k, v, mask: _attention(q, k, v, mask=mask),
        (_Q, _K, _V, _MASK),
    ),
    "attention, one mask for all heads": (
        "scaled_dot_product_attention",
        lambda q, k, v, mask: _attention(q, k, v, mask=mask),
        (_Q, _K, _V, _MASK[:, :1]),
    ),
    "attention, added and masked": (
        "scaled_dot_product_attention",
        lambda q, k, v, bias, mask: _attention(q, k, v, bias=bias, mask=mask),
        (_Q, _K, _V, _numbers(1, 6, 5, 7), _MASK),
    ),
    "attention of groups": (
        "scaled_dot_product_attention",
        lambda q, k, v, mask: _attention(q, k, v, mask=mask, is_causal=True),
        (_Q, _FEW_K, _FEW_V, _MASK),
    ),
    "attention of groups with one mask": (
        "scaled_dot_product_attention",
        lambda q, k, v, mask: _attention(q, k, v, mask=mask),
        (_Q, _FEW_K, _FEW_V, _MASK[:1, :1]),
    ),
    "attention of one query": ("scaled_dot_product_attention", _attention, (_Q[:, :1], _K, _V)),
    "attention by einsum": ("scaled_dot_product_attention", _of_heads_last, (_Q, _K, _V)),
    "attention by einsum, masked": (
        "scaled_dot_product_attention",
        _finite_mask,
        (_Q, _K, _V, _MASK),
    ),
    "attention of matrices": (
        "scaled_dot_product_attention",
        lambda q, k, v: jax.nn.softmax(q @ k.T) @ v,
        (_Q[0, 0], _K[0, 0], _V[0, 0]),
    ),
}

# What looks like a layer and is none.
_OTHERS: dict[str, tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "largest of another axis": (
        "softmax",
        lambda x: (lambda e: e / e.sum(-1, keepdims=True))(jnp.exp(x - x.max(1, keepdims=True))),
        (_X,),
    ),
    "sum of another axis": (
        "softmax",
        lambda x: (lambda e: e / e.sum(1, keepdims=True))(jnp.exp(x - x.max(-1, keepdims=True))),
        (_X,),
    ),
    "equal sizes, another axis": (
        "softmax",
        lambda x: (lambda e: e / e.sum(0)[:, None])(jnp.exp(x - x.max(1, keepdims=True))),
        (_numbers(4, 4),),
    ),
    "another factor": (
        "gelu",
        lambda x: 0.5 * x * (1 + jnp.tanh(0.7 * (x + 0.044715 * x**3))),
        (_X,),
    ),
    "gate of another value": (
        "gelu",
        lambda x, y: 0.5 * x * (1 + jax.lax.erf(y / np.sqrt(2))),
        (_X, _X + 1),
    ),
    "gate of another tensor": ("silu", lambda x, y: x * jax.nn.sigmoid(y), (_X, _X + 1)),
    "variance of another axis": (
        "layer_norm",
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5),
        (_X,),
    ),
    "variance of a sample": (
        "layer_norm",
        lambda x: (
            (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5)
        ),
        (_X,),
    ),
    "softmax over queries": (
        "scaled_dot_product_attention",
        lambda q, k, v: jax.nn.softmax(q @ k.T, 0) @ v,
        (_Q[0, 0], _K[0, 0], _V[0, 0]),
    ),
    "a mask that leaves something": (
        "scaled_dot_product_attention",
        lambda q, k, v, m: jax.nn.softmax(jnp.where(m, q @ k.T, -1.0)) @ v,
        (_Q[0, 0], _K[0, 0], _V[0, 0], _RANDOM.random((6, 6)) < 0.5),
    ),
}


def _ops(program: Any) -> set[str]:
    model = Model.from_files(program.executable.files, engine="reference")
    return {op.type for op in model.function.block.walk()}


def _check(function: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> set[str]:
    """Compile, compare with JAX on each engine, and return the ops."""
    program = stablehlo.compile(jax.jit(function).lower(*arrays).as_text())
    expected = np.asarray(jax.jit(function)(*arrays))
    for engine in ENGINES:
        (actual,) = program.on(engine).run(*arrays)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5, err_msg=engine)
    return _ops(program)


@pytest.mark.share(3)
@pytest.mark.parametrize("case", _LAYERS)
def test_a_layer_in_pieces_becomes_one_op(case: str) -> None:
    op, function, arrays = _LAYERS[case]
    ops = _check(function, tuple(np.asarray(a) for a in arrays))
    assert op in ops
    assert not ops & {"exp", "erf", "tanh", "rsqrt", "matmul"}


@pytest.mark.parametrize("case", _OTHERS)
def test_what_only_looks_like_a_layer_stays(case: str) -> None:
    op, function, arrays = _OTHERS[case]
    assert op not in _check(function, arrays)


def test_a_layer_whose_parts_are_used_elsewhere_is_computed_beside_them() -> None:
    b = graph.Backend("reference").builder()
    x = b.parameter("x", "float32", (2, 3))
    power = b.exponential(b.subtract(x, b.reshape(b.reduce_max(x, (1,)), (2, 1))))
    y = b.divide(power, b.reshape(b.reduce_sum(power, (1,)), (2, 1)))
    array = _numbers(2, 3)
    softmax, powers = b.compile((y, power)).run(array)
    expected = np.exp(array - array.max(1, keepdims=True))
    np.testing.assert_allclose(powers, expected, rtol=1e-6)
    np.testing.assert_allclose(softmax, expected / expected.sum(1, keepdims=True), rtol=1e-6)


def test_layers_in_loops_become_one_op() -> None:
    def function(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, v: jax.nn.softmax(v) * 2, x)

    assert "softmax" in _check(function, (_X,))


def test_values_of_a_recurrence_are_visited_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths through it double with each step, as in series of Chebyshev polynomials."""
    counted: list[Any] = []
    number_of = views._number_of
    monkeypatch.setattr(views, "_number_of", lambda *a: counted.append(a) or number_of(*a))
    b = graph.Backend("reference").builder()
    before, last = b.constant(np.float32(0.5)), b.constant(np.float32(0.25))
    for _ in range(18):
        before, last = last, b.subtract(b.multiply(last, before), before)
    assert views.number(last) is not None
    assert len(counted) == 2


def test_a_power_of_many_factors_is_one_factor() -> None:
    b = graph.Backend("reference").builder()
    x = b.parameter("x", "float32", (2,))
    power = x
    for _ in range(18):
        power = b.multiply(power, power)
    assert len(views.factors(power, b.scope)[1]) <= 8
    (result,) = b.compile(power).run(np.array([1, 0.5], np.float32))
    np.testing.assert_array_equal(result, [1, 0])
