"""The compositions of softmax and layer norm that frameworks write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coreml_delegate.graph.compose import MOST_AXES
from coreml_delegate.graph.node import Node, OperationRecord, Scope, Value
from coreml_delegate.graph.views import Place, alike, factors, is_number, number, truth


@dataclass(frozen=True, slots=True)
class Pattern:
    """The node that replaces a group of nodes.

    Attributes:
        name: Of the operation.
        operands: Its operands.
        attributes: Its attributes.
        record: The operation, if the builder has none of this name.
    """

    name: str
    operands: tuple[Value, ...]
    attributes: Mapping[str, Any]
    record: OperationRecord | None = None


def softmax_of(node: Node) -> tuple[Value, int] | None:
    """Return operand and axis of the softmax that a node computes, or None.

    It is ``exp(x - max(x))``, divided by its sum.
    """
    if node.name != "divide":
        return None
    power, total = node.operands
    if power.node.name != "exponential" or power.node.scope is not node.scope:
        return None
    summed = Place.of(total, node.scope).stripped()
    axis = _reduced_axis(summed, "reduce_sum", Place.of(power, node.scope))
    if axis is None:
        return None
    (shifted,) = power.node.operands
    if shifted.node.name != "subtract" or shifted.node.scope is not node.scope:
        return None
    x, largest = shifted.node.operands
    if x.type != node.type:
        return None
    place = Place.of(largest, node.scope).stripped()
    while place.name == "maximum":  # with -inf, where the reduction starts
        one, other = place.value.node.operands
        if is_number(one, -math.inf):
            place = place.at(other).stripped()
        elif is_number(other, -math.inf):
            place = place.at(one).stripped()
        else:
            return None
    return (
        (x, axis) if _reduced_axis(place, "reduce_max", Place.of(x, node.scope)) == axis else None
    )


def logistic_of(node: Node) -> Pattern | None:
    """``1 / (1 + exp(-x))``."""
    numerator, denominator = node.operands
    if not is_number(numerator, 1) or numerator.rank > node.type.rank:
        return None
    power = other_than(denominator, 1, "add", node.scope)
    if power is None or power.node.name != "exponential" or power.node.scope is not node.scope:
        return None
    (negated,) = power.node.operands
    if negated.node.name != "negate" or negated.node.scope is not node.scope:
        return None
    (x,) = negated.node.operands
    return Pattern("logistic", (x,), {}) if x.type == node.type else None


def other_than(value: Value, constant: float, name: str, scope: Scope) -> Value | None:
    """Return the operand beside a constant in a node of this name, or None."""
    if value.node.name != name or value.node.scope is not scope:
        return None
    one, other = value.node.operands
    if is_number(one, constant) and other.type == value.type:
        return other
    return one if is_number(other, constant) and one.type == value.type else None


def _reduced_axis(reduction: Place, name: str, whole: Place) -> int | None:
    """Return the only axis of the outer tensor that is reduced, if this is a reduction of it."""
    inner = reduction.unreduced()
    if inner is None or reduction.name != name or len(inner.axes) != len(whole.axes):
        return None
    node = reduction.value.node
    if len(node["dimensions"]) != 1 or not inner.is_reduction_of(whole, node["dimensions"]):
        return None
    shape = whole.value.shape
    reduced = [n for n, axis in enumerate(inner.axes) if axis is None and shape[n] != 1]
    return reduced[0] if len(reduced) == 1 else None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm that nodes compute.

    Attributes:
        x: The tensor.
        axes: Over which it is normalized.
        epsilon: Added to the variance.
        scale: Of the sizes of the axes, or None.
        offset: The same.
    """

    x: Value
    axes: tuple[int, ...]
    epsilon: float
    scale: Value | None = None
    offset: Value | None = None

    def pattern(self) -> Pattern:
        """Return the node to put in the place of the others."""
        named = {"scale": self.scale, "offset": self.offset}
        given = {name: value for name, value in named.items() if value is not None}
        return Pattern(
            "layer_norm",
            (self.x, *given.values()),
            {"axes": self.axes, "parameters": tuple(given), "epsilon": self.epsilon},
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
        found = None if norm is None else _parameter(offset, norm.axes, node.scope)
        if norm is not None and found is not None:
            return LayerNorm(norm.x, norm.axes, norm.epsilon, norm.scale, found)
    return None


def _scaled_norm(value: Value, scope: Scope) -> LayerNorm | None:
    constant, product = factors(value, scope)
    if constant != 1.0 or not 1 <= len(product) <= 3:
        return None
    for n, one in enumerate(product):
        rest = product[:n] + product[n + 1 :]
        norm = _quotient(one, scope) if one.type == value.type else None
        if norm is None and one.node.name == "subtract" and one.type == value.type:
            norm, rest = _reciprocal(one, rest, scope)
        if norm is not None and len(rest) <= 1:
            scale = _parameter(rest[0], norm.axes, scope) if rest else None
            if scale is not None or not rest:
                return LayerNorm(norm.x, norm.axes, norm.epsilon, scale)
    return None


def _reciprocal(
    centered: Value, product: list[Value], scope: Scope
) -> tuple[LayerNorm | None, list[Value]]:
    """``(x - mean) * rsqrt(variance + epsilon)``: the norm, and the factors that are left."""
    for n, deviation in enumerate(product):
        norm = _norm(centered, deviation, scope)
        if norm is not None:
            return norm, product[:n] + product[n + 1 :]
    return None, product


def _quotient(value: Value, scope: Scope) -> LayerNorm | None:
    """``(x - mean) / sqrt(variance + epsilon)``."""
    if value.node.name != "divide" or value.node.scope is not scope:
        return None
    centered, deviation = value.node.operands
    return _norm(centered, deviation, scope, "sqrt") if centered.type == value.type else None


def _norm(centered: Value, deviation: Value, scope: Scope, root: str = "rsqrt") -> LayerNorm | None:
    if centered.node.name != "subtract" or centered.node.scope is not scope:
        return None
    x, mean = centered.node.operands
    whole = Place.of(x, scope)
    axes = _mean_axes(Place.of(mean, scope), whole)
    if x.type != centered.type or not axes or not deviation.rank == x.rank <= MOST_AXES:
        return None
    place = Place.of(deviation, scope).stripped()
    if place.name != root:
        return None
    place = place.at(place.value.node.operands[0]).stripped()
    if place.name != "add":
        return None
    for variance, constant in (place.value.node.operands, place.value.node.operands[::-1]):
        epsilon = number(constant)
        if epsilon is not None and epsilon > 0:
            is_variance = _is_variance(place.at(variance).stripped(), centered, whole, axes)
            return LayerNorm(x, axes, epsilon) if is_variance else None
    return None


def _is_variance(place: Place, centered: Value, whole: Place, axes: tuple[int, ...]) -> bool:
    if place.name == "select":  # jax.numpy has NaN for the variance of too few
        predicate, on_true, on_false = place.value.node.operands
        holds = truth(predicate)
        if holds is None:
            return False
        chosen = place.at(on_true if holds else on_false).stripped()
        return _is_variance(chosen, centered, whole, axes)
    if _mean_axes(place, Place.of(centered, whole.scope), squared=True) == axes:
        return True
    if place.name == "maximum":  # with 0, below which rounding may take it
        one, other = place.value.node.operands
        if is_number(one, 0):
            place = place.at(other).stripped()
        elif is_number(other, 0):
            place = place.at(one).stripped()
    if place.name != "subtract":
        return False
    squares, square = (place.at(operand) for operand in place.value.node.operands)
    mean = _root_of_square(square.stripped())
    return (
        _mean_axes(squares, whole, squared=True) == axes
        and mean is not None
        and _mean_axes(mean, whole) == axes
    )


def _mean_axes(place: Place, whole: Place, *, squared: bool = False) -> tuple[int, ...] | None:
    """Return the axes over which a place is the mean of ``whole``, or of its square, or None."""
    place, scale = place.stripped(), 1.0
    while place.name in ("divide", "multiply"):
        one, other = place.value.node.operands
        constant = number(other)
        if constant is None and place.name == "multiply":
            one, constant = other, number(one)
        if not constant:
            break
        scale = scale / constant if place.name == "divide" else scale * constant
        place = place.at(one).stripped()
    inner = place.unreduced()
    if inner is None or place.name != "reduce_sum":
        return None
    dimensions = tuple(place.value.node["dimensions"])
    sizes = [inner.value.shape[axis] for axis in dimensions]
    count = math.prod(size for size in sizes if isinstance(size, int))
    is_mean = all(isinstance(size, int) for size in sizes)
    if not is_mean or not math.isclose(scale * count, 1, rel_tol=1e-3 if _is_half(whole) else 1e-6):
        return None
    if squared:
        root = _root_of_square(inner)
        if root is None:
            return None
        inner = root
    if len(inner.axes) != len(whole.axes) or not inner.is_reduction_of(whole, dimensions):
        return None
    shape = whole.value.shape
    return tuple(n for n, axis in enumerate(inner.axes) if axis is None and shape[n] != 1)


def _is_half(place: Place) -> bool:
    return place.value.dtype.storage_dtype == "fp16"


def _root_of_square(place: Place) -> Place | None:
    """Return the place of the value whose square this is, or None."""
    node = place.node
    if node is None:
        return None
    if node.name == "square":
        return place.at(node.operands[0])
    if node.name == "multiply" and alike(node.operands[0], node.operands[1]):
        return place.at(node.operands[0])
    if node.name == "power" and is_number(node.operands[1], 2):
        return place.at(node.operands[0])
    return None


def _parameter(value: Value, axes: tuple[int, ...], scope: Scope) -> Value | None:
    """Return the value of the sizes of the axes that is repeated along all others."""
    place = Place.of(value, scope).stripped()
    inner = tuple(place.axes[axis] for axis in axes if axis < len(place.axes))
    others = [axis for n, axis in enumerate(place.axes) if n not in axes]
    fits = inner == tuple(range(place.value.rank)) and all(axis is None for axis in others)
    return place.value if fits and len(inner) == len(axes) else None
