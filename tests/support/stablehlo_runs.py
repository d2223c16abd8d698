"""Runs StableHLO programs and JAX functions on each engine, and compares them with JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from coreml_delegate import stablehlo
from coreml_delegate.graph import DType
from support.tolerances import ATOL_RTOL

ENGINES = ("reference", "openvino")


def run_on_each(program: stablehlo.Program, *arrays: Any) -> list[tuple[np.ndarray, ...]]:
    """The outputs of a program on each engine."""
    return [program.on(engine).run(*arrays) for engine in ENGINES]


def check_text(
    text: str, arrays: Sequence[Any], expected: Sequence[Any], **options: Any
) -> stablehlo.Program:
    """Compile MLIR text, and compare its outputs on each engine."""
    program = stablehlo.compile(text, "reference", **options)
    for outputs in run_on_each(program, *arrays):
        assert_close(outputs, expected)
    return program


def check_function(
    function: Callable[..., Any], *arguments: Any, **options: Any
) -> stablehlo.Program:
    """Compile a JAX function of arrays, and compare its outputs on each engine with JAX's."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    program = stablehlo.compile(lowered, "reference", **options)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*arguments))]
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
    for outputs in run_on_each(program, *arrays):
        assert_close(outputs, expected)
    return program


def assert_close(outputs: Sequence[np.ndarray], expected: Sequence[Any]) -> None:
    """Compare arrays: dtypes and shapes exactly, floats within the tolerance of single ops."""
    assert len(outputs) == len(expected)
    for actual, want in zip(outputs, expected, strict=True):
        want = np.asarray(want)
        assert (actual.dtype, actual.shape) == (want.dtype, want.shape)
        atol, rtol = ATOL_RTOL[DType.of(want.dtype).storage_dtype]
        np.testing.assert_allclose(actual, want, rtol, atol)
