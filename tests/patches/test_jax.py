"""Private interfaces of JAX, and why they are needed."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import pytest

from coreml_delegate.errors import LoweringError
from coreml_delegate.patches.jax import jax_module, mlir_context, static_arguments, xla_client

_FUNCTION = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"


def test_a_public_context_lacks_the_dialect_of_functions() -> None:
    ir: Any = jax_module("jax.extend.mlir.ir")
    with mlir_context():
        assert "@main" in str(ir.Module.parse(_FUNCTION))
    with ir.Context(), pytest.raises(ir.MLIRError):
        ir.Module.parse(_FUNCTION)


def test_the_public_modules_lack_the_options_of_xla() -> None:
    public = importlib.import_module("jax.extend.backend")
    for name in ("DeviceList", "CompileOptions"):
        assert hasattr(xla_client(), name)
        assert not hasattr(public, name)


def test_static_arguments_have_no_public_attribute() -> None:
    jitted = jax.jit(lambda n, x, axis: x.sum(axis) * n, static_argnums=0, static_argnames="axis")
    numbers, names = static_arguments(jitted)
    assert 0 in numbers
    assert "axis" in names
    assert [name for name in dir(jitted) if "static" in name and not name.startswith("_")] == []
    assert static_arguments(len) == ((), ())


def test_a_missing_module_is_named_with_the_extra() -> None:
    with pytest.raises(LoweringError, match=r"No module named 'jax.nowhere'.*coreml-delegate\[jax"):
        jax_module("jax.nowhere")
