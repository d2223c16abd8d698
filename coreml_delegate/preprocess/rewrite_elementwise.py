"""Rewrites of elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    arguments_of,
    become,
    cast,
    insert,
    number,
    positional,
    set_arguments,
    shape_of,
    truth,
    value_of,
)
from coreml_delegate.preprocess.own_ops import floor_divide


def _promote(*names: str) -> Rewrite:
    """Cast the named arguments to the dtype of the result: PyTorch promotes across kinds."""

    def rewrite(node: Node) -> None:
        dtype, arguments = value_of(node).dtype, arguments_of(node)
        set_arguments(node, **{n: cast(node, arguments[n], dtype) for n in names})

    return rewrite


def _compare(node: Node) -> None:
    """Cast the tensors compared to the dtype in which PyTorch compares them."""
    arguments = arguments_of(node)
    sides = {name: arguments[name] for name in ("self", "other")}
    operands = (value_of(s) if isinstance(s, Node) else s for s in sides.values())
    dtype = torch.result_type(*operands)
    if dtype is torch.bool:
        return
    tensors = {n: cast(node, side, dtype) for n, side in sides.items() if isinstance(side, Node)}
    set_arguments(node, **tensors)


_promote_both = _promote("self", "other")
_promote_self = _promote("self")


def _add_scaled(target: Any) -> Rewrite:
    """``self ± alpha * other``; coremltools overlooks alpha: apple/coremltools#2573."""

    def rewrite(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        x, y, alpha = (cast(node, arguments[n], dtype) for n in ("self", "other", "alpha"))
        if alpha == 1:
            become(node, node.target, x, y)
        elif isinstance(y, Node):
            become(node, target, x, insert(node, ATEN.mul.Tensor, y, alpha))
        else:
            become(node, target, x, y * alpha)

    return rewrite


def _rsub(node: Node) -> None:
    """``other - alpha * self``."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y, alpha = (cast(node, arguments[n], dtype) for n in ("self", "other", "alpha"))
    if alpha != 1:
        x = insert(node, ATEN.mul.Tensor, x, alpha)
    become(node, ATEN.sub.Tensor, y, x)


def _divide(node: Node) -> None:
    """Division with rounding; the mode is a keyword that coremltools does not see everywhere."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    mode = arguments.get("rounding_mode", "floor")
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    if not dtype.is_floating_point:
        _become_whole_quotient(node, x, y, mode)
    elif mode == "trunc":
        _become_truncated(node, insert(node, ATEN.div.Tensor, x, y))
    else:
        become(node, ATEN.floor_divide.default if mode == "floor" else ATEN.div.Tensor, x, y)


def _become_whole_quotient(node: Node, x: Node, y: Any, mode: str) -> None:
    """Integers are divided as integers: floats have not all of them."""
    if mode == "floor":
        become(node, floor_divide(), x, _filled(node, x, y))
        return
    size, sign = insert(node, ATEN.abs.default, x), insert(node, ATEN.sign.default, x)
    if isinstance(y, Node):
        divisor, other = insert(node, ATEN.abs.default, y), insert(node, ATEN.sign.default, y)
    else:
        divisor, other = _filled(node, x, abs(y)), 1 if y > 0 else -1
    quotient = insert(node, floor_divide(), size, divisor)
    become(node, ATEN.mul.Tensor, quotient, insert(node, ATEN.mul.Tensor, sign, other))


def _filled(node: Node, like: Node, value: Any) -> Node:
    return value if isinstance(value, Node) else insert(node, ATEN.full_like.default, like, value)


def _truncate(node: Node) -> None:
    _become_truncated(node, arguments_of(node)["self"])


def _become_truncated(node: Node, x: Node) -> None:
    """Round towards zero, which Core ML has not."""
    size = insert(node, ATEN.floor.default, insert(node, ATEN.abs.default, x))
    become(node, ATEN.mul.Tensor, size, insert(node, ATEN.sign.default, x))


def _fmod(node: Node) -> None:
    """The remainder with the sign of the dividend; Core ML has that of the divisor."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, y = (cast(node, arguments[n], dtype) for n in ("self", "other"))
    size = insert(node, ATEN.abs.default, x)
    if isinstance(y, Node):
        divisor = insert(node, ATEN.abs.default, y)
        rest = insert(node, ATEN.remainder.Tensor, size, divisor)
    else:
        rest = insert(node, ATEN.remainder.Scalar, size, abs(y))
    become(node, ATEN.mul.Tensor, rest, insert(node, ATEN.sign.default, x))


def _remainder_of_number(node: Node) -> None:
    """A number divided by a tensor; MIL's op takes two tensors of one kind."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    divisor = cast(node, arguments["other"], dtype)
    dividend = insert(node, ATEN.full_like.default, divisor, number(arguments["self"], dtype))
    become(node, ATEN.remainder.Tensor, dividend, divisor)


def _pow(node: Node) -> None:
    """Small powers of integers as products: MIL has powers of floats alone."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    x, exponent = cast(node, arguments["self"], dtype), arguments["exponent"]
    if dtype.is_floating_point:
        become(node, node.target, x, cast(node, exponent, dtype))
        return
    product = x
    for _ in range(exponent - 2):
        product = insert(node, ATEN.mul.Tensor, product, x)
    become(node, ATEN.mul.Tensor, product, x)


def _pow_of_number(node: Node) -> None:
    arguments, dtype = arguments_of(node), value_of(node).dtype
    become(node, node.target, *(cast(node, arguments[n], dtype) for n in ("self", "exponent")))


def _round_decimals(node: Node) -> None:
    """Scale, round to even, scale back, in PyTorch's own order."""
    arguments = arguments_of(node)
    x, decimals = arguments["self"], arguments["decimals"]
    to, back = (ATEN.mul.Tensor, ATEN.div.Tensor)[:: 1 if decimals >= 0 else -1]
    scale = 10.0 ** abs(decimals)
    rounded = insert(node, ATEN.round.default, insert(node, to, x, scale))
    become(node, back, rounded, scale)


def _clamp(node: Node) -> None:
    arguments, dtype = arguments_of(node), value_of(node).dtype
    bounds = (None if arguments[n] is None else cast(node, arguments[n], dtype) for n in _BOUNDS)
    become(node, node.target, cast(node, arguments["self"], dtype), *bounds)


def _logical(target: Any) -> Rewrite:
    """A logical op on whatever is not zero."""

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        operands = (arguments[n] for n in ("self", "other") if n in arguments)
        become(node, target, *(truth(node, operand) for operand in operands))

    return rewrite


def _where(node: Node) -> None:
    dtype, arguments = value_of(node).dtype, arguments_of(node)
    chosen = [cast(node, arguments[n], dtype) for n in ("self", "other")]
    condition = arguments["condition"]
    if value_of(node).dim():
        become(node, node.target, condition, *_spread(node, condition, chosen))
        return
    # Coremltools broadcasts the operands and cannot do it to scalars.
    condition = insert(node, ATEN.view_copy.default, condition, [1])
    whole = insert(node, node.target, condition, *chosen)
    become(node, ATEN.view_copy.default, whole, [])


def _spread(node: Node, condition: Node, branches: list[Node]) -> list[Node]:
    """The branches, one of them as large as the result where sizes are dynamic.

    Coremltools broadcasts what is static; of the rest MIL declares the shape of the branches alone.
    """
    shape = value_of(node).shape
    branch_shape = torch.broadcast_shapes(*(value_of(branch).shape for branch in branches))
    if branch_shape == shape or all(isinstance(size, int) for size in shape):
        return branches
    first, second = branches
    dtype = value_of(first).dtype
    never = insert(node, ATEN.logical_not.default, condition)
    never = insert(node, ATEN.logical_and.default, condition, never)
    if dtype is torch.bool:
        return [insert(node, ATEN.logical_or.default, first, never), second]
    # Of floats a negative zero: added to, it leaves zeros of both signs as they are.
    zero = insert(node, ATEN._to_copy.default, never, dtype=dtype)
    zero = insert(node, ATEN.mul.Tensor, zero, -1.0) if dtype.is_floating_point else zero
    return [insert(node, ATEN.add.Tensor, first, zero), second]


def _masked_fill(node: Node) -> None:
    arguments, value = arguments_of(node), value_of(node)
    filling = number(arguments["value"], value.dtype)
    if shape_of(arguments["self"]) != shape_of(node):
        source = insert(node, ATEN.expand_copy.default, arguments["self"], shape_of(node))
    else:
        source = arguments["self"]
    become(node, node.target, source, arguments["mask"], filling)


def _reciprocal(node: Node) -> None:
    # MIL's inverse adds an epsilon of 1e-4, which is wrong by a tenth of a percent at 0.1.
    become(node, ATEN.div.Tensor, 1.0, cast(node, node.args[0], value_of(node).dtype))


def _gelu(node: Node) -> None:
    """Spell the tanh approximation out, which coremltools fuses; it overlooks the argument."""
    arguments = arguments_of(node)
    x = arguments["self"]
    if arguments["approximate"] != "tanh":
        become(node, node.target, x)
        return
    cube = insert(node, ATEN.pow.Tensor_Scalar, x, 3.0)
    scaled = insert(node, ATEN.mul.Scalar, cube, 0.044715)
    total = insert(node, ATEN.add.Tensor, x, scaled)
    angle = insert(node, ATEN.mul.Scalar, total, math.sqrt(2 / math.pi))
    tanh = insert(node, ATEN.tanh.default, angle)
    half = insert(node, ATEN.mul.Scalar, insert(node, ATEN.add.Scalar, tanh, 1.0), 0.5)
    become(node, ATEN.mul.Tensor, half, x)


def _elu(node: Node) -> None:
    """``scale * (x if x > 0 else alpha * (exp(input_scale * x) - 1))``; MIL has alpha alone."""
    arguments = arguments_of(node)
    x, alpha, scale, input_scale = (
        cast(node, arguments[n], value_of(node).dtype)
        for n in ("self", "alpha", "scale", "input_scale")
    )
    if scale == input_scale == 1:
        become(node, node.target, x, alpha)
        return
    # Above zero the exponential is that of zero, which contributes nothing and cannot overflow.
    negative = insert(node, ATEN.clamp.default, x, None, 0.0)
    scaled = insert(node, ATEN.mul.Scalar, negative, input_scale)
    below = insert(node, ATEN.mul.Scalar, insert(node, ATEN.expm1.default, scaled), alpha)
    both = insert(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), below)
    become(node, ATEN.mul.Scalar, both, scale)


def _prelu(node: Node) -> None:
    """The negative part times the slope, where coremltools takes no slope per channel."""
    arguments = arguments_of(node)
    x, weight = arguments["self"], arguments["weight"]
    if value_of(x).dim() == _CHANNELED_RANK or value_of(weight).numel() == 1:
        return
    shape = [-1 if d == 1 else 1 for d in range(value_of(x).dim())]
    slopes = insert(node, ATEN.view_copy.default, weight, shape)
    below = insert(node, ATEN.mul.Tensor, insert(node, ATEN.clamp.default, x, None, 0.0), slopes)
    become(node, ATEN.add.Tensor, insert(node, ATEN.relu.default, x), below)


_CHANNELED_RANK = 4
_BOUNDS = ("min", "max")
_FLOATING_UNARY = (
    *(
        "acos",
        "asin",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log10",
    ),
    *("log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
)
_PROMOTING = (
    *("atan2.default", "div.Tensor", "div.Scalar", "maximum.default", "minimum.default"),
    *("mul.Tensor", "mul.Scalar", "remainder.Tensor", "remainder.Scalar"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        **{f"aten.{op}.default": _promote_self for op in _FLOATING_UNARY},
        **{f"aten.{op}": _promote_both for op in _PROMOTING},
        **{f"aten.{op}.{kind}": _compare for op in _COMPARISONS for kind in ("Tensor", "Scalar")},
        "aten.add.Scalar": _add_scaled(ATEN.add.Scalar),
        "aten.add.Tensor": _add_scaled(ATEN.add.Tensor),
        "aten.bitwise_and.Tensor": _logical(ATEN.logical_and.default),
        "aten.bitwise_not.default": _logical(ATEN.logical_not.default),
        "aten.bitwise_or.Tensor": _logical(ATEN.logical_or.default),
        "aten.bitwise_xor.Tensor": _logical(ATEN.logical_xor.default),
        "aten.clamp.Tensor": _clamp,
        "aten.clamp.default": _clamp,
        "aten.clamp_max.default": positional("self", "max"),
        "aten.clamp_min.default": positional("self", "min"),
        "aten.div.Scalar_mode": _divide,
        "aten.div.Tensor_mode": _divide,
        "aten.elu.default": _elu,
        "aten.floor_divide.default": _divide,
        "aten.fmod.Scalar": _fmod,
        "aten.fmod.Tensor": _fmod,
        "aten.gelu.default": _gelu,
        "aten.hardtanh.default": positional("self", "min_val", "max_val"),
        "aten.logical_and.default": _logical(ATEN.logical_and.default),
        "aten.logical_not.default": _logical(ATEN.logical_not.default),
        "aten.logical_or.default": _logical(ATEN.logical_or.default),
        "aten.logical_xor.default": _logical(ATEN.logical_xor.default),
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.pow.Scalar": _pow_of_number,
        "aten.pow.Tensor_Scalar": _pow,
        "aten.pow.Tensor_Tensor": _pow_of_number,
        "aten.prelu.default": _prelu,
        "aten.reciprocal.default": _reciprocal,
        "aten.remainder.Scalar_Tensor": _remainder_of_number,
        "aten.round.decimals": _round_decimals,
        "aten.rsub.Scalar": _rsub,
        "aten.sub.Scalar": _add_scaled(ATEN.sub.Scalar),
        "aten.sub.Tensor": _add_scaled(ATEN.sub.Tensor),
        "aten.trunc.default": _truncate,
        "aten.where.self": _where,
    }
)
