"""Sizes of inputs that are expressions, as ``16*s0`` is, made known to coremltools.

Coremltools takes an input size that is a symbol with a range, or a number. Of an expression it
needs no more than the range either: sizes inside the model follow from those of its inputs.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import bound_sympy


def declare_sizes(program: ExportedProgram) -> None:
    """Give every expression among the input sizes its range, as symbols have theirs."""
    ranges = program.range_constraints
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in inputs or not isinstance(value, torch.Tensor):
            continue
        for size in value.shape:
            if isinstance(size, torch.SymInt) and size.node.expr not in ranges:
                expression = size.node.expr
                ranges[expression] = bound_sympy(expression, ranges)
