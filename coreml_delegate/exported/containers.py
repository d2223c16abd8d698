"""Containers of a model's inputs and results: registration with torch, and their keys.

``torch.export`` flattens containers that ``torch.utils._pytree`` knows: tuples, lists, dicts, named
tuples and, after the first import of transformers' models, their outputs. Dataclasses and the
caches of transformers are registered here on demand, by public functions of theirs. The result
types of torch functions, for example ``torch.return_types.median``, are registered, but lack the
name that ``torch.export.save`` needs; they get it on demand.
"""

from __future__ import annotations

import importlib
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.exported.value_names import Path, input_name, usual_keys
from coreml_delegate.patches.torch import name_container, pytree

_CACHES = "transformers.cache_utils"
_CACHE_SUPPORT = "transformers.integrations.executorch"


def register_containers(tree: Any) -> bool:
    """Register the dataclasses and transformers caches in inputs or results with torch.

    Args:
        tree: The inputs or results.

    Returns:
        Whether any container was unknown to torch.
    """
    unknown = {type(leaf) for leaf in pytree.tree_leaves(tree)} - {type}
    registered = [kind for kind in unknown if (register := _registration_of(kind)) and register()]
    if registered:
        register_containers(tree)  # for containers inside the registered containers
    return bool(registered)


def _registration_of(kind: type[Any]) -> Callable[[], bool] | None:
    if is_dataclass(kind):
        return lambda: _register_dataclass(kind)
    return _register_caches if kind.__module__ == _CACHES else None


def _register_dataclass(kind: type[Any]) -> bool:
    torch.export.register_dataclass(kind)
    return True


def _register_caches() -> bool:
    """Register ``DynamicCache`` by transformers' own code; return whether it was unknown."""
    before = len(pytree.SUPPORTED_NODES)
    try:
        support = importlib.import_module(_CACHE_SUPPORT)
        support.register_dynamic_cache_export_support()
    except (ImportError, AttributeError):  # another release: torch.export reports the container
        return False
    return len(pytree.SUPPORTED_NODES) > before


def name_return_types() -> None:
    """Let ``torch.export`` save and load programs with results as ``torch.return_types.max``.

    It holds for the process; ``SourceModel`` calls it.
    """
    for kind in _return_types():
        name_container(kind, f"torch.return_types.{kind.__name__.rpartition('.')[2]}")


def _return_types() -> Sequence[type[Any]]:
    return sys.modules["torch.return_types"].all_return_types


def keys_of(spec: pytree.TreeSpec) -> list[str | int] | None:
    """Return the keys of a container, or None if it only has indices.

    Args:
        spec: The container, not a value in one.
    """
    kind: Any = spec.type
    context: Any = spec.context
    if kind is namedtuple:
        return list(context._fields)
    if kind in _return_types():
        return list(kind.__match_args__)
    candidates = [context, *(context if isinstance(context, list | tuple) else ())]
    usual = (usual_keys(keys, spec.num_children) for keys in candidates)
    return next((keys for keys in usual if keys is not None), None)


def paths_of(spec: pytree.TreeSpec) -> list[Path]:
    """Return the path of every value in a container, in order."""
    if spec.is_leaf():
        return [()]
    keys = keys_of(spec) or range(spec.num_children)
    return [
        (key, *inner)
        for key, child in zip(keys, spec.children(), strict=True)
        for inner in paths_of(child)
    ]


def input_names_of(program: ExportedProgram) -> list[str]:
    """Return the names of a program's inputs, in order: paths in the arguments of ``forward``."""
    signature = program.module_call_graph[0].signature
    parameters = None if signature is None else signature.forward_arg_names
    if signature is None or parameters is None:  # of an exporter before torch 2.6
        return [str(name) for name in program.graph_signature.user_inputs]
    arguments = [child for group in signature.in_spec.children() for child in group.children()]
    return [
        input_name((name, *path))
        for name, argument in zip(parameters, arguments, strict=True)
        for path in paths_of(argument)
    ]
