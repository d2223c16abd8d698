"""Locations of ops in a program, for messages and reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coreml_delegate.runtime.mil.program import Block, Function, Op


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """The location of one op. Locations in the same function sort in program order.

    Attributes:
        function: Name of the function.
        path: Enclosing ops, outermost first: index of the op, number of the nested block.
        index: Index of the op in the innermost block.
    """

    function: str
    path: tuple[tuple[int, int], ...]
    index: int

    def __str__(self) -> str:
        nesting = "".join(f" op {op} block {block}" for op, block in self.path)
        return f"{self.function}{nesting} op {self.index}"


def located_ops(function: Function) -> Iterator[tuple[Location, Op]]:
    """Yield every op of a function with its location, outer blocks first."""
    yield from _located(function.name, (), function.block)


def location_of(function: Function, op: Op) -> Location:
    """Return the location of ``op`` by a search, as only failed ops need it.

    Raises:
        LookupError: The function does not have the op.
    """
    for location, candidate in located_ops(function):
        if candidate is op:
            return location
    raise LookupError(f"{op.type} {op.name!r} is not an op of {function.name}")


def describe_op(function: Function, op: Op) -> str:
    """Return op type, outputs and location: ``conv 'y' at main op 3``."""
    outputs = ", ".join(repr(output.name) for output in op.outputs) or repr(op.name)
    return f"{op.type} {outputs} at {location_of(function, op)}"


def _located(
    function: str, path: tuple[tuple[int, int], ...], block: Block
) -> Iterator[tuple[Location, Op]]:
    for index, op in enumerate(block.ops):
        yield Location(function, path, index), op
        for number, nested in enumerate(op.blocks):
            yield from _located(function, (*path, (index, number)), nested)
