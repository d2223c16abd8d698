"""Dimensions of equal sizes are not taken for each other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import assert_close
from support.equal_sizes import draw_program
from support.lowering import Function, lower_unchecked
from support.stablehlo_runs import check_function

from coreml_delegate import runtime
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

pytestmark = pytest.mark.property

Call = Callable[[torch.Tensor], torch.Tensor]

_RANK = 6


@pytest.mark.parametrize(
    "seed",
    [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 400))],
)
def test_engines_agree_on_programs_of_few_sizes(seed: int) -> None:
    source = random.Random(seed)
    function, inputs = draw_program(source, source.randint(3, 12))
    main = mil.main(mil.build(function, inputs))
    expected, actual = (
        engine.compile(main, EngineOptions())(mil.features(main, inputs))
        for engine in (REFERENCE, OPENVINO)
    )
    for name, wanted in expected.items():
        # Products in a row magnify rounding beyond the tolerance of one op.
        scale = max(1.0, float(np.abs(wanted).max()))
        assert_close(actual[name] / scale, wanted / scale, "fp16")


_CALLS: dict[str, Callable[[random.Random], Call]] = {
    "permute": lambda s: partial(torch.permute, dims=s.sample(range(_RANK), _RANK)),
    "softmax": lambda s: partial(torch.softmax, dim=s.randrange(_RANK)),
    "sum": lambda s: partial(torch.sum, dim=_some(s), keepdim=s.random() < 0.5),
    "amax": lambda s: partial(torch.amax, dim=_some(s), keepdim=s.random() < 0.5),
    "flip": lambda s: partial(torch.flip, dims=_some(s)),
    "roll": lambda s: partial(torch.roll, shifts=1, dims=s.randrange(_RANK)),
    "cumsum": lambda s: partial(torch.cumsum, dim=s.randrange(_RANK)),
    "cat": lambda s: partial(_joined, dim=s.randrange(_RANK)),
    "first": lambda s: partial(torch.select, dim=s.randrange(_RANK), index=0),
    "broadcast": lambda s: partial(_with_rows, dims=_some(s)),
}


def _some(source: random.Random) -> list[int]:
    return source.sample(range(_RANK), source.randint(1, 3))


def _joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, x.sin()], dim)


def _with_rows(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    row = x
    for dim in dims:
        row = row.narrow(dim, 0, 1)
    return x - row


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))]
)
def test_calls_of_six_dimensions_of_few_sizes_equal_eager(seed: int) -> None:
    source = random.Random(seed)
    sizes = [source.choice((1, 2, 2, 3)) for _ in range(_RANK)]
    calls = {name: draw(source) for name, draw in _CALLS.items()}

    def apply(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # At the boundary Core ML has at most five dimensions.
        return tuple(call(x.reshape(sizes).tanh()).flatten() for call in calls.values())

    x = torch.linspace(-2.0, 2.0, math.prod(sizes)).sin()
    lowered = lower_unchecked(Function(apply), (x,))
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
        for name, result, expected in zip(calls, results, apply(x), strict=True):
            np.testing.assert_equal(result.shape, expected.shape, f"{name} of {sizes}")
            assert_close(result.numpy(), expected.numpy())


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))]
)
def test_attention_and_norms_of_equal_sizes_are_those_of_jax(seed: int) -> None:
    """Attention in any layout, and programs that resemble attention or a norm."""
    source = random.Random(seed)
    size = source.randint(2, 3)
    query, key, value, scores, weights, result = (
        "".join(source.sample(labels, len(labels)))
        for labels in ("bhqd", "bhkd", "bhkd", "bhqk", "bhqk", "bhqd")
    )
    hides = source.random() < 0.5
    summed, mean, deviation = (source.choice((3, 3, 3, 0, 1, 2)) for _ in range(3))
    numbers = np.random.default_rng(seed)
    arrays = [numbers.standard_normal([size] * 4).astype(np.float32) for _ in range(3)]
    mask = numbers.random([size] * 4) < 0.7

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        products = jnp.einsum(f"{query},{key}->{scores}", q, k) * 0.5
        products = jnp.where(mask, products, -1e9) if hides else products
        x = jnp.einsum(f"{weights},{value}->{result}", jax.nn.softmax(products, summed), v)
        variance = x.var(deviation, keepdims=True)
        return (x - x.mean(mean, keepdims=True)) / jnp.sqrt(variance + 1e-2)

    check_function(function, *arrays)
