"""Compositions of MIL ops, for functions that MIL lacks or that a device computes wrongly.

A composition takes variables of the MIL program under construction, and Python numbers for
constants; it emits ops with coremltools' builder and returns the variable of the result. The graph
builder calls compositions for its operations; the record of an ATen op names one as its
translation.

Floats have one dtype, fp32 or fp16, and every composition keeps it. Programs of ATen ops are
composed in fp32 and cast to fp16 afterwards, so a value that is finite in fp32 has to be finite in
fp16 too, unless the result is not.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.patches.third_party import coremltools

Var: TypeAlias = Any
"""A variable of a MIL program under construction, or a number."""

# By the names of coremltools' types.
_NUMPY = {"fp16": np.float16, "fp32": np.float32, "int": np.int32, "bool": np.bool_}


@cache
def _builder() -> Any:
    coremltools()
    from coremltools.converters.mil.mil import Builder

    return Builder


class _Ops:
    """Coremltools' ``Builder``, imported at the first use."""

    def __getattr__(self, op: str) -> Any:
        return getattr(_builder(), op)


mb: Any = _Ops()
"""Emits MIL ops: ``mb.add(x=x, y=y)``."""


def number(value: float | NDArray[Any], like: Var) -> Any:
    """Return a constant, a number or an array, of the dtype of ``like``."""
    return _NUMPY[like.dtype.__name__](value)


def cast(x: Var, like: Var) -> Var:
    """Cast to the dtype of ``like``."""
    name = like.dtype.__name__
    return mb.cast(x=x, dtype="int32" if name == "int" else name)


def is_float(x: Var) -> bool:
    """Whether a variable has floats."""
    return x.dtype.__name__ in ("fp16", "fp32")


def constant_of(x: Var) -> NDArray[Any] | None:
    """Return the value of a number or constant; None if it is known at run time only."""
    value = getattr(x, "val", x)
    return None if value is None else np.asarray(value)
