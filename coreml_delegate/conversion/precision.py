"""Islands of fp32 in a model that computes in fp16.

Some values need the range of fp32: the sum of squares in a norm over large activations, the scores
before a softmax. coremltools decides op by op, and can be asked. An op is traced back to the call
it was translated from by its debug handle, so every call that matters gets one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.compile_options import KeepFp32
from coreml_delegate.module_scope import ModulePattern, scopes_of

OpSelector = Callable[[Any], bool]
"""Whether coremltools may cast a MIL op to fp16."""

_HANDLE = "debug_handle"
_OPTION = "keep_fp32"


def mark(program: ExportedProgram, keep: KeepFp32) -> frozenset[int]:
    """Number the calls of a subgraph, before they are rewritten.

    Returns:
        The handles of those that stay in fp32.
    """
    if not keep.modules and not keep.nodes:
        return frozenset()
    patterns = [ModulePattern.of(text, _OPTION) for text in keep.modules]
    kept: set[int] = set()
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    for handle, node in enumerate(calls, start=1):
        node.meta[_HANDLE] = handle
        if node.name in keep.nodes or _covered(node, patterns):
            kept.add(handle)
    return frozenset(kept)


def stays_fp32(node: Node, op: str, handles: Collection[int], ops: Collection[str]) -> bool:
    """Whether a call keeps its precision.

    Args:
        node: A call of a subgraph that ``mark`` has numbered.
        op: The MIL op it is translated to.
        handles: What ``mark`` returned.
        ops: The MIL ops that stay in fp32.
    """
    return op in ops or node.meta.get(_HANDLE) in handles


def selector(keep: KeepFp32, handles: frozenset[int]) -> OpSelector:
    """What coremltools asks about each op of the translated program."""
    from coremltools.converters.mil.mil.scope import ScopeSource

    ops = frozenset(keep.ops)

    def may_cast(op: Any) -> bool:
        found: Iterable[Any] = op.scopes.get(ScopeSource.EXIR_DEBUG_HANDLE) or ()
        return op.op_type not in ops and handles.isdisjoint(found)

    return may_cast


def _covered(node: Node, patterns: Iterable[ModulePattern]) -> bool:
    scopes = scopes_of(node)
    return any(pattern.covers(scopes) for pattern in patterns)
