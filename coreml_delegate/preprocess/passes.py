"""Rewrites of a subgraph that make it palatable to coremltools, before it converts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import ExportedProgram

from coreml_delegate.op_rules.rule import target_name


@dataclass(frozen=True, slots=True)
class _Replacement:
    """An op of the same meaning once memory formats are fixed; ``keep`` names keywords it shares."""

    target: Any
    keep: frozenset[str]


# The rules have refused every memory format but row-major, so a dim order says nothing more.
_ROW_MAJOR: Mapping[str, _Replacement] = {
    "dim_order_ops._clone_dim_order.default": _Replacement(
        exir_ops.edge.aten.clone.default, frozenset()
    ),
    "dim_order_ops._to_dim_order_copy.default": _Replacement(
        exir_ops.edge.aten._to_copy.default, frozenset({"dtype"})
    ),
}


def prepare(program: ExportedProgram) -> None:
    """Rewrite ``program`` in place; its signature and results do not change."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        replacement = _ROW_MAJOR.get(target_name(node.target))
        if replacement is not None:
            node.target = replacement.target
            node.kwargs = {k: v for k, v in node.kwargs.items() if k in replacement.keep}
    program.graph_module.recompile()
