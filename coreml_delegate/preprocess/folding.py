"""Arguments that have to be constants, computed of constants before the model is converted.

Convolutions take weights that are known: so are those that ``weight_norm``, spectral norms and
weight standardization make of parameters, and nothing has to make them again in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.op_rules import rule_of
from coreml_delegate.op_rules.constants import constants_of
from coreml_delegate.op_rules.constraints import IsConstant, is_folded, is_known
from coreml_delegate.op_rules.rule import OpCall, overload_of, target_name
from coreml_delegate.preprocess.graph_edits import add_constant

_PREFIX = "coreml_delegate_folded"


def fold(program: ExportedProgram) -> None:
    """Replace such arguments by their values; edits a subgraph in place."""
    wanted = [argument for node in program.graph.nodes for argument in _demanded(node)]
    if not any(is_folded(argument) for argument in wanted):
        return
    values: dict[Node, Any] = {
        node: value for node, _, value in constants_of(program) if value is not None
    }
    constants = frozenset(values)
    for argument in dict.fromkeys(wanted):
        if is_folded(argument) and is_known(argument, constants):
            with torch.no_grad():
                value = _computed(argument, values)
            name = f"{_PREFIX}_{argument.name}"
            argument.replace_all_uses_with(add_constant(program, name, value, argument))
    program.graph.eliminate_dead_code()


def _demanded(node: Node) -> Iterator[Node]:
    """The arguments of a call that have to be constants."""
    rule = rule_of(target_name(node.target)) if node.op == "call_function" else None
    if rule is None:
        return
    arguments = OpCall.of(node).arguments
    for constraint in rule.constraints:
        argument = arguments.get(constraint.name) if isinstance(constraint, IsConstant) else None
        if isinstance(argument, Node) and argument.op == "call_function":
            yield argument


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    """The result of a call on constants, and of those it is made of."""
    pending = [node]
    while pending:
        call = pending[-1]
        missing = [n for n in call.all_input_nodes if n not in values]
        if missing:
            pending += missing
            continue
        pending.pop()
        if call not in values:
            args, kwargs = map_arg((call.args, call.kwargs), values.__getitem__)
            values[call] = overload_of(call.target)(*args, **kwargs)
    return values[node]
