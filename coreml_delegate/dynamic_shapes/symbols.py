"""Dynamic sizes of inputs: ranges for coremltools, and relations between sizes.

Coremltools takes a number or a symbol with a range as an input size. For an expression such as
``16*s0`` it only needs the range: sizes inside the model follow from the input sizes.

Core ML needs an upper bound. A size without one is bounded by the size of the example that the
program was exported with, for which ExecuTorch also plans memory.

Tracing assumes that a size is 2 or more, for any exported bounds, without a check at run time.
ExecuTorch takes this assumption for the program's bound; the traced inputs still have the bounds of
the export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

from coreml_delegate.patches.torch_ranges import ValueRanges, bound_sympy, int_oo

_MAX_SIZE = 2**31 - 1  # of a Core ML dimension
_TRACED_MINIMUM = 2  # of every size during tracing


def declare_sizes(program: ExportedProgram) -> None:
    """Set the range constraint of every dynamic input size to its declared range."""
    declared = declared_ranges(program)
    program.range_constraints.update({e: ValueRanges(*bounds) for e, bounds in declared.items()})


def declared_ranges(program: ExportedProgram) -> dict[Any, tuple[int, int]]:
    """Return the declared range of each dynamic input size: smallest and largest value."""
    return {
        expression_of(size): bounds_of(size, program.range_constraints)
        for _, size in _dynamic_sizes(program)
    }


def bounds_of(size: torch.SymInt, ranges: Mapping[Any, ValueRanges[Any]]) -> tuple[int, int]:
    """Return the smallest and the largest value of a size, at least 1 and never infinite."""
    value_range: Any = bound_sympy(expression_of(size), _restore_minimums(size, ranges))
    low = max(1, int(value_range.lower)) if value_range.lower not in (-int_oo, -sympy.oo) else 1
    if value_range.upper in (int_oo, sympy.oo):
        return low, max(low, hint_of(size) or _MAX_SIZE)
    return low, max(low, min(int(value_range.upper), _MAX_SIZE))


def _restore_minimums(
    size: torch.SymInt, ranges: Mapping[Any, ValueRanges[Any]]
) -> dict[Any, ValueRanges[Any]]:
    """Return the ranges with the lower bounds of the export, if tracing has raised them to 2."""
    minimums = _dim_minimums(size.node.shape_env)
    return {
        symbol: ValueRanges(max(1, minimums[symbol]), bounds.upper)
        if bounds.lower == _TRACED_MINIMUM
        and minimums.get(symbol, _TRACED_MINIMUM) < _TRACED_MINIMUM
        else bounds
        for symbol, bounds in ranges.items()
    }


def _dim_minimums(shape_env: Any) -> dict[Any, int]:
    """Return the lower bound of each symbol's ``Dim``; empty for a program from a file."""
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
    value_range: Any = bound_sympy(expression_of(size), dict(ranges))
    return value_range.upper in (int_oo, sympy.oo)


def expression_of(size: torch.SymInt) -> Any:
    """Return the sympy expression of a size."""
    return size.node.expr


def hint_of(size: torch.SymInt) -> int | None:
    """Return the size that the program was traced with, None if it depends on data."""
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def input_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the fake tensors of tensor inputs, by name, in order."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    values = {
        str(n): nodes[str(n)].meta.get("val")
        for n in program.graph_signature.user_inputs
        if n in nodes
    }
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def relations_of(program: ExportedProgram) -> dict[str, list[int | str]]:
    """Return the input sizes if any is an expression, or shares a symbol with another size.

    Returns:
        Sizes by input name: numbers, and expressions in symbols ``s0``, ``s1`` and so on, numbered
        in the order of the inputs. Empty if the ranges of the sizes are sufficient.
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
    # New symbols keep the assumptions of the old symbols, lest sympy simplify expressions.
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
