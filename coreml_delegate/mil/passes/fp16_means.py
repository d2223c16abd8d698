"""Sums divided by a count become means, because a sum may overflow fp16 where the mean does not.

- ``sum(x) * c`` with a constant c below 1 is ``mean(x) * (c * n)`` for sums of n terms; 64 terms of
  2,000 are beyond 65504.
- ``(x @ ones) * c`` is ``x @ (c * ones)``, also with moves of elements between.
- In a quotient of sums of n terms, as ``sum(x * mask) / max(sum(mask), 1)``, both are divided by n:
  sums become means, and constants between them and the quotient are divided by n. In linear
  attention, ``(q @ (k.T @ v)) / (q @ sum(k))``, the sums are those of k (Katharopoulos et al.,
  "Transformers are RNNs", 2020); there ``k.T @ v`` is divided by n, half in k, half in v.

- A variance ``mean(x ** 2) - mean(x) ** 2`` is ``mean((x - mean(x)) ** 2)``.

All but linear attention, and a sum that is divided by an input of the program (one op more), take
as many ops as before, or one op fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.passes.matching import (
    Selector,
    axes_of,
    count_of,
    is_fp32,
    made_by,
    number_in,
    only_reader,
    replace,
    squared,
    variables,
)
from coreml_delegate.patches.coremltools import INFINITE_FROM

_LONG = 16  # terms of a sum that is worth another op
_LARGEST_FACTOR = 4.0  # of a mean; a larger one shows the bits that fp16 lacks below 6e-5
_SMALLEST_NORMAL = 2.0**-14  # of fp16
_MOST_STEPS = 8  # ops between a sum and the quotient


def _factor(op: Any, x: Any) -> float | None:
    """Return c of ``x * c`` or ``x / c``, a constant below 1; None for other ops."""
    other = op.y if op.x is x else op.x
    number = number_in(other)
    if not number or not math.isfinite(number) or op.outputs[0].shape != x.shape:
        return None
    if op.op_type == "real_div":
        number = 1 / number if op.x is x else math.inf
    return number if 0 < abs(number) < 1 else None


def _terms(reduction: Any) -> int | None:
    """Return the number of terms of each sum; None if it is not known."""
    x = reduction.x
    axes = axes_of(reduction, x.rank)
    return None if axes is None else count_of(x.shape[axis] for axis in axes)


def _average(total: Any, **keywords: Any) -> Any:
    """Return the mean of the terms of ``reduce_sum``."""
    axes = list(axes_of(total, total.x.rank) or ())
    keep = bool(total.keep_dims.val)
    return mb.reduce_mean(x=total.x, axes=axes, keep_dims=keep, before_op=total, **keywords)


def average_scaled_sum(total: Any, may_cast: Selector) -> None:
    """Compute a mean in place of a sum that is multiplied by a small constant."""
    reader = only_reader(total, "mul", "real_div") if total.op_type == "reduce_sum" else None
    if reader is None or not may_cast(total) or not is_fp32(total.x):
        return
    factor, count = _factor(reader, total.outputs[0]), _terms(total)
    if factor is None or not count:
        return
    factor *= count
    if abs(factor) > _LARGEST_FACTOR:
        return
    name = reader.outputs[0].name
    if math.isclose(factor, 1, rel_tol=1e-6):
        replace(reader, _average(total, name=name))
        return
    mean = _average(total)
    replace(reader, mb.mul(x=mean, y=np.float32(factor), name=name, before_op=reader))


def scale_ones(product: Any, may_cast: Selector) -> None:
    """Multiply a constant factor of equal elements by the constant that multiplies the product."""
    uniform = _uniform_factor(product)
    if uniform is None or not may_cast(product):
        return
    number = number_in(product.inputs[uniform]) or 0.0
    last = product
    while (reader := only_reader(last, "mul", "real_div", *_MOVES)) and reader.op_type in _MOVES:
        last = reader
    factor = None if reader is None else _factor(reader, last.outputs[0])
    if reader is None or factor is None or abs(number * factor) < _SMALLEST_NORMAL:
        return
    name = reader.outputs[0].name
    if last is product:
        replace(reader, _with_scaled_factor(product, uniform, factor, name=name))
        return
    replace(product, _with_scaled_factor(product, uniform, factor))
    replace(reader, mb.identity(x=last.outputs[0], name=name, before_op=reader))


def _uniform_factor(product: Any) -> str | None:
    """Return the name of the operand that is a constant of equal elements, or None."""
    names = {"linear": ("weight",), "matmul": ("x", "y")}.get(product.op_type, ())
    uniform = [name for name in names if number_in(product.inputs[name]) and is_fp32(product.x)]
    bias = product.inputs.get("bias")
    return uniform[0] if uniform and (bias is None or bias.val is not None) else None


def _with_scaled_factor(product: Any, factor: str, scale: float, **keywords: Any) -> Any:
    """Return a product with an operand, and the bias, multiplied by a number."""
    arguments = {key: var for key, var in product.inputs.items() if var is not None}
    for key in (factor, "bias"):
        if key in arguments:
            arguments[key] = np.asarray(arguments[key].val * np.float32(scale), np.float32)
    return getattr(mb, product.op_type)(**arguments, before_op=product, **keywords)


# Quotients of sums


def scale_quotient(quotient: Any, may_cast: Selector) -> None:
    """Divide both sums of a quotient by their number of terms."""
    parts = _quotient(quotient) if is_fp32(quotient.outputs[0]) and may_cast(quotient) else None
    if parts is None:
        return
    *operands, reciprocal = parts
    counts = set[int].intersection(*(_counts(var, may_cast) for var in operands))
    for count in sorted(counts, reverse=True):
        dividend, divisor = (_divided(var, count, may_cast) for var in operands)
        if dividend is not None and divisor is not None:
            _replace_quotient(quotient, dividend, divisor, reciprocal)
            return
    dividend, divisor = operands
    counts = _counts(dividend, may_cast, _SUMS) if not reciprocal and _is_count(divisor) else set()
    count = max(counts, default=0)
    if count >= _LONG and (dividend := _divided(dividend, count, may_cast)) is not None:
        divisor = mb.mul(x=divisor, y=np.float32(1 / count), before_op=quotient)
        _replace_quotient(quotient, dividend, divisor, reciprocal)


_MOVES = ("expand_dims", "reshape", "squeeze", "transpose", "slice_by_index")
_SUMS = frozenset({"reduce_sum"})
_PRODUCTS = frozenset({"matmul", "linear"})


def _quotient(op: Any) -> tuple[Any, Any, list[Any]] | None:
    """Match ``a / b`` or ``a * (c / b)``; return a, b and the ops from ``c / b`` to the product."""
    if op.op_type == "real_div":
        return op.x, op.y, []
    if op.op_type != "mul":
        return None
    for dividend, var in ((op.x, op.y), (op.y, op.x)):
        ops = list[Any]()
        while (move := made_by(var, *_MOVES)) is not None and len(ops) < _MOST_STEPS:
            ops.append(move)
            var = move.x
        division = made_by(var, "real_div")
        if division is not None and number_in(division.x) is not None:
            return dividend, division.y, [*ops, division]
    return None


def _replace_quotient(quotient: Any, dividend: Any, divisor: Any, reciprocal: list[Any]) -> None:
    for op in reversed(reciprocal):
        divisor = _rebuilt(op, **{"y" if op.op_type == "real_div" else "x": divisor})
    combine = mb.mul if reciprocal else mb.real_div
    name = quotient.outputs[0].name
    replace(quotient, combine(x=dividend, y=divisor, name=name, before_op=quotient))


def _is_count(var: Any) -> bool:
    """Whether a variable is an input of the program, or computed from integers."""
    op = made_by(var, *_MOVES, "clip", "maximum", "cast")
    if op is None:
        return var.op is None
    is_integer = op.op_type == "cast" and op.x.dtype.__name__ == "int"
    return is_integer or (op.op_type != "cast" and _is_count(op.x))


def _counts(var: Any, may_cast: Selector, types: frozenset[str] = _SUMS | _PRODUCTS) -> set[int]:
    """Return the numbers of terms of the sums from which a variable is computed linearly."""
    counts = set[int]()
    pending = [(var, 0)]
    while pending:
        current, steps = pending.pop()
        op = current.op
        if op is None or op.op_type not in _DIVISIONS or steps > _MOST_STEPS or not may_cast(op):
            continue
        if op.op_type in types:
            count = _terms(op) if op.op_type in _SUMS else _contracted(op)
            counts |= {count} if count and count > 1 else set()
        pending += [(operand, steps + 1) for operand in variables(op) if is_fp32(operand)]
    return counts


def _contracted(op: Any) -> int | None:
    """Return the number of terms of each sum of a product of matrices; None if not known."""
    if op.op_type == "linear":
        return count_of(op.x.shape[-1:])
    if op.op_type != "matmul":
        return None
    return count_of((op.x.shape[-2 if op.transpose_x.val else -1],)) if op.x.rank > 1 else None


def _divided(var: Any, count: int, may_cast: Selector, steps: int = 0) -> Any:
    """Return a variable, computed linearly from sums of ``count`` terms, divided by ``count``.

    None if it is computed otherwise.
    """
    op = var.op
    if op is None or op.op_type not in _DIVISIONS or steps > _MOST_STEPS or not may_cast(op):
        return None
    return _DIVISIONS[op.op_type](op, lambda x: _divided(x, count, may_cast, steps + 1), count)


Divide = Callable[[Any], Any]


def _rebuilt(op: Any, **changed: Any) -> Any:
    """Emit an op again, with other operands."""
    arguments = {key: var for key, var in op.inputs.items() if var is not None}
    return getattr(mb, op.op_type)(**{**arguments, **changed}, before_op=op)


def _divide_sum(op: Any, divide: Divide, count: int) -> Any:
    if _are_weights(op.x):
        return None
    if _terms(op) == count:
        return _average(op)
    x = divide(op.x)
    return None if x is None else _rebuilt(op, x=x)


def _are_weights(var: Any) -> bool:
    """Whether terms have weights of a softmax, which are at most 1: their sums do not overflow."""
    product = made_by(var, "mul")
    factors = [var] if product is None else [product.x, product.y]
    return any(made_by(factor, "exp", "softmax") is not None for factor in factors)


def _divide_move(op: Any, divide: Divide, _: int) -> Any:
    x = divide(op.x)
    return None if x is None else _rebuilt(op, x=x)


def _divide_clip(op: Any, divide: Divide, count: int) -> Any:
    x = divide(op.x)
    bounds = {name: _share(op.inputs[name].val, count) for name in ("alpha", "beta")}
    return None if x is None else _rebuilt(op, x=x, **bounds)


def _share(number: float, count: int) -> Any:
    """Return ``number / count`` in fp32; numbers that mean infinity unchanged."""
    return np.float32(number if abs(number) >= INFINITE_FROM else number / count)


def _divide_terms(op: Any, divide: Divide, count: int) -> Any:
    """Divide both operands; one of them may be a constant."""
    names = ("a", "b") if op.op_type == "select" else ("x", "y")
    changed = dict[str, Any]()
    for name in names:
        number = number_in(op.inputs[name])
        part = divide(op.inputs[name]) if number is None else _share(number, count)
        if part is None:
            return None
        changed[name] = part
    is_constant = all(number_in(op.inputs[name]) is not None for name in names)
    return None if is_constant else _rebuilt(op, **changed)


def _divide_product(op: Any, divide: Divide, count: int) -> Any:
    """Divide one operand."""
    bias = op.inputs.get("bias")
    if bias is not None and bias.val is None:
        return None
    share = {} if bias is None else {"bias": np.asarray(bias.val / np.float32(count))}
    for name in ("y", "x"):
        part = divide(op.inputs[name]) if name in op.inputs else None
        if part is not None:
            return _rebuilt(op, **{name: part}, **share)
    if _contracted(op) != count:
        return None
    uniform = _uniform_factor(op)
    if uniform is not None:
        return _with_scaled_factor(op, uniform, 1 / count)
    return _divide_both(op, count)


def _divide_both(op: Any, count: int) -> Any:
    """Divide both factors by about the root of ``count``, so that neither is small in fp16."""
    factors = [op.inputs.get(name) for name in ("x", "y")]
    if count < _LONG or None in factors or any(map(_are_weights, factors)):
        return None
    first = 2.0 ** -round(math.log2(count) / 2)
    scales = (first, 1 / count / first)
    x, y = (
        mb.mul(x=factor, y=np.float32(scale), before_op=op)
        for factor, scale in zip(factors, scales, strict=True)
    )
    return _rebuilt(op, x=x, y=y)


_DIVISIONS: dict[str, Callable[[Any, Divide, int], Any]] = {
    "reduce_sum": _divide_sum,
    **dict.fromkeys((*_MOVES, "tile"), _divide_move),
    "clip": _divide_clip,
    **dict.fromkeys(("add", "sub", "maximum", "minimum", "select"), _divide_terms),
    **dict.fromkeys(("mul", "matmul", "linear"), _divide_product),
}
"""Functions that divide the result of an op that is linear in sums."""

# Variances


def centre_squares(difference: Any, may_cast: Selector) -> None:
    """Compute ``mean((x - mean(x)) ** 2)`` in place of ``mean(x ** 2) - mean(x) ** 2``."""
    if difference.op_type != "sub" or not may_cast(difference):
        return
    squares, square = made_by(difference.x, "reduce_mean"), difference.y
    mean = made_by(squared(square), "reduce_mean")
    if squares is None or mean is None or not is_fp32(mean.x):
        return
    x = mean.x
    if squared(squares.x) is not x:
        return
    axes = axes_of(squares, x.rank)
    if axes is None or axes != axes_of(mean, x.rank) or difference.x.shape != square.shape:
        return
    keywords: Any = {"before_op": difference}
    centre = mb.reduce_mean(x=x, axes=list(axes), keep_dims=True, **keywords)
    deviation = mb.sub(x=x, y=centre, **keywords)
    power = mb.square(x=deviation, **keywords)
    keep = bool(squares.keep_dims.val)
    name = difference.outputs[0].name
    variance = mb.reduce_mean(x=power, axes=list(axes), keep_dims=keep, name=name, **keywords)
    replace(difference, variance)


MEANS = (average_scaled_sum, scale_ones, scale_quotient)
"""Rewrites: functions of an op and of the selector of ops that are cast."""
