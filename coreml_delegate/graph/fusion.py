"""Nodes of whole layers instead of the many nodes that compute them.

Frameworks hand a softmax or a layer norm over in pieces. Core ML runs such layers faster as one op.
A pattern is replaced only by what computes the same function, except for rounding. coremltools
itself makes means of sums, and knows few of these patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coreml_delegate.graph.attention import attention_of
from coreml_delegate.graph.emitter import OPERATIONS
from coreml_delegate.graph.node import Closure, Node, Scope, Value, needed_nodes
from coreml_delegate.graph.patterns import (
    Pattern,
    layer_norm_of,
    logistic_of,
    other_than,
    softmax_of,
)
from coreml_delegate.graph.recurrence import lstm_of
from coreml_delegate.graph.views import factors, is_number

_SQRT_HALF = math.sqrt(0.5)
_GELU_FACTOR = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


def fused_nodes(scope: Scope, results: Sequence[Value]) -> list[Node]:
    """Return the nodes to compute values of a scope, in order, with whole layers as one node.

    Args:
        scope: The scope.
        results: The values.
    """
    nodes = [_fused(node) for node in needed_nodes(scope, results)]
    wanted = set(results)
    kept: list[Node] = []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.results):
            continue
        kept.append(node)
        wanted.update(node.operands)
        for closure in node.closures.values():
            wanted.update(_used(closure))
    return kept[::-1]


def _used(closure: Closure) -> Iterator[Value]:
    """Yield the values that a closure uses, those from outside among them."""
    yield from closure.results
    for node in needed_nodes(closure.scope, closure.results):
        yield from node.operands
        for inner in node.closures.values():
            yield from _used(inner)


def _fused(node: Node) -> Node:
    """Return the node of the whole layer whose result a node computes, else the node."""
    for pattern in _PATTERNS.get(node.name, ()):
        found = pattern(node)
        if found is not None:
            record = found.record or OPERATIONS[found.name]
            fused = Node(record, found.operands, found.attributes, {}, node.scope)
            fused.results = node.results
            return fused
    return node


def _softmax(node: Node) -> Pattern | None:
    found = softmax_of(node)
    if found is None:
        return None
    x, axis = found
    return Pattern("softmax", (x,), {"axis": axis})


def _silu(node: Node) -> Pattern | None:
    """``x * logistic(x)``."""
    for x, gate in _both_ways(node):
        inner: Node | Pattern = gate.node
        if gate.node.name == "divide" and gate.node.scope is node.scope:
            found = logistic_of(gate.node)
            inner = gate.node if found is None else found
        if inner.name == "logistic" and gate.node.scope is node.scope and inner.operands == (x,):
            return Pattern("silu", (x,), {})
    return None


def _gelu(node: Node) -> Pattern | None:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, ``x / 2 * erfc(-x / sqrt(2))``, or that by tanh."""
    constant, product = factors(node.results[0], node.scope)
    if len(product) != 2 or not math.isclose(constant, 0.5, rel_tol=1e-3):
        return None
    for x, rest in (product, product[::-1]):
        approximate = None if x.type != node.type else _gelu_kind(x, rest, node.scope)
        if approximate is not None:
            return Pattern("gelu", (x,), {"approximate": approximate})
    return None


def _gelu_kind(x: Value, rest: Value, scope: Scope) -> str | None:
    if rest.node.scope is not scope:
        return None
    if rest.node.name == "erfc":
        return "none" if _is_multiple(rest.node.operands[0], -_SQRT_HALF, x, scope) else None
    function = other_than(rest, 1, "add", scope)
    if function is None or function.node.scope is not scope:
        return None
    (argument, *_) = function.node.operands or (None,)
    if argument is None:
        return None
    if function.node.name == "erf":
        return "none" if _is_multiple(argument, _SQRT_HALF, x, scope) else None
    is_tanh = function.node.name == "tanh" and _is_gelu_polynomial(argument, x, scope)
    return "tanh" if is_tanh else None


def _is_multiple(value: Value, by: float, x: Value, scope: Scope) -> bool:
    constant, product = factors(value, scope)
    return len(product) == 1 and product[0] is x and _close(constant, by, x)


def _is_gelu_polynomial(value: Value, x: Value, scope: Scope) -> bool:
    """Whether a value is ``sqrt(2 / pi) * (x + 0.044715 * x ** 3)``."""
    constant, product = factors(value, scope)
    if not _close(constant, _GELU_FACTOR, x) or len(product) not in (1, 2):
        return False
    total = next((v for v in product if v is not x), None)
    if total is None or total.node.name != "add" or total.node.scope is not scope:
        return False
    if len(product) == 2:  # x * (1 + 0.044715 * x ** 2)
        square = other_than(total, 1, "add", scope)
        is_square = square is not None and _is_power(square, 2, x, scope)
        return is_square and any(v is x for v in product)
    one, other = total.node.operands
    return (one is x and _is_power(other, 3, x, scope)) or (
        other is x and _is_power(one, 3, x, scope)
    )


def _is_power(value: Value, exponent: int, x: Value, scope: Scope) -> bool:
    """Whether a value is ``0.044715 * x ** exponent``."""
    constant, product = factors(value, scope)
    if not _close(constant, _GELU_CUBIC, x):
        return False
    if len(product) == 1 and product[0].node.name == "power":
        base, power = product[0].node.operands
        return base is x and is_number(power, exponent)
    return len(product) == exponent and all(v is x for v in product)


def _close(found: float, expected: float, x: Value) -> bool:
    return math.isclose(found, expected, rel_tol=2e-3 if x.dtype.storage_dtype == "fp16" else 1e-5)


def _both_ways(node: Node) -> Iterator[tuple[Value, Value]]:
    one, other = node.operands
    if one.type == other.type:
        yield one, other
        yield other, one


def _layer_norm(node: Node) -> Pattern | None:
    found = layer_norm_of(node)
    return None if found is None else found.pattern()


_PATTERNS: Mapping[str, Sequence[Callable[[Node], Pattern | None]]] = {
    "add": (_layer_norm,),
    "divide": (_softmax, logistic_of, _layer_norm),
    "dot_general": (attention_of,),
    "multiply": (_gelu, _silu, _layer_norm),
    "while": (lstm_of,),
}
"""By the node that computes the layer's result: functions that return what to put in its place."""

__all__: list[Any] = ["fused_nodes"]
