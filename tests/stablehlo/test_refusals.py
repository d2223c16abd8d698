"""A program that Core ML cannot express is refused with the operation, its place and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coreml_delegate import graph, stablehlo
from coreml_delegate.errors import GraphError, InputError, LoweringError, OptionError
from coreml_delegate.graph.emitter import REFUSED
from coreml_delegate.stablehlo.operations import RULES, refusal_reason

_X = np.ones((4, 4), np.float32)

FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "fft": (lambda x: jnp.fft.rfft(x).real, "Core ML has no complex numbers"),
    "cholesky": (jnp.linalg.cholesky, "no decompositions or solvers of matrices"),
    "eigenvalues": (jnp.linalg.eigvalsh, "no decompositions or solvers of matrices"),
    "solve": (lambda x: jnp.linalg.solve(x, x), "no decompositions or solvers of matrices"),
    "callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 4), np.float32), x),
        "it calls Python while the model runs",
    ),
    "8-bit floats": (lambda x: x.astype(jnp.float8_e4m3fn), "no floats of 8 bits or fewer"),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16), "bfloat16='float32'"),
    "4-bit integers": (lambda x: x.astype(jnp.int4) + 1, "no integers of 4 bits or fewer"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_refusal_names_operation_reason_and_place(name: str) -> None:
    function, reason = FUNCTIONS[name]
    with pytest.raises(LoweringError) as raised:
        stablehlo.compile(jax.jit(function).lower(_X), "reference")
    text = str(raised.value)
    assert reason in text
    assert text.startswith("stablehlo.")
    assert "test_refusals.py:" in text or "(at " in text


def _main(body: str, type: str = "tensor<4xf32>") -> str:
    return f"func.func @main(%x: {type}) -> {type} {{\n{body}\n  return %0 : {type}\n}}"


TEXTS: dict[str, tuple[str, str]] = {
    "unknown custom call": (
        _main("  %0 = stablehlo.custom_call @acme(%x) : (tensor<4xf32>) -> tensor<4xf32>"),
        r"custom_call.*'acme': what it computes is not known \(at line 2\)",
    ),
    "quantized type": (
        _main("  %0 = stablehlo.add %x, %x : tensor<4x!quant.uniform<i8:f32, 0.5>>").replace(
            "tensor<4xf32>", "tensor<4x!quant.uniform<i8:f32, 0.5>>"
        ),
        r"quantized element types have no counterpart.*\(at line 1\).*Export the model in floating",
    ),
    "another dialect": (
        _main("  %0 = acme.add %x, %x : tensor<4xf32>"),
        "the text uses a dialect that StableHLO lacks.*acme",
    ),
    "several devices": (
        _main("""  %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %1 = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %1 : tensor<f32>
  }) {replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4xf32>) -> tensor<4xf32>"""),
        "all_reduce cannot be expressed: a Core ML model runs on one device only",
    ),
    "scatter whose body mixes two tensors": (
        _main("""  %i = stablehlo.constant dense<[[2]]> : tensor<1x1xi32>
  %u = stablehlo.constant dense<[10.0]> : tensor<1xf32>
  %0, %1 = "stablehlo.scatter"(%x, %x, %i, %u, %u) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
      %2 = stablehlo.add %a, %d : tensor<f32>
      stablehlo.return %2, %b : tensor<f32>, tensor<f32>
  }) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
      scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
    : (tensor<4xf32>, tensor<4xf32>, tensor<1x1xi32>, tensor<1xf32>, tensor<1xf32>)
    -> (tensor<4xf32>, tensor<4xf32>)"""),
        "a body that MIL's scatter cannot express",
    ),
    "undefined random numbers": (
        """func.func @main(%x: tensor<f32>) -> tensor<4xf32> {
  %s = stablehlo.constant dense<4> : tensor<1xi64>
  %0 = stablehlo.rng %x, %x, %s, distribution = UNIFORM
    : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}""",
        "rng_bit_generator is exact",
    ),
    "extreme of 64 bits that is the result": (
        """func.func @main(%x: tensor<4xi64>) -> tensor<i64> {
  %c = stablehlo.constant dense<9223372036854775807> : tensor<i64>
  %0 = stablehlo.reduce(%x init: %c) applies stablehlo.maximum across dimensions = [0]
    : (tensor<4xi64>, tensor<i64>) -> tensor<i64>
  return %0 : tensor<i64>
}""",
        "int64 values are beyond 32 bits.*at line 3.*Write the constant in 32 bits",
    ),
    "extreme of 64 bits in a window without elements": (
        """func.func @main(%x: tensor<4xi64>) -> tensor<5xi64> {
  %c = stablehlo.constant dense<-9223372036854775808> : tensor<i64>
  %0 = "stablehlo.reduce_window"(%x, %c) ({
    ^bb0(%a: tensor<i64>, %b: tensor<i64>):
      %1 = stablehlo.maximum %a, %b : tensor<i64>
      stablehlo.return %1 : tensor<i64>
  }) {window_dimensions = array<i64: 2>, padding = dense<[[2, 0]]> : tensor<1x2xi64>}
    : (tensor<4xi64>, tensor<i64>) -> tensor<5xi64>
  return %0 : tensor<5xi64>
}""",
        "reduce_window: int64 values are beyond 32 bits",
    ),
    "extreme of 64 bits that is selected": (
        """func.func @main(%x: tensor<i64>, %p: tensor<i1>) -> tensor<i64> {
  %c = stablehlo.constant dense<-9223372036854775808> : tensor<i64>
  %0 = stablehlo.select %p, %x, %c : tensor<i1>, tensor<i64>
  return %0 : tensor<i64>
}""",
        "select: int64 values are beyond 32 bits",
    ),
    "extreme of 64 bits that is returned": (
        """func.func @main() -> tensor<ui64> {
  %c = stablehlo.constant dense<18446744073709551615> : tensor<ui64>
  return %c : tensor<ui64>
}""",
        "a result of main: uint64 values are beyond 32 bits",
    ),
    "integer beyond 32 bits": (
        """func.func @main(%x: tensor<i64>) -> tensor<i64> {
  %c = stablehlo.constant dense<5000000000> : tensor<i64>
  %0 = stablehlo.add %x, %c : tensor<i64>
  return %0 : tensor<i64>
}""",
        "int64 values are beyond 32 bits.*5000000000",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_refused(name: str) -> None:
    text, message = TEXTS[name]
    with pytest.raises((LoweringError, GraphError), match=message):
        stablehlo.compile(text, "reference")


def test_operations_that_the_builder_refuses_are_refused_for_its_reason() -> None:
    assert not set(RULES) & {f"stablehlo.{name}" for name in REFUSED}
    for name in REFUSED:
        assert refusal_reason(f"stablehlo.{name}") == REFUSED[name]
    assert "stablehlo.add" in refusal_reason("stablehlo.addd")
    assert refusal_reason("tosa.add") == "it is no operation of StableHLO"


def test_arguments_that_do_not_fit_are_input_errors() -> None:
    program = stablehlo.compile(jax.jit(lambda x, n: x[n]).lower(_X, np.int32(0)), "reference")
    good = (_X, np.int32(1))
    assert program.run(*good)[0].shape == (4,)
    for wrong in [(), (_X,), (*good, _X), (_X[:2], good[1]), (_X.astype(np.int32), good[1])]:
        with pytest.raises(InputError, match="expected"):
            program.run(*wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": {"y": 0}}, "an argument that main does not have"),
        ({"states": {3: 0}}, "a position that main does not have"),
        ({"states": {0: 2}}, "a result that main does not have"),
        ({"bfloat16": "yes"}, "refuse | float32"),
        ({"target": "iOS3"}, "iOS"),
        ({"precision": "int8"}, "FLOAT16"),
        ({"engine": "gpu"}, "openvino"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        stablehlo.compile(jax.jit(lambda x: x + 1).lower(_X), **options)
    assert message in str(raised.value)


def test_states_of_another_type_are_refused() -> None:
    lowered = jax.jit(lambda x: x.sum(0)).lower(_X)
    with pytest.raises((GraphError, OptionError)):
        stablehlo.compile(lowered, "reference", states={0: 0})


def test_a_source_that_is_a_graph_is_refused() -> None:
    builder = graph.Backend("reference").builder()
    with pytest.raises(LoweringError, match="MLIR"):
        stablehlo.compile(builder, "reference")
