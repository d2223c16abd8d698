"""The cast of a program to fp16: what stays in fp32, and which constants are lost.

**Calls that stay in fp32.** coremltools decides per op by a callback. An op is mapped to its call
by its debug handle, so every such call gets a distinct handle. ``mil.passes.fp16_range.guard_fp16``
keeps the values of the other ops in range, and finds further ops that stay in fp32.

**Constants that fp16 rounds** are recorded in fp32: see ``formats.fp32_constants``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.exported.module_scope import ModulePattern, scopes_of
from coreml_delegate.formats.fp32_constants import Constants, as_lost, is_rounded
from coreml_delegate.lowering.debug_handles import HANDLE
from coreml_delegate.mil.passes.fp16_range import guard_fp16
from coreml_delegate.mil.passes.fp32_islands import overflows
from coreml_delegate.mil.passes.matching import Rewrite, Selector, rewrite
from coreml_delegate.options.compile_specs import KeepFp32
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches import patched

# Calls that stay in fp32

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


def fp16_selector(keep: KeepFp32, handles: frozenset[int]) -> Selector:
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


# The cast


@contextmanager
def fp16_cast(
    rewrites: Sequence[Rewrite] = (), *, records_all: bool
) -> Generator[Mapping[str, np.ndarray[Any, Any]]]:
    """Keep values in the range of fp16 where coremltools casts a program to fp16.

    Args:
        rewrites: Rewrites to apply before.
        records_all: Whether to record all constants that the cast rounds; else those to store.

    Yields:
        A mapping that records constants: their values in fp32, by the names of the rounded
        constants.
    """
    recorded: dict[str, np.ndarray[Any, Any]] = {}

    def guard(program: Any, may_cast: Selector) -> Selector:
        rewrite(program, rewrites)
        return guard_fp16(program, may_cast)

    def record(program: Any) -> None:
        for op in _operations(program):
            constant = op.x.op if op.op_type == "cast" and op.dtype.val == "fp16" else None
            if constant is None or constant.op_type != "const":
                continue
            value = np.asarray(op.x.val, np.float32)
            lost = as_lost(value)
            if lost is not None or (records_all and is_rounded(value)):
                recorded[op.outputs[0].name] = value if lost is None else lost

    with patched(
        coremltools_patches.AROUND_FP16_CAST.with_state((guard, record)),
        coremltools_patches.OVERFLOW_CHECK.with_state(overflows),
    ):
        yield recorded


def remaining_constants(program: Any, recorded: Mapping[str, np.ndarray[Any, Any]]) -> Constants:
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
