"""Calls that stay on the CPU in a program for the neural engine, by the rules of ``device_check``.

Core ML would run them on the CPU as well, in the middle of its model. ExecuTorch's kernels run them
between the models, so that the models themselves stay on the neural engine. A call for which
ExecuTorch has no kernel stays in its model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from coreml_delegate.ops import Reason, ReasonCode, flops_of, record_of
from coreml_delegate.ops.call import OpCall, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.partition.verdicts.cpu_kernels import runs_on_cpu
from coreml_delegate.partition.verdicts.parts import is_part, refuse_results
from coreml_delegate.targets import LARGEST_DIMENSION

_CHEAP = 16
"""FLOPs for each element of the result up to which a call is no work for the neural engine."""

TRIFLE = 0.001
"""Share of all FLOPs up to which calls are not worth a transfer to the neural engine."""


def device_refusals(program: ExportedProgram, refused: Collection[Node]) -> dict[Node, Reason]:
    """Return further calls to leave to the CPU in a program for the neural engine.

    Args:
        program: In ATen or edge dialect.
        refused: The calls that are refused already.
    """
    constants = _constants(program)
    reasons: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node in refused or node in constants or not _may_leave(node):
            continue
        obstacle = next(filter(None, (check(node, constants) for check in _CHECKS)), None)
        if obstacle is not None:
            reasons[node] = Reason(ReasonCode.DEVICE, f"{obstacle}: {_WHY}", _REMEDY)
    for node in _at_the_ends(program, {*refused, *reasons}, constants):
        text = f"a dimension above {LARGEST_DIMENSION:,} before or after the model: {_WHY}"
        reasons[node] = Reason(ReasonCode.DEVICE, text, _REMEDY)
    for node in _only_for_the_cpu(program, reasons.keys(), refused, constants):
        reasons[node] = Reason(ReasonCode.DEVICE, "only calls on the CPU need it", _REMEDY)
    return refuse_results(reasons)


_WHY = "the neural engine does not run it"
_REMEDY = "Lower for no device to have Core ML run it"


def _constants(program: ExportedProgram) -> Set[Node]:
    """Return the stored constants, and the calls that compute with constants only."""
    constants = set(stored_nodes(program))
    for node in program.graph.nodes:
        if node.op == "call_function" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return constants


def _may_leave(node: Node) -> bool:
    return node.op == "call_function" and not is_part(node) and runs_on_cpu(node)


def _by_record(node: Node, constants: Set[Node]) -> str | None:
    record = record_of(target_name(node.target))
    return None if record is None else record.neural_engine_obstacle(OpCall.of(node, constants))


def _index_arithmetic(node: Node, _: Set[Node]) -> str | None:
    results = list(tensors_of(node.meta.get("val")))
    if not results or any(tensor.is_floating_point() for tensor in results):
        return None
    return f"arithmetic in {str(results[0].dtype).removeprefix('torch.')}"


def _computed_size(node: Node, _: Set[Node]) -> str | None:
    new = _unbacked(node).difference(*map(_unbacked, node.all_input_nodes))
    return "a result whose size depends on values" if new else None


def _unbacked(node: Node) -> frozenset[object]:
    return frozenset(s for t in tensors_of(node.meta.get("val")) for s in free_unbacked_symbols(t))


_CHECKS: tuple[Callable[[Node, Set[Node]], str | None], ...] = (
    _by_record,
    _index_arithmetic,
    _computed_size,
)


def _at_the_ends(
    program: ExportedProgram, refused: Set[Node], constants: Set[Node]
) -> Iterator[Node]:
    """Yield cheap calls on large dimensions that no delegated call precedes, or follows."""
    on_cpu = set(refused)
    nodes = list(program.graph.nodes)
    for order, neighbours in (
        (nodes, lambda node: node.all_input_nodes),
        (reversed(nodes), lambda node: node.users),
    ):
        for node in order:
            if node in on_cpu or node in constants or not _is_cheap(node):
                continue
            if all(_is_outside(n, on_cpu, constants) for n in neighbours(node)):
                on_cpu.add(node)
                yield node


def _only_for_the_cpu(
    program: ExportedProgram, moved: Set[Node], refused: Collection[Node], constants: Set[Node]
) -> Iterator[Node]:
    """Yield calls of little work whose results only calls read that have moved to the CPU.

    Of calls on constants, one reader on the CPU is enough: they take no input.
    """
    on_cpu = set(moved)
    nodes = program.graph.nodes
    most = TRIFLE * sum(flops_of(node) for node in nodes if node.op == "call_function")
    for node in reversed(nodes):
        if node in on_cpu or node in refused or not node.users or not _may_leave(node):
            continue
        is_enough = any if node in constants else all
        if is_enough(user in on_cpu for user in node.users) and flops_of(node) <= most:
            on_cpu.add(node)
            yield node


def _is_outside(node: Node, on_cpu: Set[Node], constants: Set[Node]) -> bool:
    return node.op != "call_function" or node in on_cpu or node in constants


def _is_cheap(node: Node) -> bool:
    """Return whether a call has a kernel, a result of a large dimension, and little work."""
    results = list(tensors_of(node.meta.get("val"))) if _may_leave(node) else []
    sizes = [size for tensor in results for size in tensor.shape if isinstance(size, int)]
    count = sum(tensor.numel() for tensor in results if not _is_symbolic(tensor))
    return max(sizes, default=0) > LARGEST_DIMENSION and flops_of(node) <= _CHEAP * count


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)
