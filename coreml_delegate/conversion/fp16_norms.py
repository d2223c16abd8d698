"""Norms that a model writes out, in fp16.

They divide by the root of a mean, sum or variance, whose squares overflow from 256 on. The norm of
such a row is zero: pytorch/executorch#19523. What is squared is divided by its largest magnitude
first, and the root multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.conversion.fp16 import stays_fp32
from coreml_delegate.ops.call import CAST, target_name
from coreml_delegate.ops.constants import stored_value
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, shape_of, value_of
from coreml_delegate.ops.normalization import scale_down

_ROOT, _INVERSE = 0.5, -0.5
_ROOTS = {"aten.sqrt.default": _ROOT, "aten.rsqrt.default": _INVERSE}
_POWER = "aten.pow.Tensor_Scalar"
_MEAN, _SUM, _VARIANCE = "aten.mean.dim", "aten.sum.dim_IntList", "aten.var.correction"
_MIL_OPS = {_MEAN: "reduce_mean", _SUM: "reduce_sum", _VARIANCE: "reduce_mean"}


@dataclass(frozen=True, slots=True)
class _Squares:
    """A mean or sum of squares, or a variance, and what is added to it.

    Attributes:
        call: The call that computes it.
        x: What is squared; of a variance, what it is the variance of.
        dims: Dimensions that it is computed along.
        keeps: Whether it keeps these dimensions.
        is_sum: Whether it is a sum.
        correction: What a variance subtracts from the number of squares; None of squares of ``x``.
        epsilon: What is added; 0 for nothing.
    """

    call: Node
    x: Node
    dims: list[int]
    keeps: bool
    is_sum: bool
    correction: int | None
    epsilon: float


def scale_squares(program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]) -> None:
    """Divide what is squared below a root by its largest magnitude.

    Args:
        program: A prepared subgraph; edited in place.
        in_fp32: Debug handles of the calls that stay in fp32.
        ops: The MIL ops that stay in fp32.
    """
    for node in list(program.graph.nodes):
        power = _power_of(node)
        squares = None if power is None else _squares(node.args[0])
        if squares is None:
            continue
        op = _MIL_OPS[target_name(squares.call.target)]
        if not stays_fp32(squares.call, op, in_fp32, ops):
            _scale(node, squares, is_inverse=power == _INVERSE)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _power_of(node: Node) -> float | None:
    """Return 1/2 for a root, -1/2 for its inverse, and None for other calls."""
    if node.op != "call_function":
        return None
    target = target_name(node.target)
    if target == _POWER:
        value = stored_value(node.args[1])
        power = None if value is None else value.item()
        return power if power in (_ROOT, _INVERSE) else None
    return _ROOTS.get(target)


def _squares(node: Any) -> _Squares | None:
    """Return what is below a root; None if it is nothing of squares."""
    epsilon = 0.0
    node = _behind_casts(node)
    if _calls(node, "aten.add.Tensor", "aten.add.Scalar") and not node.kwargs:
        node, added = node.args
        value = stored_value(added)
        if value is None or value.numel() != 1 or not value.item() > 0:
            return None
        node, epsilon = _behind_casts(node), float(value)
    if not _calls(node, *_MIL_OPS):
        return None
    arguments = arguments_of(node)
    x, target = arguments["self"], target_name(node.target)
    correction = arguments["correction"] if target == _VARIANCE else None
    if correction is None:
        if not _is_square(x):
            return None
        x = x.args[0]
    return _Squares(
        node,
        x,
        dims=list(arguments["dim"] or range(value_of(x).dim())),
        keeps=arguments["keepdim"],
        is_sum=target == _SUM,
        correction=correction,
        epsilon=epsilon,
    )


def _is_square(node: Any) -> bool:
    return (
        _calls(node, "aten.square.default")
        or (_calls(node, _POWER) and node.args[1] == 2)
        or (_calls(node, "aten.mul.Tensor") and node.args[0] is node.args[1])
    )


def _behind_casts(node: Any) -> Any:
    """Return what is cast, from floats to floats; sums end in a cast."""
    while _calls(node, CAST) and value_of(node.args[0]).dtype.is_floating_point:
        node = node.args[0]
    return node


def _calls(node: Any, *targets: str) -> bool:
    return isinstance(node, Node) and target_name(node.target) in targets


def _scale(node: Node, squares: _Squares, *, is_inverse: bool) -> None:
    """Compute a root of squares by those of what was scaled down."""
    dims = squares.dims
    if squares.correction is None:
        x, same = squares.x, _repetitions(squares.x)
    else:
        same = _distances(squares.x, dims)
        x = next((distance for distance in same if distance < node), None)
        if x is None:
            mean = insert(node, ATEN.mean.dim, squares.x, dims, True)
            x = insert(node, ATEN.sub.Tensor, squares.x, mean)
    scaled = scale_down(node, x, dims, squares.epsilon)
    total = scaled.with_epsilon(node, _reduce(node, squares, scaled.x))
    readers = [r for r in node.users if squares.keeps and _divides(r, same, by_inverse=is_inverse)]
    if readers:
        inverse = insert(node, ATEN.rsqrt.default, total)
        for reader in readers:
            become(reader, ATEN.mul.Tensor, scaled.x, inverse)
    if not node.users:
        return
    if is_inverse:
        root = insert(node, ATEN.rsqrt.default, total)
        unscaled = ATEN.div.Tensor, root, scaled.scale
    else:
        root = insert(node, ATEN.sqrt.default, total)
        unscaled = ATEN.mul.Tensor, root, scaled.scale
    if squares.keeps:
        become(node, *unscaled)
    else:
        become(node, ATEN.squeeze_copy.dims, insert(node, *unscaled), dims)


def _distances(x: Node, dims: list[int]) -> list[Node]:
    """Return the calls that subtract from a tensor its mean along dimensions, in their order."""
    rank = value_of(x).dim()

    def is_mean(node: Any) -> bool:
        if not _calls(node, _MEAN):
            return False
        of = arguments_of(node)
        along = {dim % rank for dim in of["dim"] or range(rank)}
        return of["self"] is x and of["keepdim"] and along == {dim % rank for dim in dims}

    return [
        user
        for user in sorted(x.users)
        if _calls(user, "aten.sub.Tensor") and user.args[0] is x and is_mean(user.args[1])
    ]


def _repetitions(x: Node) -> set[Node]:
    """Return a node, and the calls that compute the same."""
    others = (user for source in x.all_input_nodes[:1] for user in source.users)
    return {x, *(o for o in others if (o.target, o.args, o.kwargs) == (x.target, x.args, x.kwargs))}


def _reduce(node: Node, squares: _Squares, x: Node) -> Node:
    """Repeat the computation of ``squares`` for what was scaled, and keep the dimensions."""
    dims, correction = squares.dims, squares.correction
    count = math.prod(shape_of(x)[dim] for dim in dims)
    if correction and not isinstance(count, int):
        return insert(node, ATEN.var.correction, x, dims, correction=correction, keepdim=True)
    reduction = ATEN.sum.dim_IntList if squares.is_sum else ATEN.mean.dim
    total = insert(node, reduction, insert(node, ATEN.mul.Tensor, x, x), dims, True)
    return (
        insert(node, ATEN.mul.Scalar, total, count / (count - correction)) if correction else total
    )


def _divides(reader: Node, numerators: Collection[Node], *, by_inverse: bool) -> bool:
    """Return whether a reader of a root divides one of ``numerators`` by it."""
    if by_inverse:
        factors = reader.args if _calls(reader, "aten.mul.Tensor") else ()
        return any(factor in numerators for factor in factors)
    return _calls(reader, "aten.div.Tensor") and reader.args[0] in numerators
