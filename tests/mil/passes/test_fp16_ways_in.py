"""Built graphs, StableHLO and JAX stay in the range of fp16 as PyTorch's programs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.lowering import Function, lower_unchecked
from support.tolerances import SQNR_FP16, sqnr_db

from coreml_delegate import CoreMLBackend, graph, runtime, stablehlo

_RANDOM = np.random.default_rng(0)
_X = (3000 * _RANDOM.standard_normal((4, 64))).astype(np.float32)
_SCALE = _RANDOM.random(64, np.float32)
_LOWEST = float(np.finfo(np.float32).min)


def _rms(x: Any) -> Any:
    return _SCALE * (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6))


def _layer_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def _scores(x: Any) -> Any:
    return jax.nn.softmax((x @ (x / 8).T) * 1e-4, -1)


def _masked(x: Any) -> Any:
    mask = jnp.where(x > 1e9, 0.0, _LOWEST)  # every element of a row is hidden
    return jax.nn.softmax(x * 1e-4 + mask, -1)


def _fast_variance(x: Any) -> Any:
    """The norm of Flax."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def _linear_attention(q: Any, k: Any, v: Any) -> Any:
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return (q @ (k.swapaxes(-1, -2) @ v)) / (q @ k.sum(1)[..., None] + 1e-6)


_FREQUENCIES = 10000.0 ** (-np.arange(0, 32, 2, dtype=np.float32) / 32)
_SERIES = (_RANDOM.random((2, 64)) * 500 + 20000).astype(np.float32)
_KEPT = np.arange(64)[None].repeat(2, 0) < [[40], [9]]
_PROBABILITIES = np.array([0, 1e-6, 0.5, 0.9, 0.999, 0.99999, 1], np.float32)
_HUNDREDS = np.full(7, 300, np.float32)
_QUERIES = _RANDOM.standard_normal((2, 96, 16)).astype(np.float32)

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms": (_rms, (_X,)),
    "layer norm": (_layer_norm, (_X,)),
    "scores": (_scores, (_X,)),
    "masked": (_masked, (_X,)),
    "angle": (
        lambda p: jnp.cos(jnp.einsum("i,j->ij", p.astype(jnp.float32), _FREQUENCIES)),
        (np.arange(30000, 30005, dtype=np.int32),),
    ),
    "phase": (
        lambda f: jnp.sin(jnp.cumsum(f / 24000, -1) * (2 * np.pi)),
        (_RANDOM.random((1, 3000), np.float32) * 400,),
    ),
    "log odds": (
        lambda p: jax.scipy.special.logit(jnp.clip(p, 1e-7, 1 - 1e-7)),
        (_PROBABILITIES,),
    ),
    "mean": (lambda x: x.mean(-1), (_SERIES,)),
    "mean by ones": (lambda x: x @ jnp.ones((64, 1)) / 64, (_SERIES,)),
    "masked mean": (
        lambda x, m: jnp.where(m, x, 0).sum(-1) / jnp.maximum(m.sum(-1), 1),
        (_SERIES, _KEPT),
    ),
    "average": (
        lambda x, m: jnp.average(x, axis=-1, weights=m.astype(jnp.float32)),
        (_SERIES, _KEPT),
    ),
    "linear attention": (_linear_attention, (_QUERIES, _QUERIES[::-1], 300 * _QUERIES)),
    "layer norm of large numbers": (_layer_norm, (_SERIES,)),
    "fast variance": (_fast_variance, (_SERIES,)),
    "index": (
        lambda x, p: x[jnp.floor(p * 7.3).astype(jnp.int32)],
        (_RANDOM.random(8192, np.float32), _RANDOM.random(200, np.float32) * 1100),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    expected = np.asarray(function(*inputs))
    for engine in ("reference", "openvino"):
        options = {"engine": engine, "precision": "float16"}
        compiled = stablehlo.compile(jax.jit(function).lower(*inputs).as_text(), **options)
        (actual,) = compiled.run(*inputs)
        assert sqnr_db(expected, actual) > SQNR_FP16


def test_angles_of_the_graph_builder() -> None:
    backend = graph.Backend("reference", precision="float16")
    builder = graph.Builder(backend)
    x = builder.parameter("x", "float32", _HUNDREDS.shape)
    executable = builder.compile(builder.sine(builder.multiply(x, builder.constant(_HUNDREDS))))
    (actual,) = executable.run(_PROBABILITIES)
    assert sqnr_db(np.sin(_HUNDREDS * _PROBABILITIES), actual) > SQNR_FP16


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_norm_of_the_graph_builder(dtype: str) -> None:
    backend = graph.Backend("reference", precision="float16")
    builder = graph.Builder(backend)
    x = builder.parameter("x", dtype, _X.shape)
    scale = builder.constant(_SCALE.astype(dtype))
    executable = builder.compile(builder.rms_norm(x, -1, scale))
    (actual,) = executable.run(_X.astype(dtype))
    assert sqnr_db(np.asarray(_rms(_X)), actual.astype(np.float32)) > SQNR_FP16
    types = [op.type for op in executable.model.function.block.ops]
    assert types.count("layer_norm") == 1
    assert not {"reduce_mean", "rsqrt"} & set(types)


@pytest.mark.parametrize("name", ["softplus", "mish"])
def test_softplus_stays_where_the_neural_engine_computes_it(name: str) -> None:
    """Its operand is at most 10: apple/coremltools#2687."""
    function = getattr(torch.nn.functional, name)
    x = torch.cat([torch.linspace(-20, 20, 401), torch.tensor([50.0, 1e3, 6e4])])
    specs = CoreMLBackend.generate_compile_specs()
    lowered = lower_unchecked(Function(function), (x,), compile_specs=specs)
    program = runtime.load_program(lowered.pte, engine="reference")
    (actual,) = program.run("forward", [x])
    torch.testing.assert_close(actual, function(x), rtol=1e-3, atol=1e-4)
    from support.partitioned import delegate_functions

    (main,) = delegate_functions(lowered.edge)
    ops = [op.type for op in main.block.ops]
    assert ops.index("minimum") < ops.index("softplus") < ops.index("maximum")
