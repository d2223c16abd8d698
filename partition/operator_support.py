"""Which calls Core ML takes: the rules joined with what the user keeps out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.ops import Reason, obstacles_in
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.enumerated import undetermined_calls
from coreml_delegate.partition.filters import Filters
from coreml_delegate.targets import Opset


def refused_calls(
    program: ExportedProgram,
    target: Opset | None,
    *,
    filters: Filters,
    wide: WideIntegers,
    values: Mapping[str, torch.Tensor],
    constants_inside: bool,
    enumerated: EnumeratedShapes | None = None,
) -> dict[Node, Reason]:
    """The calls of a program that are not delegated, each with the reason.

    Args:
        program: In ATen or edge dialect.
        target: Opset of the deployment target, or None.
        filters: What the user keeps out; named before what Core ML cannot take.
        wide: What is known about integers that Core ML cannot hold.
        values: Real values of parameters and buffers by name, as far as they are at hand.
        constants_inside: Whether Core ML is given the program's constants.
        enumerated: The shapes that the program's inputs are to have, or None.
    """
    unfit = undetermined_calls(program, enumerated) | wide.obstacles(program, values)
    return obstacles_in(
        program,
        target,
        constants_inside=constants_inside,
        veto=lambda node: filters.refusal(node) or unfit.get(node),
    )
