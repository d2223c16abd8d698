"""Modules of JAX, which is an extra, and its private interfaces."""

from __future__ import annotations

import importlib
from typing import Any

from coreml_delegate.errors import LoweringError


def jax_module(name: str) -> Any:
    """Import a module of JAX, as ``jax.export``.

    Raises:
        LoweringError: JAX is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LoweringError(
            "JAX and jaxlib, which read StableHLO, are not installed",
            got=str(error),
            remedy="pip install 'coreml-delegate[jax]'",
        ) from error


def mlir_context() -> Any:
    """Return a new context of MLIR with the dialects of JAX.

    There is no public way to register the dialect of functions.
    """
    return jax_module("jax._src.interpreters.mlir").make_ir_context()


def xla_client() -> Any:
    """Return the module with XLA's options and lists of devices; ``jax.extend`` lacks them."""
    return jax_module("jax._src.lib").xla_client


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and names of static arguments of a jitted function.

    There is no public attribute for them. Other functions that can be lowered have none.
    """
    info = getattr(jitted, "_jit_info", None)
    return getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())
