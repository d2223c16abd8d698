"""Programs compute on each engine what JAX computes, or what StableHLO defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.stablehlo_runs import assert_close, check_function, check_text, run_on_each

from coreml_delegate import stablehlo

_VECTOR = np.array([3, -1, 2, 0.5, -4], np.float32)
_MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4) / 5 - 1
_COUNTS = np.array([5, 0, 3, 9, 1], np.int32)


def _sum_of_odd(x: Any) -> Any:
    """A loop that ends early, with a branch in it."""

    def step(carry: Any) -> Any:
        n, total = carry
        return n + 1, lax.cond(n % 2 == 1, lambda t: t + x[n], lambda t: t, total)

    return lax.while_loop(lambda carry: (carry[0] < 5) & (carry[1] < 100), step, (0, 0.0))


def _running(x: Any) -> Any:
    return lax.scan(lambda total, row: (total + row, total * row), jnp.zeros(4), x, reverse=True)


def _sorted_pairs(keys: Any, values: Any) -> Any:
    return lax.sort((keys, values), num_keys=1)


def _grouped(x: Any) -> Any:
    return jnp.zeros((3, 4)).at[jnp.array([2, 0, 2])].add(x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "while, with a branch": (_sum_of_odd, (_VECTOR,)),
    "scan in reverse": (_running, (_MATRIX,)),
    "loop with a fixed count": (
        lambda x: lax.fori_loop(0, 4, lambda n, y: y * x + n, x),
        (_VECTOR,),
    ),
    "switch": (
        lambda n, x: lax.switch(n, [jnp.sin, jnp.cos, lambda y: y * 2], x),
        (np.int32(1), _VECTOR),
    ),
    "switch beyond its branches": (
        lambda n, x: lax.switch(n, [jnp.sin, jnp.cos], x),
        (np.int32(7), _VECTOR),
    ),
    "function called twice": (lambda x: jax.jit(jnp.sin)(jax.jit(jnp.sin)(x)), (_VECTOR,)),
    "sort of pairs": (_sorted_pairs, (_VECTOR, _COUNTS)),
    "descending order": (lambda x: jnp.sort(x, descending=True), (_MATRIX,)),
    "argsort": (jnp.argsort, (_VECTOR,)),
    "top_k": (lambda x: lax.top_k(x, 2), (_MATRIX,)),
    "approximate top_k": (lambda x: lax.approx_max_k(x, 2), (_MATRIX,)),
    "scattered sum": (_grouped, (_MATRIX,)),
    "indices out of range": (lambda x, n: jnp.take(x, n, mode="clip"), (_VECTOR, _COUNTS)),
    "median": (jnp.median, (_MATRIX,)),
    "histogram": (lambda n: jnp.bincount(n, length=10), (_COUNTS,)),
    "unique, with a fixed size": (lambda n: jnp.unique(n, size=5), (_COUNTS,)),
    "integer division": (lambda n: (n // -3, n % -3, lax.rem(n, jnp.int32(-3))), (_COUNTS,)),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x) * x), (_VECTOR,)),
    "gradient": (jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()), (_VECTOR,)),
    "jacobian": (jax.jacobian(lambda x: jnp.outer(x, x).sum(1)), (_VECTOR,)),
    "vmap of a gather": (jax.vmap(lambda row, n: row[n]), (_MATRIX, np.array([0, 3, 1], np.int32))),
    "convolution of one dimension": (jnp.convolve, (_VECTOR, _VECTOR[:3])),
    "cumulative sums and maxima": (lambda x: (x.cumsum(0), lax.cummax(x, 1)), (_MATRIX,)),
    "nothing but its argument": (lambda x: x, (_VECTOR,)),
    "a constant": (lambda x: jnp.ones(3), (_VECTOR,)),
    "special functions": (
        lambda x: (lax.erf(x), lax.erf_inv(x / 5), lax.lgamma(jnp.abs(x)), lax.digamma(x + 5)),
        (_VECTOR,),
    ),
    "special functions of two": (
        lambda x: (lax.nextafter(x, x + 1), lax.polygamma(1.0, jnp.abs(x)), lax.zeta(x + 6, 1.5)),
        (_VECTOR,),
    ),
    "bessel functions": (lambda x: (lax.bessel_i1e(x), lax.bessel_i0e(x)), (_VECTOR,)),
}


@pytest.mark.share(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_what_jax_does(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    check_function(function, *arguments)


def test_a_kernel_may_have_more_values_at_once_than_the_cpu_has_registers() -> None:
    """digamma of a long vector, where OpenVINO's generated kernel needs more than AVX2's 16."""
    check_function(lax.digamma, np.linspace(0.5, 5, 400, dtype=np.float32))


def _main(body: str, takes: str = "%x: tensor<4xf32>", gives: str = "tensor<4xf32>") -> str:
    return f"func.func @main({takes}) -> ({gives}) {{\n{body}\n}}"


_X = np.array([1, -2, 0, 4], np.float32)
_HELPER = """
func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""

TEXTS: dict[str, tuple[str, Any]] = {
    "tuples": (
        _main("""
  %0 = stablehlo.tuple %x, %x : tuple<tensor<4xf32>, tensor<4xf32>>
  %1 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  return %1 : tensor<4xf32>"""),
        _X,
    ),
    "composite without a known name": (
        _main("""
  %0 = stablehlo.composite "acme.twice" %x {decomposition = @twice}
    : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>""")
        + _HELPER,
        _X * 2,
    ),
    "tokens": (
        _main("""
  %t = stablehlo.create_token : !stablehlo.token
  %u = stablehlo.after_all %t, %t : !stablehlo.token
  return %x : tensor<4xf32>"""),
        _X,
    ),
    "convolution with a constant tensor for its padding": (
        _main("""
  %image = stablehlo.reshape %x : (tensor<4xf32>) -> tensor<1x4x1xf32>
  %kernel = stablehlo.constant dense<[[[1.0]], [[2.0]]]> : tensor<2x1x1xf32>
  %padding = stablehlo.constant dense<[[1, 0]]> : tensor<1x2xi32>
  %0 = "stablehlo.dynamic_conv"(%image, %kernel, %padding) {
    dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>,
    batch_group_count = 1 : i64, feature_group_count = 1 : i64
  } : (tensor<1x4x1xf32>, tensor<2x1x1xf32>, tensor<1x2xi32>) -> tensor<1x4x1xf32>
  %1 = stablehlo.reshape %0 : (tensor<1x4x1xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>"""),
        _X * 2 + np.array([0, 1, -2, 0], np.float32),
    ),
    "optimization barrier": (
        _main("""
  %0 = stablehlo.optimization_barrier %x : tensor<4xf32>
  return %0 : tensor<4xf32>"""),
        _X,
    ),
    "custom call of a sharding": (
        _main("""
  %0 = stablehlo.custom_call @Sharding(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>"""),
        _X,
    ),
    "reduction by a body of two operations": (
        _main(
            """
  %c = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %c) across dimensions = [0]
    : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    reducer(%a: tensor<f32>, %b: tensor<f32>) {
      %1 = stablehlo.abs %b : tensor<f32>
      %2 = stablehlo.maximum %a, %1 : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }
  return %0 : tensor<f32>""",
            gives="tensor<f32>",
        ),
        np.float32(4),
    ),
    "division by zero, of integers": (
        _main(
            """
  %z = stablehlo.constant dense<0> : tensor<4xi32>
  %n = stablehlo.convert %x : (tensor<4xf32>) -> tensor<4xi32>
  %0 = stablehlo.remainder %n, %z : tensor<4xi32>
  return %0 : tensor<4xi32>""",
            gives="tensor<4xi32>",
        ),
        _X.astype(np.int32),
    ),
    "scatter of two tensors": (
        _main(
            """
  %n = stablehlo.convert %x : (tensor<4xf32>) -> tensor<4xi32>
  %i = stablehlo.constant dense<[[2], [0], [2]]> : tensor<3x1xi32>
  %u = stablehlo.constant dense<[10.0, 20.0, 30.0]> : tensor<3xf32>
  %v = stablehlo.constant dense<[7, -8, 9]> : tensor<3xi32>
  %0:2 = "stablehlo.scatter"(%x, %n, %i, %u, %v) ({
    ^bb0(%a: tensor<f32>, %b: tensor<i32>, %c: tensor<f32>, %d: tensor<i32>):
      %1 = stablehlo.add %a, %c : tensor<f32>
      %2 = stablehlo.minimum %b, %d : tensor<i32>
      stablehlo.return %1, %2 : tensor<f32>, tensor<i32>
  }) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
      scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
    : (tensor<4xf32>, tensor<4xi32>, tensor<3x1xi32>, tensor<3xf32>, tensor<3xi32>)
    -> (tensor<4xf32>, tensor<4xi32>)
  %3 = stablehlo.convert %0#1 : (tensor<4xi32>) -> tensor<4xf32>
  %4 = stablehlo.concatenate %0#0, %3, dim = 0
    : (tensor<4xf32>, tensor<4xf32>) -> tensor<8xf32>
  return %4 : tensor<8xf32>""",
            gives="tensor<8xf32>",
        ),
        np.array([21, -2, 40, 4, -8, -2, 0, 4], np.float32),
    ),
    "einsum": (
        _main(
            """
  %0 = "stablehlo.einsum"(%x, %x) {einsum_config = "i,j->ji"}
    : (tensor<4xf32>, tensor<4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>""",
            gives="tensor<4x4xf32>",
        ),
        np.outer(_X, _X),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_computes_what_stablehlo_defines(name: str) -> None:
    text, expected = TEXTS[name]
    check_text(text, [_X], [expected])


@pytest.mark.slow
def test_random_bits_are_those_of_jax() -> None:
    def draw(seed: Any) -> Any:
        key = jax.random.key(seed)
        first, second = jax.random.split(key)
        return jax.random.bits(first, (3, 5)), jax.random.uniform(second, (4,))

    check_function(draw, np.uint32(42))


def test_results_that_are_states_are_kept() -> None:
    lowered = jax.jit(lambda total, x: (total + x, total * 2)).lower(_X, _X)
    program = stablehlo.compile(lowered, "reference", states={0: 0})
    assert list(program.states.values()) == [next(iter(program.parameters.values()))]
    first, second = program.make_state(), program.make_state()
    assert_close(program.run(_X, state=first), [np.zeros_like(_X)])
    assert_close(program.run(_X, state=first), [_X * 2])
    assert_close(program.run(_X, state=second), [np.zeros_like(_X)])


def test_64_bits_are_narrowed_and_listed() -> None:
    with jax.enable_x64(True):
        lowered = jax.jit(lambda n, x: (n * 2 + 1, x / 3)).lower(np.arange(3), np.ones(3))
    program = stablehlo.compile(lowered, "reference")
    listed = "\n".join(program.narrowed)
    assert "argument 'n': int64 computed in int32" in listed
    assert "argument 'x': float64 computed in float32" in listed
    numbers, floats = program.run(np.arange(3), np.ones(3))
    assert (numbers.dtype, floats.dtype) == (np.int64, np.float64)
    np.testing.assert_array_equal(numbers, [1, 3, 5])
    np.testing.assert_allclose(floats, np.ones(3) / 3, rtol=1e-6)


def test_bfloat16_is_computed_in_float32_when_asked_for() -> None:
    x = jnp.asarray([1.5, -2], jnp.bfloat16)
    lowered = jax.jit(lambda x: x * 2 + jnp.bfloat16(0.5)).lower(x)
    program = stablehlo.compile(lowered, "reference", bfloat16="float32")
    assert_close(program.run(np.array([1.5, -2], np.float32)), [np.array([3.5, -3.5], np.float32)])


def _symbolic(function: Callable[..., Any], *shapes: str) -> Any:
    scope = jax.export.SymbolicScope()
    specs = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), jnp.float32)
        for shape in shapes
    ]
    return jax.export.export(jax.jit(function))(*specs)


SIZED: dict[str, tuple[Callable[..., Any], tuple[str, ...], list[tuple[tuple[int, ...], ...]]]] = {
    "batch": (lambda x: x @ jnp.ones((4, 2)), ("b, 4",), [((1, 4),), ((5, 4),)]),
    "one size of two arguments": (
        lambda x, y: jnp.concatenate([x, y], 1).sum(0),
        ("b, 2", "b, 3"),
        [((1, 2), (1, 3)), ((4, 2), (4, 3))],
    ),
    "two sizes, joined": (
        lambda x: x.reshape(-1, 3) * 2,
        ("b, n, 3",),
        [((1, 2, 3),), ((3, 5, 3),)],
    ),
    "mean over a symbolic size": (lambda x: x.mean(1), ("b, n",), [((2, 3),), ((1, 7),)]),
    "a shape of a shape": (
        lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 3, x.shape[1])),
        ("b, n",),
        [((2, 3),), ((4, 1),)],
    ),
    "a multiple of a size": (
        lambda x: x * jnp.arange(x.shape[0], dtype=jnp.float32),
        ("2*b",),
        [((2,),), ((6,),)],
    ),
    "half of a multiple": (
        lambda x: jnp.broadcast_to(x.reshape(2, -1).sum(0), (3, x.shape[0] // 2)),
        ("2*b",),
        [((2,),), ((6,),)],
    ),
    "softmax over a symbolic size": (jax.nn.softmax, ("b, n",), [((2, 3),), ((1, 7),)]),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", SIZED)
def test_sizes_may_be_known_at_run_time_only(name: str) -> None:
    function, specs, calls = SIZED[name]
    program = stablehlo.compile(_symbolic(function, *specs), "reference")
    for shapes in calls:
        arrays = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
        for outputs in run_on_each(program, *arrays):
            assert_close(outputs, jax.tree.leaves(function(*arrays)))


def test_extremes_of_64_bits_that_no_result_depends_on() -> None:
    """They start searches, bound nothing, compare alike with all of 32 bits, or are converted."""
    text = """
func.func @main(%x: tensor<4xi64>) -> (tensor<i64>, tensor<4xi64>, tensor<4xi1>, tensor<4xi1>,
    tensor<4xi1>, tensor<4xi64>, tensor<4xi64>, tensor<f32>, tensor<i32>) {
  %least = stablehlo.constant dense<-9223372036854775808> : tensor<i64>
  %most = stablehlo.constant dense<9223372036854775807> : tensor<i64>
  %mosts = stablehlo.broadcast_in_dim %most, dims = [] : (tensor<i64>) -> tensor<4xi64>
  %mixed = stablehlo.constant dense<[9223372036854775807, 0, -9223372036854775808, 1]>
    : tensor<4xi64>
  %0 = stablehlo.reduce(%x init: %least) applies stablehlo.maximum across dimensions = [0]
    : (tensor<4xi64>, tensor<i64>) -> tensor<i64>
  %1 = "stablehlo.reduce_window"(%x, %most) ({
    ^bb0(%a: tensor<i64>, %b: tensor<i64>):
      %min = stablehlo.minimum %a, %b : tensor<i64>
      stablehlo.return %min : tensor<i64>
  }) {window_dimensions = array<i64: 2>, padding = dense<[[1, 0]]> : tensor<1x2xi64>}
    : (tensor<4xi64>, tensor<i64>) -> tensor<4xi64>
  %2 = stablehlo.compare LT, %x, %mosts : (tensor<4xi64>, tensor<4xi64>) -> tensor<4xi1>
  %3 = stablehlo.compare LE, %mosts, %x : (tensor<4xi64>, tensor<4xi64>) -> tensor<4xi1>
  %4 = stablehlo.compare GE, %x, %mixed : (tensor<4xi64>, tensor<4xi64>) -> tensor<4xi1>
  %5 = stablehlo.clamp %least, %x, %most
    : (tensor<i64>, tensor<4xi64>, tensor<i64>) -> tensor<4xi64>
  %6 = stablehlo.minimum %mosts, %x : tensor<4xi64>
  %7 = stablehlo.convert %most : (tensor<i64>) -> tensor<f32>
  %8 = stablehlo.convert %most : (tensor<i64>) -> tensor<i32>
  return %0, %1, %2, %3, %4, %5, %6, %7, %8 : tensor<i64>, tensor<4xi64>, tensor<4xi1>,
    tensor<4xi1>, tensor<4xi1>, tensor<4xi64>, tensor<4xi64>, tensor<f32>, tensor<i32>
}"""
    most = np.iinfo(np.int64).max
    x = np.array([2**31 - 1, 5, -(2**31), 0])
    expected = (
        x.max(),
        np.minimum(x, np.concatenate([[most], x[:-1]])),
        x < most,
        most <= x,
        x >= np.array([most, 0, -most - 1, 1]),
        x,
        x,
        np.float32(most),
        np.int32(-1),
    )
    check_text(text, (x,), expected)
