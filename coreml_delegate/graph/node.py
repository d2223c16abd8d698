"""The parts of a graph: values, the nodes that compute them, and closures.

A node is one call of an operation. A closure is a function of values whose nodes are in a scope
of their own, such as the body of a loop; they may use values of the outer scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.tensor_types import Dim, DType, TensorType

Compose = Callable[..., Any]
"""``compose(composer, node, *operands)``: the MIL values of a node's results."""


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """Properties of one operation; its shape rule is the builder's method.

    Attributes:
        name: Name of the builder's method.
        dtypes: Element types that its first operand may have.
        compose: Makes MIL of a node; None for an operation that is made of other operations.
        summary: First line of the method's docstring.
        moves_data: Whether it only moves elements: bool operands are then stored as int32.
        is_elementwise: Whether each element of the result depends on the operands' elements at its
            position only.
    """

    name: str
    dtypes: frozenset[DType]
    compose: Compose | None
    summary: str
    moves_data: bool = False
    is_elementwise: bool = False


class Scope:
    """The nodes of a graph or of a closure, in the order of creation.

    Args:
        outer: The scope around it, or None for a graph's own.
    """

    def __init__(self, outer: Scope | None = None) -> None:
        self.outer = outer
        self.nodes: list[Node] = []

    def sees(self, scope: Scope) -> bool:
        """Whether nodes of this scope may use values of ``scope``."""
        return scope is self or (self.outer is not None and self.outer.sees(scope))


class Value:
    """A tensor in a graph: a parameter, a constant, or a result of a node.

    Args:
        node: The node that computes the value.
        index: Position among the node's results.
        type: Element type and shape.
        elements: The elements, if they are sizes, for shape arithmetic: a flat tuple of numbers and
            expressions; else None.
    """

    __slots__ = ("__weakref__", "elements", "index", "node", "type")

    def __init__(
        self, node: Node, index: int, type: TensorType, elements: tuple[Dim, ...] | None = None
    ) -> None:
        self.node = node
        self.index = index
        self.type = type
        self.elements = elements

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Sizes of the dimensions."""
        return self.type.shape

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.type.rank

    def __repr__(self) -> str:
        return f"<{self.node.name}: {self.type}>"


@dataclass(eq=False, slots=True)
class Node:
    """One call of an operation.

    Attributes:
        record: The operation.
        operands: The values that it uses.
        attributes: The other arguments, normalized.
        closures: Functions that it calls, by parameter name.
        scope: The scope that it is in.
        results: The values that it computes.
        source: The line, or the operation, of the user's source, as text; empty if unknown.
    """

    record: OperationRecord
    operands: tuple[Value, ...]
    attributes: Mapping[str, Any]
    closures: Mapping[str, Closure]
    scope: Scope
    results: tuple[Value, ...] = field(init=False, default=())
    source: str = field(init=False, default="")

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.record.name

    @property
    def type(self) -> TensorType:
        """Type of the only result."""
        (result,) = self.results
        return result.type

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Types of the operands."""
        return tuple(operand.type for operand in self.operands)

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]


@dataclass(frozen=True, eq=False, slots=True)
class Closure:
    """A function of values.

    Attributes:
        name: Name in messages.
        scope: Its nodes.
        parameters: The values that a call replaces by arguments.
        results: The values that it returns; also parameters, or values of outer scopes.
    """

    name: str
    scope: Scope
    parameters: tuple[Value, ...]
    results: tuple[Value, ...]

    def check(
        self, takes: Sequence[TensorType], returns: Sequence[TensorType] | None = None
    ) -> None:
        """Refuse a closure whose parameters or results have other types.

        Raises:
            GraphError: Types differ; lists both.
        """
        _check_types(f"parameters of {self.name!r}", self.parameters, takes)
        if returns is not None:
            _check_types(f"results of {self.name!r}", self.results, returns)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return a value, or a sequence of values, as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def require_elementwise(name: str, closure: Closure) -> None:
    """Refuse a closure unless all its operations are elementwise.

    Raises:
        GraphError: Names the closure and the operations.
    """
    names = {node.name for node in closure.scope.nodes if not node.record.is_elementwise}
    if names:
        raise GraphError(
            f"{name} is not made of operations on each element only", got=", ".join(sorted(names))
        )


def _check_types(what: str, values: Sequence[Value], expected: Sequence[TensorType]) -> None:
    got = [value.type for value in values]
    if got != list(expected):
        raise GraphError(
            f"wrong {what}",
            got=", ".join(map(str, got)) or "none",
            expected=", ".join(map(str, expected)) or "none",
        )


def needed_nodes(scope: Scope, results: Sequence[Value]) -> Iterator[Node]:
    """Return an iterator over the nodes of a scope that results depend on, in creation order."""
    nodes: set[Node] = set()
    pending = [value.node for value in results]
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        nodes.add(node)
        pending.extend(operand.node for operand in node.operands)
        for closure in node.closures.values():
            pending.extend(value.node for value in closure.results)
    return (node for node in scope.nodes if node in nodes)
