"""Folding of arguments that Core ML needs as constants, before the program is partitioned.

Convolutions need constant weights. Weights that ``weight_norm``, spectral norms and weight
standardization compute from parameters are constant, too, once they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import OpCall, flatten, target_name
from coreml_delegate.ops.constants import foldable, stored_constants
from coreml_delegate.ops.constraints import IsConstant
from coreml_delegate.ops.edits import add_constant

_PREFIX = "coreml_delegate_folded"


def fold_constant_arguments(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with foldable arguments computed where a rule demands a constant.

    Args:
        program: In ATen dialect, with its real state; it is not changed.
    """
    if not _to_fold(program):
        return program
    copied = program.run_decompositions({})
    values: dict[Node, Any] = _constants(copied)
    for argument in _to_fold(copied):
        with torch.no_grad():
            value = _compute(argument, values)
        constant = add_constant(copied, f"{_PREFIX}_{argument.name}", value, argument)
        argument.replace_all_uses_with(constant)
    copied.graph.eliminate_dead_code()
    _remove_unused(copied)
    copied.graph_module.recompile()
    return copied


def _to_fold(program: ExportedProgram) -> list[Node]:
    """Return the foldable calls whose results have to be constants, each once."""
    demanded = [argument for node in program.graph.nodes for argument in _demanded(node)]
    return foldable(demanded, _constants(program)) if demanded else []


def _constants(program: ExportedProgram) -> dict[Node, Any]:
    return {
        node: value
        for node, _, value in stored_constants(program)
        if value is not None and not isinstance(value, FakeTensor)
    }


def _demanded(node: Node) -> Iterator[Node]:
    """Yield the arguments of a call that have to be constants and are results of calls."""
    rule = record_of(target_name(node.target)) if node.op == "call_function" else None
    names = [c.name for c in rule.constraints if isinstance(c, IsConstant)] if rule else []
    arguments = OpCall.of(node).arguments if names else {}
    for argument in flatten([arguments.get(name) for name in names]):
        if isinstance(argument, Node) and argument.op == "call_function":
            yield argument


def _compute(node: Node, values: dict[Node, Any]) -> Any:
    """Compute a foldable call, and the calls it depends on; results are added to ``values``."""
    pending = [node]
    while pending:
        call = pending[-1]
        missing = [n for n in call.all_input_nodes if n not in values]
        pending += missing
        if not missing:
            pending.pop()
            if call not in values:
                args, kwargs = map_arg((call.args, call.kwargs), values.__getitem__)
                values[call] = call.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return values[node]


def _remove_unused(program: ExportedProgram) -> None:
    """Remove the parameters and buffers that have no users left."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    specs = program.graph_signature.input_specs
    unused = {
        node.name: node for node in program.graph.find_nodes(op="placeholder") if not node.users
    }
    state: dict[str, Any] = program.state_dict
    for spec in list(specs):
        if spec.kind in kinds and spec.arg.name in unused:
            specs.remove(spec)
            program.graph.erase_node(unused[spec.arg.name])
            state.pop(str(spec.target), None)
            program.constants.pop(str(spec.target), None)
