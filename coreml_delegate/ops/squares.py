"""Sums of squares without the squares of large numbers, for fp16 has none from 256 on.

What is squared is divided by its largest magnitude first. The root of the sum is multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import CAST, overload_of, target_name
from coreml_delegate.ops.constants import stored_value
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, shape_of, value_of

_SMALLEST = float(torch.finfo(torch.float16).smallest_normal)
_ROOT, _INVERSE = 0.5, -0.5
_ROOTS = {"aten.sqrt.default": _ROOT, "aten.rsqrt.default": _INVERSE}
_POWER = "aten.pow.Tensor_Scalar"
_MEAN, _SUM, _VARIANCE = "aten.mean.dim", "aten.sum.dim_IntList", "aten.var.correction"


# A tensor whose squares are one or less


@dataclass(frozen=True, slots=True)
class ScaledDown:
    """A tensor divided by its largest magnitudes.

    Attributes:
        x: The quotient.
        scale: What it was divided by, with sizes of one where a magnitude was the largest.
        epsilon: What is added to the squares of the quotient, in place of an epsilon that is added
            to those of the tensor; None without one.
    """

    x: Node
    scale: Node
    epsilon: Node | None

    def with_epsilon(self, node: Node, squares: Node) -> Node:
        """Return a sum or mean of squares, inserted before ``node``, with the epsilon added."""
        if self.epsilon is None:
            return squares
        return insert(node, ATEN.add.Tensor, squares, self.epsilon)


def scale_down(node: Node, x: Node, dims: list[int], epsilon: float) -> ScaledDown:
    """Divide a tensor by its largest magnitude along dimensions.

    Args:
        node: The calls are made before it.
        x: A tensor.
        dims: Dimensions that a sum or mean of squares will be taken of.
        epsilon: What would be added to the squares of ``x``; 0 for nothing.
    """
    largest = insert(node, ATEN.amax.default, insert(node, ATEN.abs.default, x), dims, True)
    root = math.sqrt(epsilon)
    # At least the root of epsilon, so that their ratio is at most one, and nothing fp16 has not.
    scale = insert(node, ATEN.clamp.default, largest, max(root, _SMALLEST))
    scaled = insert(node, ATEN.div.Tensor, x, scale)
    if not epsilon:
        return ScaledDown(scaled, scale, None)
    # (sqrt(eps) / scale) ** 2 is eps / scale ** 2 without its overflow.
    ratio = insert(node, ATEN.div.Tensor, insert(node, ATEN.full_like.default, scale, root), scale)
    return ScaledDown(scaled, scale, insert(node, ATEN.mul.Tensor, ratio, ratio))


# Roots that a model writes out


@dataclass(frozen=True, slots=True)
class RootOfSquares:
    """A root of a mean or sum of squares, or of a variance, of which there is one in every norm.

    Attributes:
        node: The call of the root.
        is_inverse: Whether it is one over the root.
        squares: The call that sums the squares.
        x: What is squared; of a variance, what it is the variance of.
        dims: Dimensions that are summed.
        keeps: Whether these dimensions are kept.
        is_sum: Whether it is a sum, and no mean.
        correction: What a variance subtracts from the number of squares; None of squares of ``x``.
        epsilon: What is added to the squares; 0 for nothing.
    """

    node: Node
    is_inverse: bool
    squares: Node
    x: Node
    dims: list[int]
    keeps: bool
    is_sum: bool
    correction: int | None
    epsilon: float

    def scale_down(self) -> None:
        """Divide what is squared by its largest magnitude, and multiply the root by it."""
        node, dims = self.node, self.dims
        x, same = self._squared()
        scaled = scale_down(node, x, dims, self.epsilon)
        total = scaled.with_epsilon(node, self._reduce(scaled.x))
        # What is divided by the root is divided by the scale as well: neither is needed.
        readers = [r for r in node.users if self.keeps and self._divides(r, same)]
        if readers:
            inverse = insert(node, ATEN.rsqrt.default, total)
            for reader in readers:
                become(reader, ATEN.mul.Tensor, scaled.x, inverse)
        if not node.users:
            return
        if self.is_inverse:
            root = ATEN.div.Tensor, insert(node, ATEN.rsqrt.default, total), scaled.scale
        else:
            root = ATEN.mul.Tensor, insert(node, ATEN.sqrt.default, total), scaled.scale
        if self.keeps:
            become(node, *root)
        else:
            become(node, ATEN.squeeze_copy.dims, insert(node, *root), dims)

    def _squared(self) -> tuple[Node, Collection[Node]]:
        """Return what is squared, and all calls that compute it."""
        if self.correction is None:
            return self.x, _repetitions(self.x)
        same = _distances(self.x, self.dims)
        x = next((distance for distance in same if distance < self.node), None)
        if x is None:
            mean = insert(self.node, ATEN.mean.dim, self.x, self.dims, True)
            x = insert(self.node, ATEN.sub.Tensor, self.x, mean)
        return x, same

    def _reduce(self, x: Node) -> Node:
        """Return the mean or sum of the squares of ``x``; it keeps the dimensions."""
        node, dims, correction = self.node, self.dims, self.correction
        count = math.prod(shape_of(x)[dim] for dim in dims)
        if correction and not isinstance(count, int):
            return insert(node, ATEN.var.correction, x, dims, correction=correction, keepdim=True)
        reduction = ATEN.sum.dim_IntList if self.is_sum else ATEN.mean.dim
        total = insert(node, reduction, insert(node, ATEN.mul.Tensor, x, x), dims, True)
        if not correction:
            return total
        return insert(node, ATEN.mul.Scalar, total, count / (count - correction))

    def _divides(self, reader: Node, numerators: Collection[Node]) -> bool:
        """Return whether a reader of the root divides one of ``numerators`` by it."""
        if self.is_inverse:
            factors = reader.args if _calls(reader, "aten.mul.Tensor") else ()
            return any(factor in numerators for factor in factors)
        return _calls(reader, "aten.div.Tensor") and reader.args[0] in numerators


def root_of_squares(node: Node) -> RootOfSquares | None:
    """Return the root that a call computes; None if it computes none, or that of something else."""
    power = _power_of(node)
    if power is None:
        return None
    epsilon = 0.0
    squares = _behind_casts(node.args[0])
    if _calls(squares, "aten.add.Tensor", "aten.add.Scalar") and not squares.kwargs:
        value = stored_value(squares.args[1])
        if value is None or value.numel() != 1 or not value.item() > 0:
            return None
        squares, epsilon = _behind_casts(squares.args[0]), float(value)
    if not _calls(squares, _MEAN, _SUM, _VARIANCE):
        return None
    arguments = arguments_of(squares)
    x, is_variance = arguments["self"], _calls(squares, _VARIANCE)
    if not is_variance and not _is_square(x):
        return None
    x = x if is_variance else x.args[0]
    return RootOfSquares(
        node,
        is_inverse=power == _INVERSE,
        squares=squares,
        x=x,
        dims=list(arguments["dim"] or range(value_of(x).dim())),
        keeps=arguments["keepdim"],
        is_sum=_calls(squares, _SUM),
        correction=arguments["correction"] if is_variance else None,
        epsilon=epsilon,
    )


def _power_of(node: Node) -> float | None:
    """Return 1/2 for a root, -1/2 for its inverse, and None for other calls."""
    if _calls(node, _POWER):
        value = stored_value(node.args[1])
        power = None if value is None else value.item()
        return power if power in (_ROOT, _INVERSE) else None
    return _ROOTS.get(target_name(node.target)) if node.op == "call_function" else None


def _is_square(node: Any) -> bool:
    return (
        _calls(node, "aten.square.default")
        or (_calls(node, _POWER) and node.args[1] == 2)
        or (_calls(node, "aten.mul.Tensor") and node.args[0] is node.args[1])
    )


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
    readers = (reader for source in x.all_input_nodes[:1] for reader in source.users)
    return {x, *(reader for reader in readers if _computes_same(reader, x, depth=2))}


def _computes_same(a: Any, b: Any, depth: int) -> bool:
    """Return whether two arguments are equal, or calls of equal arguments down to a depth."""
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return bool(a == b)
    if a is b:
        return True
    if not depth or (a.target, len(a.args), a.kwargs) != (b.target, len(b.args), b.kwargs):
        return False
    if a.op != "call_function" or torch.Tag.nondeterministic_seeded in overload_of(a.target).tags:
        return False  # two draws of random numbers differ
    return all(_computes_same(*pair, depth - 1) for pair in zip(a.args, b.args, strict=True))


def _behind_casts(node: Any) -> Any:
    """Return what is cast, from floats to floats; sums end in a cast."""
    while _calls(node, CAST) and value_of(node.args[0]).dtype.is_floating_point:
        node = node.args[0]
    return node


def _calls(node: Any, *targets: str) -> bool:
    is_call = isinstance(node, Node) and node.op == "call_function"
    return is_call and target_name(node.target) in targets
