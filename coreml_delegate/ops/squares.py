"""Sums of squares that do not overflow fp16: ``sqrt(sum(x**2)) = s * sqrt(sum((x / s)**2))``.

The scale s is the largest magnitude. Unscaled, squares from 256 on overflow (65504 is the maximum).
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


# Tensors with squares of at most 1


@dataclass(frozen=True, slots=True)
class ScaledDown:
    """A tensor divided by its largest magnitudes along some dimensions.

    Attributes:
        x: The quotient.
        scale: The divisor; reduced dimensions have size 1.
        epsilon: ``epsilon / scale**2``, to add to the squares of the quotient; None for epsilon 0.
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
        node: The calls are inserted before it.
        x: A tensor.
        dims: Dimensions that the sum or mean of squares reduces.
        epsilon: Summand to the squares of ``x``, or 0.
    """
    maximum = insert(node, ATEN.amax.default, insert(node, ATEN.abs.default, x), dims, True)
    root = math.sqrt(epsilon)
    # At least the root of epsilon, so that their ratio is at most 1, and not below fp16's normals.
    scale = insert(node, ATEN.clamp.default, maximum, max(root, _SMALLEST))
    scaled = insert(node, ATEN.div.Tensor, x, scale)
    if not epsilon:
        return ScaledDown(scaled, scale, None)
    # (sqrt(eps) / scale) ** 2 is eps / scale ** 2 without its overflow.
    ratio = insert(node, ATEN.div.Tensor, insert(node, ATEN.full_like.default, scale, root), scale)
    return ScaledDown(scaled, scale, insert(node, ATEN.mul.Tensor, ratio, ratio))


# Roots of squares in a model


@dataclass(frozen=True, slots=True)
class RootOfSquares:
    """A root of a mean or sum of squares, or of a variance, as every norm has it.

    Attributes:
        node: The call of the root.
        is_inverse: Whether it is one over the root.
        squares: The call that sums the squares, or computes the variance.
        x: The squared tensor, or the argument of the variance.
        dims: Reduced dimensions.
        keepdim: Whether these dimensions are kept.
        is_sum: Whether the squares are summed, not averaged.
        correction: Of the variance, see ``torch.var``; None without a variance.
        epsilon: Summand to the squares, or 0.
    """

    node: Node
    is_inverse: bool
    squares: Node
    x: Node
    dims: list[int]
    keepdim: bool
    is_sum: bool
    correction: int | None
    epsilon: float

    def scale_down(self) -> None:
        """Divide the squared tensor by its largest magnitudes, and multiply the root by them."""
        node, dims = self.node, self.dims
        x, same = self._squared_calls()
        scaled = scale_down(node, x, dims, self.epsilon)
        total = scaled.with_epsilon(node, self._reduce(scaled.x))
        # (x / scale) / (root / scale): a quotient by the root needs no multiplication by the scale.
        quotients = [user for user in node.users if self.keepdim and self._divides(user, same)]
        if quotients:
            inverse = insert(node, ATEN.rsqrt.default, total)
            for quotient in quotients:
                become(quotient, ATEN.mul.Tensor, scaled.x, inverse)
        if not node.users:
            return
        if self.is_inverse:
            root = ATEN.div.Tensor, insert(node, ATEN.rsqrt.default, total), scaled.scale
        else:
            root = ATEN.mul.Tensor, insert(node, ATEN.sqrt.default, total), scaled.scale
        if self.keepdim:
            become(node, *root)
        else:
            become(node, ATEN.squeeze_copy.dims, insert(node, *root), dims)

    def _squared_calls(self) -> tuple[Node, Collection[Node]]:
        """Return the squared tensor, and all calls that compute an equal tensor."""
        if self.correction is None:
            return self.x, _equal_calls(self.x)
        same = _deviations_from_mean(self.x, self.dims)
        x = next((deviation for deviation in same if deviation < self.node), None)
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

    def _divides(self, user: Node, numerators: Collection[Node]) -> bool:
        """Return whether a user of the root divides one of ``numerators`` by it."""
        if self.is_inverse:
            factors = user.args if _calls(user, "aten.mul.Tensor") else ()
            return any(factor in numerators for factor in factors)
        return _calls(user, "aten.div.Tensor") and user.args[0] in numerators


def root_of_squares(node: Node) -> RootOfSquares | None:
    """Return the root of squares that a call computes, or None."""
    power = _power_of(node)
    if power is None:
        return None
    epsilon = 0.0
    squares = _skip_casts(node.args[0])
    if _calls(squares, "aten.add.Tensor", "aten.add.Scalar") and not squares.kwargs:
        value = stored_value(squares.args[1])
        if value is None or value.numel() != 1 or not value.item() > 0:
            return None
        squares, epsilon = _skip_casts(squares.args[0]), float(value)
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
        keepdim=arguments["keepdim"],
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


def _deviations_from_mean(x: Node, dims: list[int]) -> list[Node]:
    """Return the calls of ``x - mean(x, dims)``, in graph order."""
    rank = value_of(x).dim()

    def is_mean(node: Any) -> bool:
        if not _calls(node, _MEAN):
            return False
        arguments = arguments_of(node)
        mean_dims = {dim % rank for dim in arguments["dim"] or range(rank)}
        return (
            arguments["self"] is x
            and arguments["keepdim"]
            and mean_dims == {dim % rank for dim in dims}
        )

    return [
        user
        for user in sorted(x.users)
        if _calls(user, "aten.sub.Tensor") and user.args[0] is x and is_mean(user.args[1])
    ]


def _equal_calls(x: Node) -> set[Node]:
    """Return a node, and the calls that compute an equal value."""
    readers = (reader for source in x.all_input_nodes[:1] for reader in source.users)
    return {x, *(reader for reader in readers if _computes_same(reader, x, depth=2))}


def _computes_same(a: Any, b: Any, depth: int) -> bool:
    """Return whether arguments are equal, or equal calls of equal arguments, down to ``depth``."""
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return bool(a == b)
    if a is b:
        return True
    if not depth or (a.target, len(a.args), a.kwargs) != (b.target, len(b.args), b.kwargs):
        return False
    if a.op != "call_function" or torch.Tag.nondeterministic_seeded in overload_of(a.target).tags:
        return False  # two draws of random numbers differ
    return all(_computes_same(*pair, depth - 1) for pair in zip(a.args, b.args, strict=True))


def _skip_casts(node: Any) -> Any:
    """Return the operand of casts from floats to floats; sums end in a cast."""
    while _calls(node, CAST) and value_of(node.args[0]).dtype.is_floating_point:
        node = node.args[0]
    return node


def _calls(node: Any, *targets: str) -> bool:
    is_call = isinstance(node, Node) and node.op == "call_function"
    return is_call and target_name(node.target) in targets
