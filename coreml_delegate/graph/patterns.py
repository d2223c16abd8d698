"""Softmax, logistic function and layer norm as frameworks decompose them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coreml_delegate.graph.compose import MOST_AXES
from coreml_delegate.graph.node import Node, OperationRecord, Scope, Value
from coreml_delegate.graph.views import (
    View,
    alike,
    factors,
    is_number,
    number,
    operands_of,
    scaled_operand,
    truth,
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The node that replaces a group of nodes.

    Attributes:
        name: Name of the operation.
        operands: Operands of the node.
        attributes: Attributes of the node.
        record: The operation's record, if the builder does not have the operation.
    """

    name: str
    operands: tuple[Value, ...]
    attributes: Mapping[str, Any]
    record: OperationRecord | None = None


def softmax_of(node: Node) -> tuple[Value, int] | None:
    """Return x and axis of a softmax, ``e / sum(e)`` with ``e = exp(x - max(x))``, or None."""
    if node.name != "divide":
        return None
    scope = node.scope
    power, total = node.operands
    (shifted,) = operands_of(power, "exponential", scope) or (None,)
    x, largest = operands_of(shifted, "subtract", scope) or (None, None)
    if x is None or largest is None or x.type != node.type:
        return None
    axis = _reduced_axis(View.of(total, scope).origin(), "reduce_sum", View.of(power, scope))
    maximum = View.of(largest, scope).origin()
    while maximum.name == "maximum":  # with -inf, where the reduction starts
        other = other_than(maximum.value, -math.inf, "maximum", scope)
        if other is None:
            return None
        maximum = maximum.operand(other).origin()
    is_softmax = _reduced_axis(maximum, "reduce_max", View.of(x, scope)) == axis
    return (x, axis) if axis is not None and is_softmax else None


def logistic_of(node: Node) -> Pattern | None:
    """Match ``1 / (1 + exp(-x))``."""
    numerator, denominator = node.operands
    if not is_number(numerator, 1) or numerator.rank > node.type.rank:
        return None
    power = other_than(denominator, 1, "add", node.scope)
    (negated,) = operands_of(power, "exponential", node.scope) or (None,)
    (x,) = operands_of(negated, "negate", node.scope) or (None,)
    return Pattern("logistic", (x,), {}) if x is not None and x.type == node.type else None


def other_than(value: Value, constant: float, name: str, scope: Scope) -> Value | None:
    """Return x of ``name(x, constant)`` or ``name(constant, x)``, or None."""
    one, other = operands_of(value, name, scope) or (None, None)
    if one is None or other is None:
        return None
    if is_number(one, constant) and other.type == value.type:
        return other
    return one if is_number(other, constant) and one.type == value.type else None


def _reduced_axis(reduction: View, name: str, outer: View) -> int | None:
    """Return the axis of ``outer`` that ``reduction`` reduces, if it is only one, else None."""
    inner = reduction.reduction_operand()
    if inner is None or reduction.name != name or len(inner.axes) != len(outer.axes):
        return None
    node = reduction.value.node
    if len(node["dimensions"]) != 1 or not inner.is_reduction_of(outer, node["dimensions"]):
        return None
    shape = outer.value.shape
    reduced = [n for n, axis in enumerate(inner.axes) if axis is None and shape[n] != 1]
    return reduced[0] if len(reduced) == 1 else None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm that nodes compute.

    Attributes:
        x: The tensor.
        axes: The axes to normalize over.
        epsilon: Added to the variance.
        scale: Factor, with the sizes of ``axes``, or None.
        offset: Summand, with the sizes of ``axes``, or None.
    """

    x: Value
    axes: tuple[int, ...]
    epsilon: float
    scale: Value | None = None
    offset: Value | None = None

    def pattern(self) -> Pattern:
        """Return the fused node."""
        parameters = {"scale": self.scale, "offset": self.offset}
        present = {name: value for name, value in parameters.items() if value is not None}
        return Pattern(
            "layer_norm",
            (self.x, *present.values()),
            {"axes": self.axes, "parameters": tuple(present), "epsilon": self.epsilon},
        )


def layer_norm_of(node: Node) -> LayerNorm | None:
    """Return the layer norm that a node computes, or None.

    It is ``(x - mean) * rsqrt(variance + epsilon)``, with a scale and an offset or without.
    """
    if node.name != "add":
        return _scaled_norm(node.results[0], node.scope)
    for product, offset in (node.operands, node.operands[::-1]):
        if product.node.scope is not node.scope or product.type != node.type:
            continue
        norm = _scaled_norm(product, node.scope)
        bias = None if norm is None else _parameter(offset, norm.axes, node.scope)
        if norm is not None and bias is not None:
            return LayerNorm(norm.x, norm.axes, norm.epsilon, norm.scale, bias)
    return None


def _scaled_norm(value: Value, scope: Scope) -> LayerNorm | None:
    constant, product = factors(value, scope)
    if constant != 1.0 or not 1 <= len(product) <= 3:
        return None
    for n, factor in enumerate(product):
        remaining = product[:n] + product[n + 1 :]
        norm = _match_quotient(factor, scope) if factor.type == value.type else None
        if norm is None and factor.node.name == "subtract" and factor.type == value.type:
            norm, remaining = _match_reciprocal(factor, remaining, scope)
        if norm is not None and len(remaining) <= 1:
            scale = _parameter(remaining[0], norm.axes, scope) if remaining else None
            if scale is not None or not remaining:
                return LayerNorm(norm.x, norm.axes, norm.epsilon, scale)
    return None


def _match_reciprocal(
    centered: Value, product: list[Value], scope: Scope
) -> tuple[LayerNorm | None, list[Value]]:
    """Match ``(x - mean) * rsqrt(variance + epsilon)``; return it and the remaining factors."""
    for n, deviation in enumerate(product):
        norm = _match_norm(centered, deviation, scope)
        if norm is not None:
            return norm, product[:n] + product[n + 1 :]
    return None, product


def _match_quotient(value: Value, scope: Scope) -> LayerNorm | None:
    """Match ``(x - mean) / sqrt(variance + epsilon)``."""
    centered, deviation = operands_of(value, "divide", scope) or (None, None)
    if centered is None or deviation is None or centered.type != value.type:
        return None
    return _match_norm(centered, deviation, scope, "sqrt")


def _match_norm(
    centered: Value, deviation: Value, scope: Scope, root: str = "rsqrt"
) -> LayerNorm | None:
    x, mean = operands_of(centered, "subtract", scope) or (None, None)
    if x is None or mean is None:
        return None
    x_view = View.of(x, scope)
    axes = _mean_axes(View.of(mean, scope), x_view)
    if x.type != centered.type or not axes or not deviation.rank == x.rank <= MOST_AXES:
        return None
    root_view = View.of(deviation, scope).origin()
    if root_view.name != root:
        return None
    root_view = root_view.operand(root_view.value.node.operands[0]).origin()
    if root_view.name != "add":
        return None
    for variance, constant in (root_view.value.node.operands, root_view.value.node.operands[::-1]):
        epsilon = number(constant)
        if epsilon is not None and epsilon > 0:
            is_variance = _is_variance(root_view.operand(variance).origin(), centered, x_view, axes)
            return LayerNorm(x, axes, epsilon) if is_variance else None
    return None


def _is_variance(view: View, centered: Value, x_view: View, axes: tuple[int, ...]) -> bool:
    if view.name == "select":  # jax.numpy's variance of too few elements is NaN
        predicate, on_true, on_false = view.value.node.operands
        holds = truth(predicate)
        if holds is None:
            return False
        chosen = view.operand(on_true if holds else on_false).origin()
        return _is_variance(chosen, centered, x_view, axes)
    if _mean_axes(view, View.of(centered, x_view.scope), squared=True) == axes:
        return True
    if view.name == "maximum":  # with 0, as rounding may make it negative
        other = other_than(view.value, 0, "maximum", view.scope)
        view = view if other is None else view.operand(other).origin()
    if view.name != "subtract":
        return False
    squares, square = (view.operand(operand) for operand in view.value.node.operands)
    mean = _square_root(square.origin())
    return (
        _mean_axes(squares, x_view, squared=True) == axes
        and mean is not None
        and _mean_axes(mean, x_view) == axes
    )


def _mean_axes(view: View, x_view: View, *, squared: bool = False) -> tuple[int, ...] | None:
    """Return the axes over which a view is the mean of ``x_view``, or of its square, else None."""
    view, scale = view.origin(), 1.0
    while view.name in ("divide", "multiply"):
        scaled = scaled_operand(view.value.node)
        if scaled is None:
            break
        scale *= scaled[1]
        view = view.operand(scaled[0]).origin()
    inner = view.reduction_operand()
    if inner is None or view.name != "reduce_sum":
        return None
    dimensions = tuple(view.value.node["dimensions"])
    sizes = [inner.value.shape[axis] for axis in dimensions]
    count = math.prod(size for size in sizes if isinstance(size, int))
    is_mean = all(isinstance(size, int) for size in sizes)
    if not is_mean or not math.isclose(
        scale * count, 1, rel_tol=1e-3 if _is_half(x_view) else 1e-6
    ):
        return None
    if squared:
        root = _square_root(inner)
        if root is None:
            return None
        inner = root
    if len(inner.axes) != len(x_view.axes) or not inner.is_reduction_of(x_view, dimensions):
        return None
    shape = x_view.value.shape
    return tuple(n for n, axis in enumerate(inner.axes) if axis is None and shape[n] != 1)


def _is_half(view: View) -> bool:
    return view.value.dtype.storage_dtype == "fp16"


def _square_root(view: View) -> View | None:
    """Return the view of x if ``view`` is ``x ** 2``, else None."""
    node = view.node
    is_square = node is not None and (
        (node.name == "multiply" and alike(node.operands[0], node.operands[1]))
        or (node.name == "power" and is_number(node.operands[1], 2))
    )
    return view.operand(node.operands[0]) if node is not None and is_square else None


def _parameter(value: Value, axes: tuple[int, ...], scope: Scope) -> Value | None:
    """Return the tensor over ``axes`` that ``value`` repeats along all other axes, or None."""
    view = View.of(value, scope).origin()
    inner = tuple(view.axes[axis] for axis in axes if axis < len(view.axes))
    other_axes = [axis for n, axis in enumerate(view.axes) if n not in axes]
    fits = inner == tuple(range(view.value.rank)) and all(axis is None for axis in other_axes)
    return view.value if fits and len(inner) == len(axes) else None
