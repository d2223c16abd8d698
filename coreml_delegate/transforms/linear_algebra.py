"""Linear algebra without the checks of its results, which ExecuTorch cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram

_ATEN: Any = torch.ops.aten


def drop_linear_algebra_checks(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with the functions of linear algebra that do not check their results.

    A matrix that cannot be inverted gives infinities then. ExecuTorch takes other checks out by
    itself, and has no way to express this one.

    Args:
        program: In ATen dialect; it is not changed.
    """
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Callable[..., Any]] = {
        op: _first_results(op, of) for op, of in _UNCHECKED.items() if op in targets
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
    """``op`` in terms of ``unchecked``, which gives whether it succeeded as a further result."""
    count = len(op._schema.returns)

    def call(*args: Any, **keywords: Any) -> Any:
        results = unchecked(*args, **keywords)
        return results[0] if count == 1 else tuple(results[:count])

    return call
