"""Rewrites and options that avoid overflow in fp16, whose maximum is 65504.

**Calls that stay in fp32.** Some values need the range of fp32: the sum of squares in a norm over
large activations, the scores before a softmax. coremltools decides per op by a callback. An op is
mapped to its call by its debug handle, so every such call gets a distinct handle.

**Masks.** Models mask scores of a softmax by adding the smallest number of fp32, which is minus
infinity in fp16: in a row that is masked completely, as that of a padded token, softmax divides
zero by zero, and a product with a mask of ones and zeros turns zeros into nan. Such values are
clamped to the finite range of fp16.

**Scores.** Unfused attention scales the products of queries and keys, which may have overflowed
before: ultralytics/ultralytics#24990. One of the factors is scaled instead, as in fused attention.

**Norms.** Unfused norms square numbers first, which overflows from 256 on: the norm of such a row
is zero, pytorch/executorch#19523, facebookresearch/ConvNeXt#80. The squared tensor is divided by
its largest magnitude first.

**Constants that fp16 loses** are recorded in fp32: see ``formats.fp32_constants``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.compile_options import KeepFp32
from coreml_delegate.formats.fp32_constants import Constants, as_lost
from coreml_delegate.lowering.debug_handles import HANDLE
from coreml_delegate.module_scope import ModulePattern, scopes_of
from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import DEQUANTIZE, target_name
from coreml_delegate.ops.constants import is_stored, stored_value
from coreml_delegate.ops.edits import ATEN, insert, set_arguments, value_of
from coreml_delegate.ops.flops import elements
from coreml_delegate.ops.record import ScoreRole
from coreml_delegate.ops.squares import root_of_squares
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches import patched

# Calls that stay in fp32

OpSelector = Callable[[Any], bool]
"""Returns whether coremltools may cast a MIL op to fp16."""

_OPTION = "keep_fp32"


def mark_fp32_calls(program: ExportedProgram, keep: KeepFp32) -> frozenset[int]:
    """Return the handles of the calls that stay in fp32.

    Args:
        program: The subgraph, with numbered calls, before rewrites.
        keep: Which calls stay in fp32.
    """
    if not keep.modules and not keep.nodes:
        return frozenset()
    patterns = [ModulePattern.of(text, _OPTION) for text in keep.modules]
    return frozenset(
        node.meta[HANDLE]
        for node in program.graph.nodes
        if node.op == "call_function" and (node.name in keep.nodes or _is_covered(node, patterns))
    )


def _stays_fp32(node: Node, op: str, handles: Collection[int], ops: Collection[str]) -> bool:
    """Return whether a call, translated to MIL op ``op``, stays in fp32."""
    return op in ops or node.meta.get(HANDLE) in handles


def fp16_selector(keep: KeepFp32, handles: frozenset[int]) -> OpSelector:
    """Return the function that decides per op of the translated program.

    Args:
        keep: Names the MIL ops that stay in fp32.
        handles: Debug handles of the calls that stay in fp32; see ``mark_fp32_calls``.
    """
    from coremltools.converters.mil.mil.scope import ScopeSource

    ops = frozenset(keep.ops)

    def may_cast(op: Any) -> bool:
        op_handles: Iterable[Any] = op.scopes.get(ScopeSource.EXIR_DEBUG_HANDLE) or ()
        return op.op_type not in ops and handles.isdisjoint(op_handles)

    return may_cast


def _is_covered(node: Node, patterns: Iterable[ModulePattern]) -> bool:
    scopes = scopes_of(node)
    return any(pattern.covers(scopes) for pattern in patterns)


def avoid_fp16_overflow(
    program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]
) -> None:
    """Rewrite scores, masks and norms so that values finite in fp32 are finite in fp16.

    Args:
        program: A prepared subgraph; edited in place.
        in_fp32: Debug handles of the calls that stay in fp32.
        ops: The MIL ops that stay in fp32.
    """
    _scale_before_products(program, in_fp32, ops)
    _bound_masks(program, in_fp32, ops)
    _scale_squares(program, in_fp32, ops)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


# Masks

_FP16_MAX = float(torch.finfo(torch.float16).max)


def _bound_masks(program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]) -> None:
    """Clamp masks and scores to the finite range of fp16."""
    for node in list(program.graph.nodes):
        role = _role(node)
        if ScoreRole.SCALES in role and not _stays_fp32(node, "mul", in_fp32, ops):
            _bound_factors(node)
        elif ScoreRole.NORMALIZES in role and not _stays_fp32(node, "softmax", in_fp32, ops):
            _bound_scores(node)


def _role(node: Node) -> ScoreRole:
    record = record_of(target_name(node.target)) if node.op == "call_function" else None
    return ScoreRole.NONE if record is None else record.score_role


def _bound_factors(node: Node) -> None:
    """Clamp the constant factors of a product."""
    bounded = {
        name: _clamp(node, argument)
        for name, argument in zip(("self", "other"), node.args, strict=False)
        if _exceeds(argument, coremltools_patches.INFINITE_FROM)
    }
    if bounded:
        set_arguments(node, **bounded)


def _clamp(node: Node, factor: Any) -> Any:
    if isinstance(factor, Node):
        return insert(node, ATEN.clamp.default, factor, -_FP16_MAX, _FP16_MAX)
    return max(-_FP16_MAX, min(_FP16_MAX, float(factor)))


def _bound_scores(node: Node) -> None:
    """Clamp the scores of a softmax, if their terms may include a mask."""
    scores = node.args[0]
    if isinstance(scores, Node) and any(_may_overflow(source) for source in _score_sources(scores)):
        bounded = insert(node, ATEN.clamp.default, scores, -_FP16_MAX, _FP16_MAX)
        node.args = (bounded, *node.args[1:])


def _score_sources(scores: Node) -> Iterator[Any]:
    """Yield possible sources of values of ``scores``: numbers, constants, and added inputs."""
    for node, is_added in _score_origins(scores):
        if node.op != "call_function":
            if is_added or is_stored(node):
                yield node
        elif ScoreRole.PROPAGATES in _role(node):
            yield from (a for a in node.args if isinstance(a, float | int))


def _score_origins(scores: Node) -> Iterator[tuple[Node, bool]]:
    """Yield nodes whose values may propagate to ``scores``, and whether as a term of a sum."""
    seen: set[Node] = set()
    pending = [(scores, False)]
    while pending:
        node, is_added = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node, is_added
        role = _role(node)
        if ScoreRole.PROPAGATES in role:
            adds = is_added or ScoreRole.ADDS in role
            pending += [(source, adds) for source in node.all_input_nodes]


def _may_overflow(source: Any) -> bool:
    """Return whether a source may have finite values beyond fp16."""
    if not is_stored(source):
        return value_of(source).dtype.is_floating_point
    return _exceeds(source, _FP16_MAX)


def _exceeds(argument: Any, limit: float) -> bool:
    """Return whether a constant has finite values of magnitude ``limit`` or more."""
    value = stored_value(argument)
    if value is None or not value.dtype.is_floating_point or not value.numel():
        return False
    extremes = map(float, torch.aminmax(value.detach()))
    return any(limit <= abs(extreme) < math.inf for extreme in extremes)


# Scores

_MIL_PRODUCTS = ("matmul", "einsum")


def _scale_before_products(
    program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]
) -> None:
    """Scale a factor of the products that become scores of a softmax, instead of the products.

    Only scales below 1 are moved: these can avoid an overflow of the product.
    """
    for softmax in list(program.graph.nodes):
        if ScoreRole.NORMALIZES not in _role(softmax) or not isinstance(softmax.args[0], Node):
            continue
        for node, _ in list(_score_origins(softmax.args[0])):
            product, scale = _scaled_product(node)
            if product is None:
                continue
            if not any(_stays_fp32(product, op, in_fp32, ops) for op in _MIL_PRODUCTS):
                _scale_before(product, node, scale)


def _scaled_product(node: Node) -> tuple[Node | None, float]:
    """Match ``matmul(a, b) * scale``; return the product (or None) and the scale."""
    nothing = None, 1.0
    role = _role(node)
    if not role & (ScoreRole.SCALES | ScoreRole.DIVIDES) or node.kwargs:
        return nothing
    product, scale = node.args
    if ScoreRole.SCALES in role and is_stored(product):
        product, scale = scale, product
    value = stored_value(scale)
    if value is None or value.numel() != 1 or not isinstance(product, Node) or not value.item():
        return nothing
    number = float(value) if ScoreRole.SCALES in role else 1 / float(value)
    if not 0 < abs(number) < 1:
        return nothing
    if ScoreRole.MULTIPLIES not in _role(product) or len(product.users) > 1:
        return nothing
    factors = product.all_input_nodes
    if len(factors) != 2:
        return nothing  # a square, of which both factors would be scaled, or a sum
    if value_of(product).shape != value_of(node).shape or any(u.op == "output" for u in node.users):
        return nothing
    if any(target_name(factor.target) in DEQUANTIZE for factor in factors):
        return nothing  # such a product may be computed in integers
    return product, number


def _scale_before(product: Node, node: Node, scale: float) -> None:
    """Replace ``node``, ``product * scale``, by a product with a scaled factor."""
    factor = min(product.all_input_nodes, key=lambda factor: elements(value_of(factor)))
    scaled = insert(product, ATEN.mul.Scalar, factor, scale)
    scaled.meta = {**node.meta, "val": scaled.meta["val"]}
    product.replace_input_with(factor, scaled)
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)


# Norms

_MIL_SQUARES = ("reduce_mean", "reduce_sum")


def _scale_squares(
    program: ExportedProgram, in_fp32: Collection[int], ops: Collection[str]
) -> None:
    """Divide the squared tensors of roots of squares by their largest magnitudes."""
    for node in list(program.graph.nodes):
        root = root_of_squares(node)
        if root is None:
            continue
        if not any(_stays_fp32(root.squares, op, in_fp32, ops) for op in _MIL_SQUARES):
            root.scale_down()


# Constants that fp16 loses


@contextmanager
def recording_fp32_constants() -> Generator[Mapping[str, np.ndarray[Any, Any]]]:
    """Yield a mapping that records the constants that coremltools' fp16 pass loses by rounding.

    The values are in fp32, by the names of the rounded constants.
    """
    recorded: dict[str, np.ndarray[Any, Any]] = {}

    def record(program: Any) -> None:
        for op in _operations(program):
            constant = op.x.op if op.op_type == "cast" and op.dtype.val == "fp16" else None
            if constant is None or constant.op_type != "const":
                continue
            value = as_lost(np.asarray(op.x.val, np.float32))
            if value is not None:
                recorded[op.outputs[0].name] = value

    with patched(coremltools_patches.AFTER_FP16_CAST.with_state(record)):
        yield recorded


def lost_constants(program: Any, recorded: Mapping[str, np.ndarray[Any, Any]]) -> Constants:
    """Return the recorded constants that a MIL program still has after all passes."""
    return {
        name: recorded[name]
        for op in _operations(program)
        if op.op_type == "const" and (name := op.outputs[0].name) in recorded
    }


def _operations(program: Any) -> Iterator[Any]:
    pending: list[Any] = list(program.functions.values())
    while pending:
        for op in pending.pop().operations:
            yield op
            pending += op.blocks
