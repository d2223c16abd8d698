"""Dynamic sizes of inputs: their ranges, for coremltools, and the relations between them.

Coremltools takes a number or a symbol with a range as an input size. For an expression such as
``16*s0`` it needs the range only: sizes inside the model follow from those of its inputs.

Core ML needs an upper bound. If the program has none, it is the size of the example that the
program was exported with, which is also the size that ExecuTorch plans memory for.

While torch traces, it assumes that a size is 2 or more, whatever bounds the program was exported
with, and does not check that when the program runs. ExecuTorch takes this assumption for the
program's bound; the bounds that were given remain with the traced inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

_LARGEST = 2**31 - 1  # of a Core ML dimension
_TRACED_MINIMUM = 2  # of every size, to torch while it traces


def declare_sizes(program: ExportedProgram) -> None:
    """Set the range constraint of every dynamic input size to the range that its input gets."""
    declared = declared_ranges(program)
    program.range_constraints.update({e: ValueRanges(*found) for e, found in declared.items()})


def declared_ranges(program: ExportedProgram) -> dict[Any, tuple[int, int]]:
    """Return the smallest and the largest value that each dynamic input size gets."""
    return {
        expression_of(size): bounds_of(size, program.range_constraints)
        for _, size in _dynamic_sizes(program)
    }


def bounds_of(size: torch.SymInt, ranges: Mapping[Any, ValueRanges[Any]]) -> tuple[int, int]:
    """Return the smallest and the largest value of a size, at least 1 and never infinite."""
    found: Any = bound_sympy(expression_of(size), _with_given_minimums(size, ranges))
    low = max(1, int(found.lower)) if found.lower not in (-int_oo, -sympy.oo) else 1
    if found.upper in (int_oo, sympy.oo):
        return low, max(low, hint_of(size) or _LARGEST)
    return low, max(low, min(int(found.upper), _LARGEST))


def _with_given_minimums(
    size: torch.SymInt, ranges: Mapping[Any, ValueRanges[Any]]
) -> dict[Any, ValueRanges[Any]]:
    """Return the ranges; those that tracing alone made start at 2 start where they were given."""
    given = _given_minimums(size.node.shape_env)
    return {
        symbol: ValueRanges(max(1, given[symbol]), found.upper)
        if found.lower == _TRACED_MINIMUM and given.get(symbol, _TRACED_MINIMUM) < _TRACED_MINIMUM
        else found
        for symbol, found in ranges.items()
    }


def _given_minimums(shape_env: Any) -> dict[Any, int]:
    """Return the lower bound of each symbol's ``Dim``; programs loaded from a file have none."""
    return {
        expression_of(size): int(constraint.vr.lower)
        for source in shape_env.tracked_fakes or ()
        if isinstance(source.fake, torch.Tensor) and source.symbolic_context is not None
        for size, constraint in zip(
            source.fake.shape, source.symbolic_context.constraint_sizes, strict=True
        )
        if isinstance(size, torch.SymInt) and isinstance(constraint, StrictMinMaxConstraint)
    }


def is_unbounded(size: torch.SymInt, ranges: Mapping[Any, ValueRanges[Any]]) -> bool:
    """Return whether the program has no upper bound for a size."""
    found: Any = bound_sympy(expression_of(size), dict(ranges))
    return found.upper in (int_oo, sympy.oo)


def expression_of(size: torch.SymInt) -> Any:
    """Return the sympy expression of a size."""
    return size.node.expr


def hint_of(size: torch.SymInt) -> int | None:
    """Return the size that the program was traced with, None if it depends on data."""
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def input_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the fake tensors of the inputs that are tensors, by name, in order."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = {
        str(n): nodes[str(n)].meta.get("val")
        for n in program.graph_signature.user_inputs
        if n in nodes
    }
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def relations_of(program: ExportedProgram) -> dict[str, list[int | str]]:
    """Return the sizes of the inputs, if some depend on others or are not plain symbols.

    Returns:
        Sizes by input name: numbers, and expressions in symbols ``s0``, ``s1`` and so on, numbered
        in the order of the inputs. Empty if the range of each size says everything.
    """
    tensors = input_tensors(program)
    dynamic_sizes = [expression_of(size) for _, size in _dynamic_sizes(program)]
    used = Counter(symbol for expression in dynamic_sizes for symbol in expression.free_symbols)
    if all(e.is_Symbol for e in dynamic_sizes) and all(count == 1 for count in used.values()):
        return {}
    ordered = dict.fromkeys(
        symbol
        for expression in dynamic_sizes
        for symbol in sorted(expression.free_symbols, key=str)
    )
    # New symbols keep the assumptions of the old; sympy would simplify otherwise.
    names = {old: sympy.Symbol(f"s{i}", **old.assumptions0) for i, old in enumerate(ordered)}
    return {
        name: [
            str(expression_of(size).xreplace(names)) if isinstance(size, torch.SymInt) else size
            for size in tensor.shape
        ]
        for name, tensor in tensors.items()
    }


def _dynamic_sizes(program: ExportedProgram) -> Iterator[tuple[str, torch.SymInt]]:
    for name, tensor in input_tensors(program).items():
        yield from ((name, size) for size in tensor.shape if isinstance(size, torch.SymInt))
