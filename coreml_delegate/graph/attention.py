"""Attention as frameworks write it: a product, a softmax and a second product, in any layout.

Queries, keys and values are rearranged to [*batch, positions, size]. Query positions and the heads
that share keys are one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coreml_delegate.graph.compose import MOST_AXES, Composer, Var
from coreml_delegate.graph.node import Node, OperationRecord, Scope, Value
from coreml_delegate.graph.operations.fused import attention, hide
from coreml_delegate.graph.patterns import Pattern, softmax_of
from coreml_delegate.graph.tensor_types import FLOATS
from coreml_delegate.graph.views import View, number, scaled_operand
from coreml_delegate.mil.compose import mb

# The highest score of a hidden position: added to another score, it has to outweigh that score.
_MOST_HIDDEN = -1e30
_MAX_BATCH = 2


def _compose(c: Composer, node: Node, query: Var, key: Var, value: Var, *masks: Var) -> Var:
    query, key, value = (
        _rearrange(c, var, order, shape)
        for var, (order, shape) in zip((query, key, value), node["layouts"], strict=True)
    )
    mask = _compose_mask(c, node, masks)
    mask_operands = [] if mask is None else [mask]
    y = attention(c, node.type.dtype, query, key, value, mask_operands, node["scale"])
    order, shape = node["result_layout"]
    y = c.reshape(y, shape)
    y = mb.transpose(x=y, perm=order) if list(order) != sorted(order) else y
    return c.reshape(y, node.type.static_shape)


def _compose_mask(c: Composer, node: Node, masks: Sequence[Var]) -> Var | None:
    by_kind = {
        kind: _rearrange(c, var, order, shape, repeats)
        for (kind, order, shape, repeats), var in zip(node["masks"], masks, strict=True)
    }
    flag, added = by_kind.get("flag"), by_kind.get("added")
    if flag is None or (added is None and node["hidden"] == -math.inf):
        return added if flag is None else flag
    return hide(node.type.dtype, flag, added, node["hidden"])


def _rearrange(
    c: Composer,
    var: Var,
    order: Sequence[int],
    shape: Sequence[int],
    repeats: Sequence[tuple[int, int]] | None = None,
) -> Var:
    """Return a tensor transposed, repeated and reshaped.

    ``repeats`` has the size before and after for each axis; None leaves the tensor unrepeated.
    """
    if list(order) != sorted(order):
        var = mb.transpose(x=var, perm=list(order))
    if repeats is not None:
        sizes = [size for size, _ in repeats]
        var = c.broadcast(c.reshape(var, sizes), [size for _, size in repeats])
    return c.reshape(var, tuple(shape))


_RECORD = OperationRecord("attention", FLOATS, _compose, "Attention of tensors in any layout.")


@dataclass(slots=True)
class _Scores:
    """The operand of a softmax: scaled, masked scores.

    Attributes:
        product: View of the product of queries and keys.
        scale: Factor of the product.
        added: View of the tensor added to the product, or None.
        flag: View of a bool that is true where a score is visible, or None.
        hidden: The score where ``flag`` is false.
    """

    product: View
    scale: float = 1.0
    added: View | None = None
    flag: View | None = None
    hidden: float = field(default=-math.inf)


def attention_of(node: Node) -> Pattern | None:
    """Return the attention that a product of weights and values computes, or None."""
    for side in (0, 1):
        pattern = _Match(node, side).pattern()
        if pattern is not None:
            return pattern
    return None


class _Match:
    """An attempt to match a product ``weights @ values`` as attention.

    Args:
        node: The product.
        side: Index of the operand that has the weights.
    """

    def __init__(self, node: Node, side: int) -> None:
        self.node = node
        self.scope = node.scope
        self.weights, self.values = node.operands[side], node.operands[1 - side]
        self.weights_are_first = side == 0
        batching, contracting = node["batching"], node["contracting"]
        self.batch = tuple(zip(batching[side], batching[1 - side], strict=True))
        self.contracted = tuple(zip(contracting[side], contracting[1 - side], strict=True))

    def pattern(self) -> Pattern | None:
        """Return the attention, or None."""
        types = [self.node.type, *self.node.types]
        is_plain = all(
            t.is_static and not t.is_empty and t.dtype is types[0].dtype and t.rank <= MOST_AXES
            for t in types
        )
        if not is_plain or len(self.contracted) != 1 or not types[0].dtype.is_float:
            return None
        weights = View.of(self.weights, self.scope).origin()
        softmax = softmax_of(weights.value.node) if weights.node is not None else None
        if softmax is None or weights.axes[self.contracted[0][0]] != softmax[1]:
            return None
        scores = _scores(weights.operand(softmax[0]))
        return None if scores is None else self._arrange(scores)

    def _arrange(self, scores: _Scores) -> Pattern | None:
        view = scores.product
        product = view.value.node
        types = (product.type, *product.types)
        if any(t.dtype is not self.node.type.dtype or t.rank > MOST_AXES for t in types):
            return None
        keys_axis = view.axes[self.contracted[0][0]]
        if keys_axis is None:
            return None
        origin = _Product(product)
        if keys_axis not in origin.free_axes(1):
            origin = origin.flipped()
        roles = self._roles(view, origin)
        if roles is None or keys_axis not in origin.free_axes(1):
            return None
        batch_axes, positions = roles
        sizes = self.weights.type.static_shape
        groups = [sizes[n] for n, _ in batch_axes]
        if len(groups) > _MAX_BATCH or not groups:
            groups = [math.prod(groups)]
        result_axes = [_require_axis(view.axes[n]) for n, _ in batch_axes]
        query, factor = _split_factor(origin.operands[0], self.scope)
        values_free = [
            n
            for n, size in enumerate(self.values.type.static_shape)
            if size != 1 and n not in {pair[1] for pair in (*self.batch, *self.contracted)}
        ]
        query_axes = [origin.axis(0, axis) for axis in result_axes]
        query_axes += [origin.axis(0, _require_axis(view.axes[n])) for n in positions]
        key_axes = [origin.axis(1, axis) for axis in result_axes] + [origin.axis(1, keys_axis)]
        value_axes = [m for _, m in batch_axes] + [self.contracted[0][1]] + values_free
        length, count = math.prod(sizes[n] for n in positions), sizes[self.contracted[0][0]]
        width = math.prod(query.type.static_shape[n] for n in origin.contracting[0])
        result_width = math.prod(self.values.type.static_shape[n] for n in values_free)
        masks = self._masks(scores, [n for n, _ in batch_axes], positions, groups)
        if masks is None or len(batch_axes) + len(positions) + len(values_free) > MOST_AXES:
            return None
        layouts = (
            (_permutation(query, [*query_axes, *origin.contracting[0]]), (*groups, length, width)),
            (
                _permutation(origin.operands[1], [*key_axes, *origin.contracting[1]]),
                (*groups, count, width),
            ),
            (_permutation(self.values, value_axes), (*groups, count, result_width)),
        )
        attributes: dict[str, Any] = {
            "layouts": layouts,
            "masks": tuple(mask for mask, _ in masks),
            "scale": scores.scale * factor,
            "hidden": scores.hidden,
            "result_layout": self._result_layout(batch_axes, positions, values_free),
        }
        operands = (query, origin.operands[1], self.values, *(value for _, value in masks))
        return Pattern("attention", operands, attributes, _RECORD)

    def _roles(
        self, view: View, origin: _Product
    ) -> tuple[list[tuple[int, int]], list[int]] | None:
        """Return pairs of batch dimensions (weights, values), and the weights' position dimensions.

        Dimensions of size 1 have no role.
        """
        sizes = self.weights.type.static_shape
        batch = [(n, m) for n, m in self.batch if sizes[n] != 1]
        named = {n for n, _ in (*self.batch, *self.contracted)}
        positions = [n for n in range(len(sizes)) if n not in named and sizes[n] != 1]
        fits = all(view.axes[n] in origin.batch_axes for n, _ in batch)
        fits = fits and all(view.axes[n] in origin.free_axes(0) for n in positions)
        product_sizes = view.value.type.static_shape
        covered_axes = {axis for axis in view.axes if axis is not None and product_sizes[axis] != 1}
        fits = fits and covered_axes == {
            axis for axis, size in enumerate(product_sizes) if size != 1
        }
        return (batch, positions) if fits else None

    def _masks(
        self, scores: _Scores, batch: Sequence[int], positions: Sequence[int], groups: Sequence[int]
    ) -> list[tuple[Any, Value]] | None:
        """Return (kind, permutation, shape, repeats) of each mask, with its value."""
        masks: list[tuple[Any, Value]] = []
        for kind, view in (("flag", scores.flag), ("added", scores.added)):
            if view is None:
                continue
            origin = view.origin()
            if not origin.value.type.is_static or origin.value.rank > MOST_AXES:
                return None
            layout = self._mask_layout(origin, batch, positions, groups)
            masks.append(((kind, *layout), origin.value))
        return masks

    def _mask_layout(
        self, view: View, batch: Sequence[int], positions: Sequence[int], groups: Sequence[int]
    ) -> tuple[Any, Any, Any]:
        """Return permutation, shape, and the repeats of ``_rearrange``."""
        weights, view_sizes = self.weights.type.static_shape, view.value.type.static_shape
        dimensions = [*batch, *positions, self.contracted[0][0]]
        axes = [view.axes[n] for n in dimensions]
        order = _permutation(view.value, [axis for axis in axes if axis is not None])
        before = [1 if axis is None else view_sizes[axis] for axis in axes]
        full = [weights[n] for n in dimensions]
        split = len(batch)
        parts = [(before[:split], full[:split]), (before[split:-1], full[split:-1])]
        after: list[int] = []
        for group_before, group_full in parts:
            is_partial = 1 < math.prod(group_before) < math.prod(group_full)
            after += group_full if is_partial else group_before
        after.append(before[-1])
        leading = after[:split] if len(groups) == split else [math.prod(after[:split])]
        shape = (*leading, math.prod(after[split:-1]), after[-1])
        return order, shape, tuple(zip(before, after, strict=True)) if after != before else None

    def _result_layout(
        self, batch: Sequence[tuple[int, int]], positions: Sequence[int], width: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return permutation and shape that take the attention's result to the product's layout."""
        sizes, values = self.weights.type.static_shape, self.values.type.static_shape
        shape = [*(sizes[n] for n, _ in batch), *(sizes[n] for n in positions)]
        shape += [values[n] for n in width]
        first, second, last = len(batch), len(batch) + len(positions), len(shape)
        order = list(range(last))
        if not self.weights_are_first:
            order = [*range(first), *range(second, last), *range(first, second)]
        return order, tuple(shape)


class _Product:
    """A product of queries and keys, by the dimensions of its result.

    Args:
        node: The product.
        first: Index of the operand that has the queries.
    """

    def __init__(self, node: Node, first: int = 0) -> None:
        self.node = node
        self.first = first
        sides = (first, 1 - first)
        self.operands = tuple(node.operands[side] for side in sides)
        self.batching = tuple(tuple(node["batching"][side]) for side in sides)
        self.contracting = tuple(tuple(node["contracting"][side]) for side in sides)
        self.batch_axes = range(len(self.batching[0]))

    def flipped(self) -> _Product:
        """Return the product with the other operand as queries."""
        return _Product(self.node, 1 - self.first)

    def free_axes(self, operand: int) -> range:
        """Return the dimensions of the result that come from this operand only."""
        counts = [len(self._free_of(n)) for n in (0, 1)]
        if self.first:
            counts = counts[::-1]
        start = len(self.batch_axes)
        is_second = operand != self.first
        start += counts[0] if is_second else 0
        return range(start, start + counts[is_second])

    def axis(self, operand: int, axis: int) -> int:
        """Return the dimension of an operand that a dimension of the result comes from."""
        if axis in self.batch_axes:
            return self.batching[operand][axis]
        return self._free_of(operand)[axis - self.free_axes(operand).start]

    def _free_of(self, operand: int) -> list[int]:
        named = {*self.batching[operand], *self.contracting[operand]}
        return [n for n in range(self.operands[operand].rank) if n not in named]


def _scores(view: View) -> _Scores | None:
    """Return the parts of masked scores: a product, then scale, sum and selection; else None."""
    scores = _Scores(view.origin())
    while scores.product.name != "dot_general":
        view = scores.product
        node = view.node
        if node is None or not view.value.type.is_static:
            return None
        step = {
            "select": _read_selection,
            "add": _read_addition,
            "multiply": _read_scaling,
            "divide": _read_scaling,
        }.get(node.name)
        if step is None or not step(scores, node):
            return None
    return scores


def _read_selection(scores: _Scores, node: Node) -> bool:
    flag, visible, hidden = node.operands
    score = number(hidden)
    if score is None or score > _MOST_HIDDEN:
        return False
    # A sum or factor outside of the selection would change the hidden scores too.
    if not flag.rank or scores.flag is not None or scores.added is not None or scores.scale != 1:
        return False
    scores.flag, scores.hidden = scores.product.operand(flag), score
    scores.product = scores.product.operand(visible).origin()
    return True


def _read_addition(scores: _Scores, node: Node) -> bool:
    if scores.added is not None or scores.scale != 1.0:
        return False
    for score, added in (node.operands, node.operands[::-1]):
        if added.rank and score.type == node.type and _is_product(scores.product.operand(score)):
            scores.added = scores.product.operand(added)
            scores.product = scores.product.operand(score).origin()
            return True
    return False


def _is_product(view: View) -> bool:
    view = view.origin()
    while view.name in ("multiply", "divide"):
        scaled = scaled_operand(view.value.node)
        if scaled is None:
            return False
        view = view.operand(scaled[0]).origin()
    return view.name == "dot_general"


def _read_scaling(scores: _Scores, node: Node) -> bool:
    scaled = scaled_operand(node)
    if scaled is None:
        return False
    scores.scale *= scaled[1]
    scores.product = scores.product.operand(scaled[0]).origin()
    return True


def _split_factor(value: Value, scope: Scope) -> tuple[Value, float]:
    """Return x and k of a value ``x * k``; k is 1 for other values."""
    node = value.node
    if node.scope is scope and node.name in ("multiply", "divide"):
        scaled = scaled_operand(node)
        if scaled is not None:
            return scaled
    return value, 1.0


def _permutation(value: Value, axes: Sequence[int]) -> list[int]:
    """Return a permutation: the other dimensions, all of size 1, then ``axes`` in this order."""
    return [n for n in range(value.rank) if n not in axes] + list(axes)


def _require_axis(axis: int | None) -> int:
    if axis is None:
        raise AssertionError("a dimension with a role is in the product")
    return axis
