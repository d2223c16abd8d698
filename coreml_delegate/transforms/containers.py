"""Containers in a program's inputs and results, as far as a ``.pte`` can name them.

ExecuTorch writes into a ``.pte`` how the inputs and results are nested, by the names under which
the classes are registered with torch. Named tuples have none, and neither have those that functions
of torch return, such as ``torch.return_types.median``: such a program would not be written.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


def replace_unnamed_containers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with tuples for the containers that have no name in a ``.pte``.

    Args:
        program: In any dialect; it is not changed. Its graph is shared.
    """
    entries = [_plain_entry(entry) for entry in program.module_call_graph]
    if entries == list(program.module_call_graph):
        return program
    plain: Any = copy.copy(program)
    plain._module_call_graph = entries
    return plain


def _plain_entry(entry: Any) -> Any:
    signature = entry.signature
    if signature is None:
        return entry
    specs = {name: _plain(getattr(signature, name)) for name in ("in_spec", "out_spec")}
    return replace(entry, signature=replace(signature, **specs))


def _plain(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    if spec.is_leaf():
        return spec
    children = [_plain(child) for child in spec.children()]
    if _has_name(spec):
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.treespec_tuple(children)


def _has_name(spec: pytree.TreeSpec) -> bool:
    leaves: list[pytree.TreeSpec] = [pytree.treespec_leaf()] * spec.num_children
    try:
        pytree.treespec_dumps(pytree.TreeSpec(spec.type, spec.context, leaves))
    except (NotImplementedError, TypeError):  # no name, or keys that are not written
        return False
    return True
