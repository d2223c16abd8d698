"""The shapes of what enters a partition, where they are not fixed, for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes, Shape
from coreml_delegate.dynamic_shapes.symbols import bounds_of, is_unbounded
from coreml_delegate.preprocess.enumerated_shapes import enumerated_inputs, tensor_shapes

Flexible = tuple[tuple[str, str], ...]
"""Names of inputs, each with the shapes it may have."""


def ranges_of(entering: Iterable[Node], program: ExportedProgram) -> Flexible:
    """The range of every dimension that is not fixed."""
    return tuple(
        (node.name, f"[{', '.join(_range(size, program) for size in tensor.shape)}]")
        for node, tensor in _flexible(entering)
    )


def listed(entering: Iterable[Node], enumerated: EnumeratedShapes) -> dict[str, tuple[Shape, ...]]:
    """The enumerated shapes of what enters a partition, by name."""
    bindings = enumerated.bindings()
    return enumerated_inputs(
        {node.name: tensor_shapes(node.name, t, bindings) for node, t in _flexible(entering)}
    )


def described(shapes: dict[str, tuple[Shape, ...]]) -> Flexible:
    """Enumerated shapes, for a reader."""
    return tuple(
        (name, " | ".join(str(list(shape)) for shape in choices))
        for name, choices in shapes.items()
    )


def _flexible(entering: Iterable[Node]) -> Iterator[tuple[Node, torch.Tensor]]:
    for node in entering:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(
            isinstance(s, torch.SymInt) for s in value.shape
        ):
            yield node, value


def _range(size: int | torch.SymInt, program: ExportedProgram) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    low, high = bounds_of(size, program.range_constraints)
    given = "" if not is_unbounded(size, program.range_constraints) else " (of the example)"
    return f"{low}..{high}{given}"
