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


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rms": _rms,
    "layer norm": _layer_norm,
    "scores": _scores,
    "masked": _masked,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax(name: str) -> None:
    function = FUNCTIONS[name]
    expected = np.asarray(function(_X))
    for engine in ("reference", "openvino"):
        options = {"engine": engine, "precision": "float16"}
        compiled = stablehlo.compile(jax.jit(function).lower(_X).as_text(), **options)
        (actual,) = compiled.run(_X)
        assert sqnr_db(expected, actual) > SQNR_FP16


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
