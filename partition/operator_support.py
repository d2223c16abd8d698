"""Which nodes Core ML takes: the rules joined with what the user asked to keep out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.operator_support import OperatorSupportBase

from coreml_delegate import op_rules
from coreml_delegate.errors import OptionError
from coreml_delegate.op_rules import Reason, ReasonCode
from coreml_delegate.op_rules.constants import WideConstants
from coreml_delegate.op_rules.rule import target_name
from coreml_delegate.targets import Opset


class CoreMLOperatorSupport(OperatorSupportBase):
    """Verdicts on the calls of one program.

    Args:
        program: The program the nodes are of.
        target: Opset of the deployment target, or None.
        skip: Op names to keep out, see ``normalize_skips``.
        constants_inside: Whether Core ML is given the program's constants.
        wide: What is known about constants that Core ML cannot hold.
    """

    def __init__(
        self,
        program: ExportedProgram,
        target: Opset | None,
        *,
        skip: frozenset[str],
        constants_inside: bool,
        wide: WideConstants,
    ) -> None:
        super().__init__()
        self._skip = skip
        self._wide = wide.obstacles(program)
        self._obstacles = op_rules.obstacles_in(
            program, target, constants_inside=constants_inside, veto=self._veto
        )

    def obstacle(self, node: Node) -> Reason | None:
        """Why a call is not delegated, or None if it is."""
        return self._obstacles.get(node)

    def is_node_supported(
        self,
        submodules: Mapping[str, Any],  # noqa: ARG002 - the signature is torch's
        node: Node,
    ) -> bool:
        """The question of torch's partitioner; ``get_attr`` nodes follow their users."""
        return node.op == "get_attr" or (node.op == "call_function" and node not in self._obstacles)

    def _veto(self, node: Node) -> Reason | None:
        if not _names_of(node) & self._skip:
            return self._wide.get(node)
        return Reason(
            ReasonCode.SKIPPED,
            f"{target_name(node.target)} is in skip_ops_for_coreml_delegation",
            remedy="Remove it from the list",
        )


def normalize_skips(names: Iterable[str]) -> frozenset[str]:
    """Check op names and bring them to one form.

    Args:
        names: Any of ``aten.add.Tensor``, ``aten::add.Tensor``, ``add.Tensor``, ``aten.add`` (every
            overload) and ``add``; upper and lower case alike.

    Returns:
        Lower-case names that ``_names_of`` gives for the nodes they mean.

    Raises:
        OptionError: A name no operator has; names near matches.
    """
    return frozenset(_normalize(name) for name in names)


def _normalize(name: str) -> str:
    dotted = name.strip().replace("::", ".").lower()
    namespace, _, rest = dotted.partition(".")
    if namespace not in _NAMESPACES:
        namespace, rest = "aten", dotted
    op, _, overload = rest.partition(".")
    known = _overloads_of(namespace)
    if op not in known:
        raise _unknown("operator", name, op, known)
    if overload and overload not in known[op]:
        raise _unknown("overload", name, overload, known[op])
    return dotted


def _unknown(kind: str, name: str, part: str, known: Iterable[str]) -> OptionError:
    candidates = sorted(known)
    near = difflib.get_close_matches(part, candidates, n=3) or candidates
    few = len(near) <= _FEW
    return OptionError(
        f"skip_ops_for_coreml_delegation names an unknown {kind}",
        got=repr(name),
        expected=f"perhaps {', '.join(near)}" if few else f"an {kind} PyTorch has",
    )


_FEW = 12
_NAMESPACES = ("aten", "dim_order_ops", "quantized_decomposed", "torchao")


def _overloads_of(namespace: str) -> dict[str, set[str]]:
    """The operators of a namespace with their overloads, all in lower case."""
    found: dict[str, set[str]] = {}
    schemas: Any = torch._C._jit_get_all_schemas()  # pyright: ignore[reportPrivateUsage]
    for schema in schemas:
        prefix, _, op = schema.name.partition("::")
        if prefix == namespace:
            found.setdefault(op.lower(), set()).add(schema.overload_name.lower() or "default")
    return found


def _names_of(node: Node) -> set[str]:
    """Every spelling by which a user may mean the op of a node."""
    full = target_name(node.target).lower()
    namespace, _, rest = full.partition(".")
    op, _, overload = rest.partition(".")
    spellings = {full, rest, op, f"{namespace}.{op}"}
    if op.endswith("_copy"):
        view = op.removesuffix("_copy")
        spellings |= {
            f"{namespace}.{view}.{overload}",
            f"{view}.{overload}",
            view,
            f"{namespace}.{view}",
        }
    return spellings
