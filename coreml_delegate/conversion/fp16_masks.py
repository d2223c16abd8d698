"""Masks of a model that computes in fp16.

Models hide what a softmax is not to see by adding the smallest number of fp32. In fp16 that is
minus infinity: where a row is hidden altogether, as that of a padded token, softmax divides zero by
zero, and where it is multiplied by a mask of ones and zeros, every zero becomes a nan. fp32 has a
finite number in both places, so fp16 is given its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.conversion.precision import stays_fp32
from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import is_stored, stored_value
from coreml_delegate.ops.edits import ATEN, insert, set_arguments, value_of
from coreml_delegate.ops.record import MaskRole

_LIMIT = torch.finfo(torch.float16).max
_HUGE = 1e38
"""Factors from here on would be infinite: with smaller ones coremltools multiplies in fp32."""


def protect(program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]) -> None:
    """Keep what is finite in fp32 finite in fp16, as far as softmax depends on it.

    Args:
        program: A prepared subgraph; edited in place.
        in_fp32: Debug handles of calls that stay in fp32.
        ops: MIL ops that do.
    """
    for node in list(program.graph.nodes):
        role = _role(node)
        if MaskRole.SCALES in role and not stays_fp32(node, "mul", in_fp32, ops):
            _bound_factors(node)
        elif MaskRole.NORMALIZES in role and not stays_fp32(node, "softmax", in_fp32, ops):
            _bound_scores(node)
    program.graph_module.recompile()


def _role(node: Node) -> MaskRole:
    record = record_of(target_name(node.target)) if node.op == "call_function" else None
    return MaskRole.NONE if record is None else record.mask_role


def _bound_factors(node: Node) -> None:
    bounded = {
        name: _bounded(node, argument)
        for name, argument in zip(("self", "other"), node.args, strict=False)
        if _exceeds(argument, _HUGE)
    }
    if bounded:
        set_arguments(node, **bounded)


def _bounded(node: Node, factor: Any) -> Any:
    if isinstance(factor, Node):
        return insert(node, ATEN.clamp.default, factor, -_LIMIT, _LIMIT)
    return max(-_LIMIT, min(_LIMIT, float(factor)))


def _bound_scores(node: Node) -> None:
    scores = node.args[0]
    if isinstance(scores, Node) and any(_hides(source) for source in _sources(scores)):
        bounded = insert(node, ATEN.clamp.default, scores, -_LIMIT, _LIMIT)
        node.args = (bounded, *node.args[1:])


def _sources(scores: Node) -> Iterator[Any]:
    """What the values of ``scores`` may be of: numbers, constants, and inputs that are added."""
    seen: set[Node] = set()
    open_ends = [(scores, False)]
    while open_ends:
        node, is_added = open_ends.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op != "call_function":
            if is_added or is_stored(node):
                yield node
            continue
        role = _role(node)
        if MaskRole.CARRIES not in role:
            continue
        yield from (a for a in node.args if isinstance(a, float | int))
        adds = is_added or MaskRole.ADDS in role
        open_ends += [(source, adds) for source in node.all_input_nodes]


def _hides(source: Any) -> bool:
    """Whether a source may have values that are minus infinity in fp16."""
    if not is_stored(source):
        return value_of(source).dtype.is_floating_point
    return _exceeds(source, _LIMIT)


def _exceeds(argument: Any, limit: float) -> bool:
    """Whether a constant has finite values of that magnitude or more."""
    value = stored_value(argument)
    if value is None or not value.dtype.is_floating_point or not value.numel():
        return False
    extremes = map(float, torch.aminmax(value.detach()))
    return any(limit <= abs(extreme) < math.inf for extreme in extremes)
