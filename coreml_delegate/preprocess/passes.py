"""Rewrites of a subgraph that make it palatable to coremltools, before it converts.

Each is an op that Core ML has, perhaps as several, and that coremltools translates wrongly or not
in the form it comes in. They stand in a module per family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules import rule_of
from coreml_delegate.op_rules.rule import target_name
from coreml_delegate.preprocess import (
    boundary,
    narrow_integers,
    rewrite_attention,
    rewrite_compressed,
    rewrite_convolution,
    rewrite_elementwise,
    rewrite_indexing,
    rewrite_normalization,
    rewrite_pooling,
    rewrite_reduction,
    rewrite_shape,
)
from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    become,
    insert,
    mark_constants,
    unite_copies,
    value_of,
)
from coreml_delegate.preprocess.states import make_states
from coreml_delegate.preprocess.symbolic_sizes import declare_sizes

_FAMILIES = (
    rewrite_attention,
    rewrite_compressed,
    rewrite_convolution,
    rewrite_elementwise,
    rewrite_indexing,
    rewrite_normalization,
    rewrite_pooling,
    rewrite_reduction,
    rewrite_shape,
)


def _collect(tables: Iterable[Mapping[str, Rewrite]]) -> dict[str, Rewrite]:
    found: dict[str, Rewrite] = {}
    for table in tables:
        for target, rewrite in table.items():
            if target in found:
                raise ImportError(f"two rewrites of {target}")
            found[target] = rewrite
    return found


_REWRITES: Mapping[str, Rewrite] = _collect(family.REWRITES for family in _FAMILIES)


def prepare(program: ExportedProgram) -> None:
    """Rewrite ``program`` in place; what it computes does not change.

    Raises:
        ContractError: See ``make_states``.
    """
    unite_copies(program)
    make_states(program)
    mark_constants(program)
    declare_sizes(program)
    for node in list(program.graph.nodes):
        rewrite = _REWRITES.get(_rule_name(node)) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)
    boundary.retype(program)
    boundary.straighten(program)
    narrow_integers.widen(program)
    # Of an op with several results, the one that is used may have been computed by itself.
    program.graph.eliminate_dead_code()
    outputs: Any = program.graph.output_node().args[0]
    for output in dict.fromkeys(outputs):
        if isinstance(output, Node) and _may_vanish(output):
            _keep(output)
    program.graph_module.recompile()


def _rule_name(node: Node) -> str:
    """The name under which the op's rule is kept, a copying variant's being its view's."""
    name = target_name(node.target)
    rule = rule_of(name)
    return name if rule is None else rule.target


def _may_vanish(node: Node) -> bool:
    """Whether the node may return its argument as it is.

    Coremltools then gives the argument's name to the output, and two features bear one name.
    """
    rule = rule_of(target_name(node.target)) if node.op == "call_function" else None
    if (
        rule is None
        or rule.family != "shape"
        or not node.args
        or not isinstance(node.args[0], Node)
    ):
        return False
    result, source = node.meta.get("val"), node.args[0].meta.get("val")
    return (
        isinstance(result, torch.Tensor)
        and isinstance(source, torch.Tensor)
        and list(map(str, result.shape)) == list(map(str, source.shape))
    )


def _keep(node: Node) -> None:
    """Put an identity after the node that coremltools does not take for its argument."""
    dims = value_of(node).dim()
    before = insert(node, node.target, *node.args, **node.kwargs)
    if dims:
        become(node, ATEN.permute_copy.default, before, list(range(dims)))
    else:
        become(node, ATEN.view_copy.default, before, [])
