"""Fusion: one node per layer (softmax, layer norm, GELU, attention, LSTM).

Frameworks decompose layers; Core ML runs a layer faster as one op. The fused node computes the same
function, except for rounding. coremltools recognizes few of these patterns, and itself turns sums
into means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """Return the nodes that compute values of a scope, in order, with layers fused."""
    nodes = [_fuse(node) for node in needed_nodes(scope, results)]
    live_values = set(results)
    live_nodes: list[Node] = []
    for node in reversed(nodes):
        if live_values.isdisjoint(node.results):
            continue
        live_nodes.append(node)
        live_values.update(node.operands)
        for closure in node.closures.values():
            live_values.update(_used_values(closure))
    return live_nodes[::-1]


def _used_values(closure: Closure) -> Iterator[Value]:
    """Yield the values that a closure uses, also values of the scopes around it."""
    yield from closure.results
    for node in needed_nodes(closure.scope, closure.results):
        yield from node.operands
        for inner in node.closures.values():
            yield from _used_values(inner)


def _fuse(node: Node) -> Node:
    """Return the fused node of the layer whose result ``node`` computes, else ``node``."""
    for match in _PATTERNS.get(node.name, ()):
        pattern = match(node)
        if pattern is not None:
            record = pattern.record or OPERATIONS[pattern.name]
            fused = Node(record, pattern.operands, pattern.attributes, {}, node.scope)
            fused.results, fused.source = node.results, node.source
            return fused
    return node


def _softmax(node: Node) -> Pattern | None:
    softmax = softmax_of(node)
    if softmax is None:
        return None
    x, axis = softmax
    return Pattern("softmax", (x,), {"axis": axis})


def _silu(node: Node) -> Pattern | None:
    """Match ``x * logistic(x)``."""
    for x, gate in _both_orders(node):
        inner: Node | Pattern = gate.node
        if gate.node.name == "divide" and gate.node.scope is node.scope:
            logistic = logistic_of(gate.node)
            inner = gate.node if logistic is None else logistic
        if inner.name == "logistic" and gate.node.scope is node.scope and inner.operands == (x,):
            return Pattern("silu", (x,), {})
    return None


def _gelu(node: Node) -> Pattern | None:
    """Match ``x / 2 * (1 + erf(x / sqrt(2)))``, ``x / 2 * erfc(-x / sqrt(2))``, or by tanh."""
    constant, product = factors(node.results[0], node.scope)
    if len(product) != 2 or not _is_close(constant, 0.5, node.results[0]):
        return None
    for x, factor in (product, product[::-1]):
        approximate = None if x.type != node.type else _gelu_kind(x, factor, node.scope)
        if approximate is not None:
            return Pattern("gelu", (x,), {"approximate": approximate})
    return None


def _gelu_kind(x: Value, factor: Value, scope: Scope) -> str | None:
    if factor.node.scope is not scope:
        return None
    if factor.node.name == "erfc":
        return "none" if _is_multiple(factor.node.operands[0], -_SQRT_HALF, x, scope) else None
    function = other_than(factor, 1, "add", scope)
    if function is None or function.node.scope is not scope:
        return None
    (argument, *_) = function.node.operands or (None,)
    if argument is None:
        return None
    if function.node.name == "erf":
        return "none" if _is_multiple(argument, _SQRT_HALF, x, scope) else None
    is_tanh = function.node.name == "tanh" and _is_gelu_polynomial(argument, x, scope)
    return "tanh" if is_tanh else None


def _is_multiple(value: Value, multiple: float, x: Value, scope: Scope) -> bool:
    constant, product = factors(value, scope)
    return len(product) == 1 and product[0] is x and _is_close(constant, multiple, x)


def _is_gelu_polynomial(value: Value, x: Value, scope: Scope) -> bool:
    """Whether a value is ``sqrt(2 / pi) * (x + 0.044715 * x ** 3)``."""
    constant, product = factors(value, scope)
    if not _is_close(constant, _GELU_FACTOR, x) or len(product) not in (1, 2):
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
    if not _is_close(constant, _GELU_CUBIC, x):
        return False
    if len(product) == 1 and product[0].node.name == "power":
        base, power = product[0].node.operands
        return base is x and is_number(power, exponent)
    return len(product) == exponent and all(v is x for v in product)


def _is_close(actual: float, expected: float, x: Value) -> bool:
    return math.isclose(actual, expected, rel_tol=2e-3 if x.dtype.storage_dtype == "fp16" else 1e-5)


def _both_orders(node: Node) -> Iterator[tuple[Value, Value]]:
    one, other = node.operands
    if one.type == other.type:
        yield one, other
        yield other, one


def _layer_norm(node: Node) -> Pattern | None:
    norm = layer_norm_of(node)
    return None if norm is None else norm.pattern()


_PATTERNS: Mapping[str, Sequence[Callable[[Node], Pattern | None]]] = {
    "add": (_layer_norm,),
    "divide": (_softmax, logistic_of, _layer_norm),
    "dot_general": (attention_of,),
    "multiply": (_gelu, _silu, _layer_norm),
    "while": (lstm_of,),
}
"""Patterns by the name of the node that computes the layer's result."""
