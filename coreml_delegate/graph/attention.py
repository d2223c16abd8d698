"""Attention as frameworks write it: a product, a softmax and a product, of tensors in any layout.

Queries, keys and values are rearranged to [batch ..., positions, size], with all positions and
heads that share keys in one dimension.
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
from coreml_delegate.graph.views import Place, number

# What is added instead of put in place of a score has to leave nothing of it.
_HIDING = -1e30
_MAX_BATCH = 2


def _compose(c: Composer, node: Node, query: Var, key: Var, value: Var, *masks: Var) -> Var:
    query, key, value = (
        _arranged(c, var, order, shape)
        for var, (order, shape) in zip((query, key, value), node["layouts"], strict=True)
    )
    mask = _compose_mask(c, node, masks)
    given = [] if mask is None else [mask]
    y = attention(c, node.type.dtype, query, key, value, given, node["scale"])
    order, shape = node["result_layout"]
    y = c.reshape(y, shape)
    y = c.mb.transpose(x=y, perm=order) if list(order) != sorted(order) else y
    return c.reshape(y, node.type.static_shape)


def _compose_mask(c: Composer, node: Node, masks: Sequence[Var]) -> Var | None:
    given = {
        kind: _arranged(c, var, order, shape, whole)
        for (kind, order, shape, whole), var in zip(node["masks"], masks, strict=True)
    }
    flag, added = given.get("flag"), given.get("added")
    if flag is None or (added is None and node["hidden"] == -math.inf):
        return added if flag is None else flag
    return hide(c, node.type.dtype, flag, added, node["hidden"])


def _arranged(
    c: Composer,
    var: Var,
    order: Sequence[int],
    shape: Sequence[int],
    whole: Sequence[tuple[int, int]] | None = None,
) -> Var:
    """Return a tensor transposed, repeated to a whole shape if there is one, and reshaped."""
    if list(order) != sorted(order):
        var = c.mb.transpose(x=var, perm=list(order))
    if whole is not None:
        sizes = [size for size, _ in whole]
        var = c.broadcast(c.reshape(var, sizes), [size for _, size in whole])
    return c.reshape(var, tuple(shape))


_RECORD = OperationRecord(
    "attention", FLOATS, _compose, False, "Attention of tensors in any layout."
)


@dataclass(slots=True)
class _Scores:
    """The operand of a softmax: scaled, masked scores.

    Attributes:
        product: Place of the product of queries and keys.
        scale: Its factor.
        added: Place of what is added to it, or None.
        flag: Place of a bool that is true where a score is shown, or None.
        hidden: The score elsewhere.
    """

    product: Place
    scale: float = 1.0
    added: Place | None = None
    flag: Place | None = None
    hidden: float = field(default=-math.inf)


def attention_of(node: Node) -> Pattern | None:
    """Return the attention that a product of weights and values computes, or None."""
    for side in (0, 1):
        found = _Match(node, side).pattern()
        if found is not None:
            return found
    return None


class _Match:
    """An attempt to read a product as one of weights and values.

    Args:
        node: The product.
        side: Which operand has the weights.
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
        place = Place.of(self.weights, self.scope).stripped()
        found = softmax_of(place.value.node) if place.node is not None else None
        if found is None or place.axes[self.contracted[0][0]] != found[1]:
            return None
        scores = _scores(place.at(found[0]))
        return None if scores is None else self._arrange(scores)

    def _arrange(self, scores: _Scores) -> Pattern | None:
        place = scores.product
        product = place.value.node
        types = (product.type, *product.types)
        if any(t.dtype is not self.node.type.dtype or t.rank > MOST_AXES for t in types):
            return None
        keys_axis = place.axes[self.contracted[0][0]]
        if keys_axis is None:
            return None
        origin = _Product(product)
        if keys_axis not in origin.free(1):
            origin = origin.flipped()
        roles = self._roles(place, origin)
        if roles is None or keys_axis not in origin.free(1):
            return None
        batch, positions = roles
        sizes = self.weights.type.static_shape
        groups = [sizes[n] for n, _ in batch]
        if len(groups) > _MAX_BATCH or not groups:
            groups = [math.prod(groups)]
        at = [_known(place.axes[n]) for n, _ in batch]
        query, factor = _unscaled(origin.operands[0], self.scope)
        values_free = [
            n
            for n, size in enumerate(self.values.type.static_shape)
            if size != 1 and n not in {pair[1] for pair in (*self.batch, *self.contracted)}
        ]
        query_axes = [origin.axis(0, axis) for axis in at]
        query_axes += [origin.axis(0, _known(place.axes[n])) for n in positions]
        key_axes = [origin.axis(1, axis) for axis in at] + [origin.axis(1, keys_axis)]
        value_axes = [m for _, m in batch] + [self.contracted[0][1]] + values_free
        length, count = math.prod(sizes[n] for n in positions), sizes[self.contracted[0][0]]
        width = math.prod(query.type.static_shape[n] for n in origin.contracting[0])
        result_width = math.prod(self.values.type.static_shape[n] for n in values_free)
        masks = self._masks(scores, [n for n, _ in batch], positions, groups)
        if masks is None or len(batch) + len(positions) + len(values_free) > MOST_AXES:
            return None
        layouts = (
            (_order(query, [*query_axes, *origin.contracting[0]]), (*groups, length, width)),
            (
                _order(origin.operands[1], [*key_axes, *origin.contracting[1]]),
                (*groups, count, width),
            ),
            (_order(self.values, value_axes), (*groups, count, result_width)),
        )
        attributes: dict[str, Any] = {
            "layouts": layouts,
            "masks": tuple(mask for mask, _ in masks),
            "scale": scores.scale * factor,
            "hidden": scores.hidden,
            "result_layout": self._result_layout(batch, positions, values_free),
        }
        operands = (query, origin.operands[1], self.values, *(value for _, value in masks))
        return Pattern("attention", operands, attributes, _RECORD)

    def _roles(
        self, place: Place, origin: _Product
    ) -> tuple[list[tuple[int, int]], list[int]] | None:
        """Return the batch dimensions of weights and values, and the positions of the weights.

        Dimensions of size 1 have no role.
        """
        sizes = self.weights.type.static_shape
        batch = [(n, m) for n, m in self.batch if sizes[n] != 1]
        named = {n for n, _ in (*self.batch, *self.contracted)}
        positions = [n for n in range(len(sizes)) if n not in named and sizes[n] != 1]
        fits = all(place.axes[n] in origin.batch_axes for n, _ in batch)
        fits = fits and all(place.axes[n] in origin.free(0) for n in positions)
        product = place.value.type.static_shape
        reached = {axis for axis in place.axes if axis is not None and product[axis] != 1}
        fits = fits and reached == {axis for axis, size in enumerate(product) if size != 1}
        return (batch, positions) if fits else None

    def _masks(
        self, scores: _Scores, batch: Sequence[int], positions: Sequence[int], groups: Sequence[int]
    ) -> list[tuple[Any, Value]] | None:
        """Return kind, order, shape and repeated sizes of each mask, with its value."""
        found: list[tuple[Any, Value]] = []
        for kind, place in (("flag", scores.flag), ("added", scores.added)):
            if place is None:
                continue
            inner = place.stripped()
            if not inner.value.type.is_static or inner.value.rank > MOST_AXES:
                return None
            layout = self._mask_layout(inner, batch, positions, groups)
            found.append(((kind, *layout), inner.value))
        return found

    def _mask_layout(
        self, place: Place, batch: Sequence[int], positions: Sequence[int], groups: Sequence[int]
    ) -> tuple[Any, Any, Any]:
        """Return order, shape, and for each dimension (size, size in the scores) or None."""
        weights, own = self.weights.type.static_shape, place.value.type.static_shape
        dimensions = [*batch, *positions, self.contracted[0][0]]
        axes = [place.axes[n] for n in dimensions]
        order = _order(place.value, [axis for axis in axes if axis is not None])
        have = [1 if axis is None else own[axis] for axis in axes]
        want = [weights[n] for n in dimensions]
        split = len(batch)
        parts = [(have[:split], want[:split]), (have[split:-1], want[split:-1])]
        whole: list[int] = []
        for there, all_of_it in parts:
            is_partial = 1 < math.prod(there) < math.prod(all_of_it)
            whole += all_of_it if is_partial else there
        whole.append(have[-1])
        leading = whole[:split] if len(groups) == split else [math.prod(whole[:split])]
        shape = (*leading, math.prod(whole[split:-1]), whole[-1])
        return order, shape, tuple(zip(have, whole, strict=True)) if whole != have else None

    def _result_layout(
        self, batch: Sequence[tuple[int, int]], positions: Sequence[int], width: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return how the result is reshaped and then transposed to that of the product."""
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
        first: Which operand has the queries.
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

    def free(self, operand: int) -> range:
        """Return the dimensions of the result that come from an operand alone."""
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
        return self._free_of(operand)[axis - self.free(operand).start]

    def _free_of(self, operand: int) -> list[int]:
        named = {*self.batching[operand], *self.contracting[operand]}
        return [n for n in range(self.operands[operand].rank) if n not in named]


def _scores(place: Place) -> _Scores | None:
    """Return what scores consist of, looking through scaling, a sum and a selection."""
    scores = _Scores(place.stripped())
    while scores.product.name != "dot_general":
        place = scores.product
        node = place.node
        if node is None or not place.value.type.is_static:
            return None
        step = {"select": _hide, "add": _add, "multiply": _scale, "divide": _scale}.get(node.name)
        if step is None or not step(scores, node):
            return None
    return scores


def _hide(scores: _Scores, node: Node) -> bool:
    flag, shown, hidden = node.operands
    score = number(hidden)
    if score is None or score > _HIDING:
        return False
    # What is added or scaled after this would change the hidden scores too.
    if not flag.rank or scores.flag is not None or scores.added is not None or scores.scale != 1:
        return False
    scores.flag, scores.hidden = scores.product.at(flag), score
    scores.product = scores.product.at(shown).stripped()
    return True


def _add(scores: _Scores, node: Node) -> bool:
    if scores.added is not None or scores.scale != 1.0:
        return False
    for score, added in (node.operands, node.operands[::-1]):
        if added.rank and score.type == node.type and _is_product(scores.product.at(score)):
            scores.added = scores.product.at(added)
            scores.product = scores.product.at(score).stripped()
            return True
    return False


def _is_product(place: Place) -> bool:
    place = place.stripped()
    while place.name in ("multiply", "divide"):
        scaled = _scaled(place.value.node)
        if scaled is None:
            return False
        place = place.at(scaled[0]).stripped()
    return place.name == "dot_general"


def _scale(scores: _Scores, node: Node) -> bool:
    scaled = _scaled(node)
    if scaled is None:
        return False
    scores.scale *= scaled[1]
    scores.product = scores.product.at(scaled[0]).stripped()
    return True


def _scaled(node: Node) -> tuple[Value, float] | None:
    """Return operand and factor of a product with a number, or a quotient by one."""
    one, other = node.operands
    factor = number(other)
    if factor is None and node.name == "multiply":
        one, factor = other, number(one)
    if not factor or not math.isfinite(factor) or one.type != node.type:
        return None
    return one, (1 / factor if node.name == "divide" else factor)


def _unscaled(value: Value, scope: Scope) -> tuple[Value, float]:
    """Return a value without the number that it is multiplied with, and that number."""
    node = value.node
    if node.scope is scope and node.name in ("multiply", "divide"):
        scaled = _scaled(node)
        if scaled is not None:
            return scaled
    return value, 1.0


def _order(value: Value, axes: Sequence[int]) -> list[int]:
    """Return a permutation with these dimensions in this order, after those of size 1."""
    return [n for n in range(value.rank) if n not in axes] + list(axes)


def _known(axis: int | None) -> int:
    if axis is None:
        raise AssertionError("a dimension with a role is in the product")
    return axis
