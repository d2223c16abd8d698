"""Dimensions of equal sizes are not taken for each other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from support import mil
from support.engine_runs import assert_close
from support.equal_sizes import draw_program
from support.lowering import Function, lower_unchecked
from support.mil import ct, mb, types
from support.stablehlo_runs import check_function

from coreml_delegate import runtime
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.targets import Opset

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
    pte = lower_unchecked(Function(apply), (x,)).pte
    for engine in ("reference", "openvino"):
        results = runtime.load_program(pte, engine=engine).run("forward", [x])
        for name, result, expected in zip(calls, results, apply(x), strict=True):
            np.testing.assert_equal(result.shape, expected.shape, f"{name} of {sizes}")
            assert_close(result.numpy(), expected.numpy())


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]
)
def test_attention_and_norms_of_equal_sizes_are_those_of_jax(seed: int) -> None:
    """Attention in any layout, then a norm; one in four programs mixes up its axes."""
    source = random.Random(seed)
    size = source.randint(2, 3)
    query, key, value, scores, result = (
        "".join(source.sample(labels, len(labels)))
        for labels in ("bhqd", "bhkd", "bhkd", "bhqk", "bhqd")
    )
    is_mixed_up = source.random() < 0.25
    weights = "".join(source.sample(scores, 4)) if is_mixed_up else scores
    summed = source.randrange(4) if is_mixed_up else scores.index("k")
    mean, deviation = (source.choice((3, 3, 3, 0, 1, 2)) for _ in range(2))
    numbers = np.random.default_rng(seed)
    arrays = [numbers.standard_normal([size] * 4).astype(np.float32) for _ in range(3)]
    hides, adds = source.random() < 0.5, source.random() < 0.3
    mask_sizes = [source.choice((1, size, size)) for _ in scores]
    mask = numbers.random(mask_sizes) < 0.7
    bias = numbers.standard_normal(mask_sizes[::-1]).astype(np.float32)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        products = jnp.einsum(f"{query},{key}->{scores}", q, k) * 0.5
        products = products + bias if adds else products
        products = jnp.where(mask, products, -1e9) if hides else products
        x = jnp.einsum(f"{weights},{value}->{result}", jax.nn.softmax(products, summed), v)
        variance = x.var(deviation, keepdims=True)
        return (x - x.mean(mean, keepdims=True)) / jnp.sqrt(variance + 1e-2)

    check_function(function, *arrays)


def _read(source: random.Random, cache: Any, query: Any) -> Any:
    """Read a cache of rank 4 through one to three views, products and gathers."""
    x = cache
    for _ in range(source.randint(1, 3)):
        kind = source.choice(("transpose", "transpose", "reshape", "gather", "matmul"))
        axis = source.randrange(x.rank)
        if kind == "transpose":
            x = mb.transpose(x=x, perm=source.sample(range(x.rank), x.rank))
        elif kind == "reshape" and x.rank > 3:
            sizes = [*x.shape[:axis], 1, *x.shape[axis:]]
            x = mb.squeeze(x=mb.reshape(x=x, shape=sizes), axes=[axis]) if x.rank < 5 else x
        elif kind == "reshape":
            x = mb.expand_dims(x=x, axes=[axis])
        elif kind == "gather":
            indices = 1 if x.rank == 4 else [0, -1, 0]
            x = mb.gather(x=x, indices=indices, axis=axis)
        elif x.shape[1:] == query.shape[1:]:
            flags = {"transpose_x": source.random() < 0.5, "transpose_y": source.random() < 0.5}
            x, y = source.sample((x, query), 2)
            x = mb.matmul(x=x, y=y, **flags)
    return x


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 150))]
)
def test_rows_are_written_along_their_axis(seed: int) -> None:
    """A cache whose dimensions are equal, read in any layout after a row of it was written."""
    source = random.Random(seed)
    shape = [source.choice((3, 3, 3, 2)) for _ in range(4)]
    shape[-2] = shape[-1]
    axis = source.randrange(4)
    sizes = [source.choice((1, 2)) if n == axis else size for n, size in enumerate(shape)]
    seeds = [source.randrange(1 << 30) for _ in range(2)]

    @mb.program(
        input_specs=[
            mb.TensorSpec(sizes, types.fp16),
            mb.TensorSpec((sizes[axis],), types.int32),
            mb.TensorSpec(shape, types.fp16),
            mb.StateTensorSpec(shape, types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(rows: Any, indices: Any, query: Any, cache: Any) -> Any:
        written = mb.scatter(
            data=mb.read_state(input=cache), indices=indices, updates=rows, axis=axis, mode="update"
        )
        written = mb.coreml_update_state(state=cache, value=written)
        return tuple(_read(random.Random(s), written, query) for s in seeds)

    main = mil.main(mil.serialized(program, Opset.iOS18))
    compiled = [engine.compile(main, EngineOptions(cache=None)) for engine in (REFERENCE, OPENVINO)]
    states = [function.make_state() for function in compiled]
    numbers = np.random.default_rng(seed)
    for _ in range(2):
        inputs = {
            "rows": numbers.standard_normal(sizes).astype(np.float16),
            "indices": numbers.permutation(shape[axis])[: sizes[axis]].astype(np.int32),
            "query": numbers.standard_normal(shape).astype(np.float16),
        }
        expected, actual = (
            function(inputs, state) for function, state in zip(compiled, states, strict=True)
        )
        for name, wanted in expected.items():
            scale = max(1.0, float(np.abs(wanted).max()))
            assert_close(actual[name] / scale, wanted / scale, "fp16")
    expected, actual = (state.snapshot() for state in states)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(actual[name], wanted)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 200))]
)
def test_rotations_of_equal_sizes_keep_their_axis(seed: int) -> None:
    """Halves of any axis, times tables of any layout, in both orders and with both signs."""
    source = random.Random(seed)
    half = source.choice((1, 2))
    shape = [source.choice((half, 2 * half)) for _ in range(4)]
    axis = source.choice((3, 3, 3, 2, 1))
    joined = source.choice((axis, axis, axis, 2, 3))
    shape[axis] = 2 * half
    is_wide, is_backward = source.random() < 0.5, source.random() < 0.3
    width = [2 * half if is_wide and n == axis else half if n == axis else 1 for n in range(4)]
    tables = [
        [size if size != 1 else source.choice((1, shape[n])) for n, size in enumerate(width)]
        for _ in range(2)
    ]
    inputs = {
        name: np.random.default_rng(seed).standard_normal(sizes).astype(np.float32)
        for name, sizes in zip(("x", "cos", "sin"), (shape, *tables), strict=True)
    }

    def function(x: Any, cos: Any, sin: Any) -> Any:
        first, second = mb.split(x=x, split_sizes=[half, half], axis=axis)
        if is_backward:
            first, second = second, first
        if is_wide:
            turned = mb.concat(values=[mb.mul(x=second, y=-1.0), first], axis=joined)
            if turned.shape != x.shape:
                return turned
            return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))
        difference = mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin))
        total = mb.add(x=mb.mul(x=second, y=cos), y=mb.mul(x=first, y=sin))
        return mb.concat(values=[difference, total], axis=joined)

    main = mil.main(mil.build(function, inputs))
    expected, actual = (
        engine.compile(main, EngineOptions())(inputs) for engine in (REFERENCE, OPENVINO)
    )
    for name, wanted in expected.items():
        assert_close(actual[name], wanted)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 60))]
)
def test_loops_of_equal_sizes_are_those_of_jax(seed: int) -> None:
    """LSTM layers of as many steps as sequences, inputs and units; some mix up their axes."""
    source = random.Random(seed)
    size = source.randint(2, 3)
    numbers = np.random.default_rng(seed)
    is_transposed = [source.random() < 0.5 for _ in range(2)]
    sequence, hidden, cell, weights, recurrent, bias = (
        numbers.standard_normal(sizes).astype(np.float32)
        for sizes in (
            (size,) * 3,
            *[(size, size)] * 2,
            *((4 * size, size) if t else (size, 4 * size) for t in is_transposed),
            (4 * size,),
        )
    )
    layout = source.choice(((0, 1, 2), (0, 1, 2), tuple(source.sample(range(3), 3))))
    names = ("transposed row", "row", "hidden", "gate", "cell", "result")
    turned = {name: source.random() < 0.15 for name in names}
    order = source.sample(range(4), 4)
    stacked = source.randrange(3)

    def turn(x: jax.Array, name: str) -> jax.Array:
        return x.T if turned[name] else x

    def product(x: jax.Array, matrix: np.ndarray, name: str) -> jax.Array:
        contracted = int(not turned[name]), int(matrix.shape[1] == size)
        return lax.dot_general(x, matrix, (tuple((n,) for n in contracted), ((), ())))

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
        h, c = carry
        gates = product(turn(x, "transposed row"), weights, "row")
        gates += product(h, recurrent, "hidden") + bias
        parts = jnp.split(gates, 4, axis=-1)
        i, f, g, o = (parts[n] for n in order)
        c = turn(jax.nn.sigmoid(f), "gate") * turn(c, "cell") + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), turn(h, "result")

    def function(x: jax.Array, h: jax.Array, c: jax.Array) -> Any:
        last, rows = lax.scan(step, (h, c), x.transpose(layout))
        return last, jnp.moveaxis(rows, 0, stacked)

    check_function(function, sequence, hidden, cell)
