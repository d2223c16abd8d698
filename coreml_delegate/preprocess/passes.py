"""Rewrites of a subgraph that make it palatable to coremltools, before it converts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules.rule import target_name

_ATEN = exir_ops.edge.aten


def prepare(program: ExportedProgram) -> None:
    """Rewrite ``program`` in place; its signature and results do not change."""
    for node in program.graph.nodes:
        rewrite = _REWRITES.get(target_name(node.target)) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)
    program.graph_module.recompile()


def _clone(node: Node) -> None:
    # The rules have refused every memory format but row-major, so the dim order says nothing.
    node.target = _ATEN.clone.default
    node.kwargs = {}


def _to_copy(node: Node) -> None:
    node.target = _ATEN._to_copy.default
    node.kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}


def _copy(node: Node) -> None:
    # Out of place, the first argument lends its shape alone.
    node.target = _ATEN.expand_copy.default
    node.args = (node.args[1], list(node.meta["val"].shape))
    node.kwargs = {}


_REWRITES: Mapping[str, Callable[[Node], None]] = {
    "aten.copy.default": _copy,
    "dim_order_ops._clone_dim_order.default": _clone,
    "dim_order_ops._to_dim_order_copy.default": _to_copy,
}
