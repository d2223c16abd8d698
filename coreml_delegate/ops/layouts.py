"""Tensors that do not lie row-major in memory, which Core ML does not take at a boundary.

What counts is a layout that comes in from outside, that a memory format demands, or that a call
on the CPU gives its result. Views of ATen dialect have strides too, but ExecuTorch makes copies of
them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coreml_delegate.ops.call import Reason, ReasonCode, overload_of


def layout_obstacles(program: ExportedProgram, on_cpu: Collection[Node] = ()) -> dict[Node, Reason]:
    """The calls on tensors in another layout, each with the reason.

    Args:
        program: In ATen or edge dialect.
        on_cpu: The calls that are known not to be delegated.
    """
    inputs = set(program.graph_signature.user_inputs)
    strided: set[Node] = set()
    found: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        sources = [n for n in node.all_input_nodes if n in strided]
        if node.op == "call_function" and sources:
            found[node] = Reason(
                ReasonCode.LAYOUT,
                f"{sources[0].name!r} has dim order {_order(sources[0])}, Core ML is row-major",
                remedy="Call .contiguous() on it, in the model or before the export",
            )
        comes_in = node.op == "placeholder" and node.name in inputs
        from_cpu = node in on_cpu and not _is_view(node)
        if (comes_in or sources or from_cpu or _demands(node)) and _order(node) is not None:
            strided.add(node)
    return found


def _is_view(node: Node) -> bool:
    overload = overload_of(node.target)
    return isinstance(overload, OpOverload) and overload.is_view


def _demands(node: Node) -> bool:
    formats = node.kwargs.get("memory_format"), node.kwargs.get("dim_order")
    return any(f is not None for f in formats)


def _order(node: Node) -> tuple[int, ...] | None:
    """The dim order of the node's result, None if it is row-major or no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return None if is_row_major(value) else tuple(value.dim_order())


def is_row_major(value: torch.Tensor) -> bool:
    """Whether the last dimension is the innermost, and so on, whatever strides have those of one.

    A transposed dimension of one element moves nothing, but ``dim_order`` tells of it.
    """
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size <= 1:
            continue
        # A plain comparison of symbolic sizes would fix them.
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True
