"""Names of operators as users write them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.ops.call import target_name

_NAMESPACES = ("aten", "dim_order_ops", "quantized_decomposed", "torchao")
_FEW = 12


def normalize_op_names(names: Iterable[str], option: str) -> frozenset[str]:
    """Check op names and bring them to one form.

    Args:
        names: Any of ``aten.add.Tensor``, ``aten::add.Tensor``, ``add.Tensor``, ``aten.add`` (every
            overload) and ``add``; upper and lower case alike.
        option: The option they are given to, for the message.

    Returns:
        Lower-case names that ``spellings`` gives for the nodes they mean.

    Raises:
        OptionError: A name no operator has; names near matches.
    """
    return frozenset(_normalize(name, option) for name in names)


def spellings(node: Node) -> frozenset[str]:
    """Every name, in lower case, by which a user may mean the op of a call.

    The name of a view stands for its copying variant too, which ExecuTorch puts in its place.
    """
    return _spellings(target_name(node.target).lower())


@functools.cache
def _spellings(full: str) -> frozenset[str]:
    namespace, _, rest = full.partition(".")
    op, _, overload = rest.partition(".")
    found = {full, rest, op, f"{namespace}.{op}"}
    if op.endswith("_copy"):
        view = op.removesuffix("_copy")
        found |= {f"{namespace}.{view}.{overload}", f"{view}.{overload}"}
        found |= {view, f"{namespace}.{view}"}
    return frozenset(found)


def _normalize(name: str, option: str) -> str:
    dotted = name.strip().replace("::", ".").lower()
    namespace, _, rest = dotted.partition(".")
    if namespace not in _NAMESPACES:
        namespace, rest = "aten", dotted
    op, _, overload = rest.partition(".")
    known = _overloads_of(namespace)
    if op not in known:
        raise _unknown(option, "operator", name, op, known)
    if overload and overload not in known[op]:
        raise _unknown(option, "overload", name, overload, known[op])
    return dotted


def _unknown(option: str, kind: str, name: str, part: str, known: Iterable[str]) -> OptionError:
    candidates = sorted(known)
    few = len(candidates) <= _FEW
    otherwise = f"perhaps {', '.join(candidates)}" if few else f"an {kind} PyTorch has"
    return OptionError(
        f"{option} names an unknown {kind}",
        got=repr(name),
        expected=near_matches(part, candidates, otherwise, cutoff=0.6),
    )


def _overloads_of(namespace: str) -> Mapping[str, set[str]]:
    """The operators of a namespace with their overloads, all in lower case."""
    found: dict[str, set[str]] = {}
    schemas: Any = torch._C._jit_get_all_schemas()  # pyright: ignore[reportPrivateUsage]
    for schema in schemas:
        prefix, _, op = schema.name.partition("::")
        if prefix == namespace:
            found.setdefault(op.lower(), set()).add(schema.overload_name.lower() or "default")
    return found
