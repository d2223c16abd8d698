"""Rewrites of programs that ExecuTorch could not write to a ``.pte``, or could not lower.

**Containers.** ExecuTorch writes into a ``.pte`` how inputs and results are nested, by the names
under which their classes are registered with torch. Named tuples have none, nor have the results of
functions of torch, such as ``torch.return_types.median``.

**Checks in linear algebra.** ExecuTorch takes other checks out by itself, and has no op for the
check that a matrix could be inverted or factored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

_ATEN: Any = torch.ops.aten


def replace_unnamed_containers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with tuples in place of containers that have no name in a ``.pte``.

    Args:
        program: In any dialect; it is not changed. Its graph is shared.
    """
    entries = [_with_tuples(entry) for entry in program.module_call_graph]
    if entries == list(program.module_call_graph):
        return program
    plain: Any = copy.copy(program)
    plain._module_call_graph = entries
    return plain


def _with_tuples(entry: Any) -> Any:
    signature = entry.signature
    if signature is None:
        return entry
    specs = {name: _replace_unnamed(getattr(signature, name)) for name in ("in_spec", "out_spec")}
    return replace(entry, signature=replace(signature, **specs))


def _replace_unnamed(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    if spec.is_leaf():
        return spec
    children = [_replace_unnamed(child) for child in spec.children()]
    if _has_name(spec):
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.treespec_tuple(children)


def _has_name(spec: pytree.TreeSpec) -> bool:
    leaves: list[pytree.TreeSpec] = [pytree.treespec_leaf()] * spec.num_children
    try:
        pytree.treespec_dumps(pytree.TreeSpec(spec.type, spec.context, leaves))
    except (NotImplementedError, TypeError):  # it has no name, or keys that JSON cannot hold
        return False
    return True


def drop_linear_algebra_checks(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with functions of linear algebra that do not check their results.

    A matrix that cannot be inverted then gives infinities.

    Args:
        program: In ATen dialect; it is not changed.
    """
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Callable[..., Any]] = {
        op: _first_results(op, unchecked) for op, unchecked in _UNCHECKED.items() if op in targets
    }
    return program.run_decompositions(table) if table else program


_UNCHECKED: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        _ATEN.inverse.default: _ATEN.linalg_inv_ex.default,
        _ATEN.linalg_cholesky.default: _ATEN.linalg_cholesky_ex.default,
        _ATEN.linalg_inv.default: _ATEN.linalg_inv_ex.default,
        _ATEN.linalg_ldl_factor.default: _ATEN.linalg_ldl_factor_ex.default,
        _ATEN.linalg_lu_factor.default: _ATEN.linalg_lu_factor_ex.default,
        _ATEN.linalg_solve.default: _ATEN.linalg_solve_ex.default,
    }
)


def _first_results(op: Any, unchecked: OpOverload) -> Callable[..., Any]:
    """Return ``op`` in terms of ``unchecked``, whose last result says whether it succeeded."""
    count = len(op._schema.returns)

    def call(*args: Any, **keywords: Any) -> Any:
        results = unchecked(*args, **keywords)
        return results[0] if count == 1 else tuple(results[:count])

    return call
