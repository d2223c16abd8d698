"""Elementwise arithmetic, comparison, logic and ``cast``.

Source: coremltools' MIL op reference, ``elementwise_unary`` and ``elementwise_binary``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel, register_expressions
from coreml_delegate.runtime.engines.reference.values import storage_dtype
from coreml_delegate.runtime.mil.dtypes import DType

_Unary = Callable[[Tensor], Tensor]
_Binary = Callable[[Tensor, Tensor], Tensor]

_UNARY: dict[str, _Unary] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": lambda x: torch.exp2(x).to(x.dtype),  # of integers too: truncated
    "floor": torch.floor,
    "logical_not": torch.logical_not,
    "round": torch.round,  # halves to even
    "sign": torch.sign,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}


def _divide_in_64_bits(function: _Binary) -> _Binary:
    """Return ``function`` with integers in 64 bits: ``-2**31 / -1`` in int32 kills the process."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y) if x.is_floating_point() else function(x.long(), y.long()).to(x.dtype)

    return run


def _by_powers_of_two(function: _Binary, of_bits: _Binary) -> _Binary:
    """Return ``function`` with ``of_bits``, ten times as fast, for int32 and few powers of two."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        is_few = y.dtype == torch.int32 and y.numel() <= 4
        if is_few and all(n > 0 and n & (n - 1) == 0 for n in y.reshape(-1).tolist()):
            return of_bits(x, y)
        return function(x, y)

    return run


# torch's fp16 kernels of these ops may be an ulp off; the others compute in fp32 and round once.
_LOOSE_IN_FP16 = {"acos", "asin", "atan", "atanh", "erf"}

_BINARY: dict[str, _Binary] = {
    "add": torch.add,
    "equal": torch.eq,
    "floor_div": _by_powers_of_two(
        _divide_in_64_bits(torch.floor_divide),
        lambda x, y: x >> torch.log2(y.double()).to(torch.int32),
    ),
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mod": _by_powers_of_two(
        _divide_in_64_bits(torch.remainder),  # the sign of the divisor
        lambda x, y: x & (y - 1),
    ),
    "mul": torch.mul,
    "not_equal": torch.ne,
    "pow": torch.pow,
    # The declared result of two integers is an integer: the quotient without its fraction.
    "real_div": _divide_in_64_bits(
        lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc")
    ),
    "sub": torch.sub,
}


def _unary(function: _Unary) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        return function(x)

    return run


def _binary(function: _Binary) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    return run


for _name, _unary_function in _UNARY.items():
    kernel(_name, widen=_name in _LOOSE_IN_FP16)(_unary(_unary_function))
for _name, _binary_function in _BINARY.items():
    kernel(_name)(_binary(_binary_function))


_EPSILON = {"epsilon": float}

register_expressions(
    {
        "inverse": (_EPSILON, lambda x, epsilon=1e-4: torch.reciprocal(x + epsilon)),
        "log": (_EPSILON, lambda x, epsilon=1e-45: torch.log(x + epsilon)),
        "rsqrt": (_EPSILON, lambda x, epsilon=1e-12: torch.rsqrt(x + epsilon)),
        "clip": (
            {"alpha": float, "beta": float},
            lambda x, alpha, beta: torch.clamp(x, alpha, beta),
        ),
        "threshold": ({"alpha": float}, lambda x, alpha: torch.clamp(x, min=alpha)),
        "identity": ({}, lambda x: x),
    }
)


@kernel("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    """``x`` as ``dtype``: floats are truncated to integers, integers wrap modulo 2**bits."""
    target = DType.from_label(dtype)
    if target in (DType.UINT16, DType.UINT32):
        return x.to(torch.int64) % (1 << target.bits)
    return x.to(storage_dtype(target))


@kernel("select")
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``a`` where ``cond`` is true, else ``b``; all three broadcast."""
    return torch.where(cond, a, b)
