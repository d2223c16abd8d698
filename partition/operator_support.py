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
from coreml_delegate.op_rules.constants import constant_obstacles
from coreml_delegate.op_rules.rule import target_name
from coreml_delegate.targets import Opset


class CoreMLOperatorSupport(OperatorSupportBase):
    """Verdicts per node, remembered with their reasons.

    Args:
        program: The program the nodes are of.
        skip: Op names to keep out, see ``normalize_skips``.
        target: Opset of the deployment target, or None.
    """

    def __init__(
        self, program: ExportedProgram, skip: frozenset[str], target: Opset | None
    ) -> None:
        super().__init__()
        self._constants = constant_obstacles(program)
        self._skip = skip
        self._target = target
        self._verdicts: dict[Node, Reason | None] = {}

    def obstacle(self, node: Node) -> Reason | None:
        """Why a node is not delegated, or None if it is."""
        if node not in self._verdicts:
            self._verdicts[node] = self._judge(node)
        return self._verdicts[node]

    def is_node_supported(self, submodules: Mapping[str, Any], node: Node) -> bool:
        """The question of torch's partitioner; ``get_attr`` nodes follow their users."""
        return node.op == "get_attr" or self.obstacle(node) is None

    def _judge(self, node: Node) -> Reason | None:
        if node.op == "call_function" and _names_of(node) & self._skip:
            return Reason(
                ReasonCode.SKIPPED,
                f"{target_name(node.target)} is in skip_ops_for_coreml_delegation",
                remedy="Remove it from the list",
            )
        return op_rules.obstacle(node, self._target) or self._constants.get(node)


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
    parts = dotted.split(".")
    namespaces = [n for n in _NAMESPACES if n == parts[0]] or ["aten"]
    op = parts[1] if parts[0] in _NAMESPACES and len(parts) > 1 else parts[0]
    known = _known_names(namespaces[0])
    if op not in known:
        near = difflib.get_close_matches(op, known, n=3)
        raise OptionError(
            "skip_ops_for_coreml_delegation names an unknown operator",
            got=repr(name),
            expected=f"perhaps {', '.join(near)}" if near else "an ATen operator name",
        )
    return dotted


_NAMESPACES = ("aten", "dim_order_ops", "quantized_decomposed", "torchao")


def _known_names(namespace: str) -> set[str]:
    schemas = torch._C._jit_get_all_schemas()
    prefix = f"{namespace}::"
    return {s.name.removeprefix(prefix).lower() for s in schemas if s.name.startswith(prefix)}


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
