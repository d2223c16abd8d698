"""Ops that create tensors: of one number, of a range of numbers, of random numbers.

Random numbers are drawn anew at every call, whatever generator the program names. coremltools 9.0
rounds those of ``randint`` toward zero, which makes the numbers around zero too frequent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coreml_delegate.ops.call import ANY, FLOAT, OpCall, Reason, ReasonCode
from coreml_delegate.ops.constraints import contiguous_result, holds, static_result
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    cast_after,
    insert,
    number,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.record import OpRecord, Rewrite


def _broadcast(source: str) -> Rewrite:
    """Return a rewrite to the named argument, expanded to the shape of the first argument."""

    def rewrite(node: Node) -> None:
        value = cast(node, arguments_of(node)[source], value_of(node).dtype)
        # Coremltools expands nothing to a scalar.
        expand = ATEN.expand_copy.default if value_of(node).dim() else ATEN.view_copy.default
        become(node, expand, value, shape_of(node))

    return rewrite


def _copy(node: Node) -> None:
    source = arguments_of(node)["src"]
    if _are_equal(value_of(source).shape, shape_of(node)):
        become(node, ATEN._to_copy.default, source, dtype=value_of(node).dtype)
    else:
        _broadcast("src")(node)


def _static_if_broadcast(call: OpCall) -> Reason | None:
    source, target = call.tensor("src"), call.tensor("self")
    if source is not None and target is not None and _are_equal(source.shape, target.shape):
        return None
    return static_result(call)


def _are_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes are known to be equal, without fixing symbolic sizes."""
    return len(shape) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(shape, other, strict=True)
    )


def _full(node: Node) -> None:
    # Without a dtype coremltools makes fp32, which does not represent every int32.
    node.kwargs = {"dtype": value_of(node).dtype}
    cast_after(node)


def _empty(node: Node) -> None:
    """Zeros: the values of an empty tensor are arbitrary."""
    dtype = value_of(node).dtype
    become(node, ATEN.full.default, shape_of(node), number(0, dtype), dtype=dtype)
    cast_after(node)


def _rand(node: Node) -> None:
    """Coremltools fails to translate it, but not ``rand_like``: pytorch/executorch#11722."""
    like = insert(node, ATEN.full.default, shape_of(node), 0.0, dtype=value_of(node).dtype)
    become(node, ATEN.rand_like.default, like)


def _is_row_major(call: OpCall) -> bool:
    return all(tensor.is_contiguous() for tensor in call.outputs())


def _eye(node: Node) -> None:
    """``arange(rows)[:, None] == arange(columns)`` in int32; ATen's decomposition uses uint8."""
    rows, columns = (
        insert(node, ATEN.arange.start_step, 0, size, 1, dtype=torch.int32)
        for size in shape_of(node)
    )
    rows = insert(node, ATEN.view_copy.default, rows, [shape_of(node)[0], 1])
    equal = insert(node, ATEN.eq.Tensor, rows, columns)
    become(node, ATEN._to_copy.default, equal, dtype=value_of(node).dtype)


_op = partial(OpRecord, dtypes={"": ANY}, flops=nothing)
_decomposed = partial(_op, preserve=False)
_random = partial(OpRecord, results=FLOAT, constraints=(static_result,))

RECORDS = (
    _decomposed("aten.full.default", symbolic=frozenset({"size"}), rewrite=_full),
    _decomposed("aten.arange.start_step", symbolic=frozenset({"start", "end"}), rewrite=cast_after),
    _decomposed("aten.scalar_tensor.default", symbolic=frozenset({"s"}), rewrite=cast_after),
    *(
        _decomposed(f"aten.{name}.default", rewrite=cast_after)
        for name in ("full_like", "new_zeros", "zeros_like", "ones_like")
    ),
    *(
        _decomposed(
            target,
            symbolic=frozenset({"size"}),
            constraints=(contiguous_result,),
            rewrite=_empty,
        )
        for target in ("aten.empty.memory_format", "dim_order_ops._empty_dim_order.default")
    ),
    _decomposed(
        "aten.empty_strided.default",
        constraints=(holds(_is_row_major, ReasonCode.LAYOUT, "Core ML is row-major"),),
        rewrite=_empty,
    ),
    *(_op(target, results=ANY, rewrite=_eye) for target in ("aten.eye.default", "aten.eye.m")),
    # Decomposed, a fill becomes a copy of a broadcast scalar.
    _op("aten.fill.Tensor", constraints=(static_result,), rewrite=_broadcast("value")),
    _op("aten.fill.Scalar", rewrite=cast_after),
    _op("aten.copy.default", constraints=(_static_if_broadcast,), rewrite=_copy),
    OpRecord("aten.randn.default", results=FLOAT, flops=nothing),
    _random("aten.randn_like.default"),
    OpRecord("aten.rand.default", results=FLOAT, rewrite=_rand),
    _random("aten.rand_like.default"),
)
