"""Logical and bitwise ops, and selection by a condition."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.mil.compose import movement
from coreml_delegate.ops.call import ANY, BOOL, INTEGER, NUMERIC, OpCall, ReasonCode
from coreml_delegate.ops.constraints import holds
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    fill_like,
    insert,
    promote,
    truth,
    value_of,
)
from coreml_delegate.ops.merging import pointwise
from coreml_delegate.ops.record import OpRecord, Rewrite


def _logical(target: Any) -> Rewrite:
    """Return a rewrite to a logical op on ``x != 0``."""

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        operands = (arguments[n] for n in ("self", "other") if n in arguments)
        become(node, target, *(truth(node, operand) for operand in operands))

    return rewrite


def _bitwise_with_number(name: str, logic: Any) -> Rewrite:
    """Return a rewrite of a bitwise op on integers and a number c, see ``_masked_bits``.

    ``x | c = (x & ~c) + c`` and ``x ^ c = (x & ~c) + c - (x & c)``.
    """

    def rewrite(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        x, c = cast(node, arguments["self"], dtype), arguments["other"]
        if dtype is torch.bool:
            become(node, logic, x, fill_like(node, x, c))
            return
        c = int(c)
        common, outside = (_masked_bits(node, x, bits) for bits in (c, ~c))
        if name == "and":
            become(node, ATEN.clone.default, common)
            return
        added = insert(node, ATEN.full_like.default, x, c)
        if name == "xor":
            added = insert(node, ATEN.sub.Tensor, added, common)
        become(node, ATEN.add.Tensor, outside, added)

    return rewrite


def _masked_bits(node: Node, x: Node, mask: int) -> Node:
    """Return ``x & mask``, inserted before ``node``.

    A run of set bits a..b-1 gives ``x mod 2**b - x mod 2**a``. For a negative mask, it is
    ``x - (x & ~mask)``.
    """
    if mask < 0:
        return insert(node, ATEN.sub.Tensor, x, _masked_bits(node, x, ~mask))
    result = insert(node, ATEN.mul.Tensor, x, 0)
    is_set = 0
    for position in range(mask.bit_length() + 1):
        if mask >> position & 1 == is_set:
            continue
        if position:
            change = ATEN.sub.Tensor if is_set == 0 else ATEN.add.Tensor
            remainder = insert(node, ATEN.remainder.Scalar, x, 2**position)
            result = insert(node, change, result, remainder)
        is_set = 1 - is_set
    return result


def _bitwise_not(node: Node) -> None:
    """``-1 - x`` of integers."""
    x = arguments_of(node)["self"]
    if value_of(node).dtype is torch.bool:
        become(node, ATEN.logical_not.default, x)
    else:
        become(node, ATEN.sub.Tensor, insert(node, ATEN.full_like.default, x, -1), x)


def _has_few_bits(call: OpCall) -> bool:
    return -_HIGHEST_BIT <= call.arguments["other"] < _HIGHEST_BIT


_HIGHEST_BIT = 2**30  # the largest power of 2 in int32, to compute a remainder by
_FEW_BITS = holds(
    _has_few_bits, ReasonCode.ARGUMENT, "Core ML has remainders of int32, by at most 2 ** 30"
)

_op = partial(OpRecord, merge=pointwise)

RECORDS = (
    *(
        _op(f"aten.{name}.default", dtypes={"": ANY}, rewrite=_logical(target))
        for name, target in (
            ("logical_and", ATEN.logical_and.default),
            ("logical_not", ATEN.logical_not.default),
            ("logical_or", ATEN.logical_or.default),
            ("logical_xor", ATEN.logical_xor.default),
        )
    ),
    *(
        _op(f"aten.{name}", dtypes={"": BOOL}, rewrite=_logical(target))
        for name, target in (
            ("bitwise_and.Tensor", ATEN.logical_and.default),
            ("bitwise_or.Tensor", ATEN.logical_or.default),
            ("bitwise_xor.Tensor", ATEN.logical_xor.default),
        )
    ),
    *(
        _op(
            f"aten.bitwise_{name}.Scalar",
            dtypes={"": INTEGER | BOOL},
            constraints=(_FEW_BITS,),
            rewrite=_bitwise_with_number(name, logic),
        )
        for name, logic in (
            ("and", ATEN.logical_and.default),
            ("or", ATEN.logical_or.default),
            ("xor", ATEN.logical_xor.default),
        )
    ),
    _op("aten.bitwise_not.default", dtypes={"": INTEGER | BOOL}, rewrite=_bitwise_not),
    _op(
        "aten.where.self",
        dtypes={"": ANY, "condition": BOOL},
        rewrite=promote("self", "other"),
        translation=movement.select,
    ),
    _op(
        "aten.masked_fill.Scalar",
        dtypes={"self": NUMERIC, "mask": BOOL},
        translation=movement.masked_fill,
    ),
)
