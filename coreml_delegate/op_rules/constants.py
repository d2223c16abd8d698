"""Constants whose values Core ML cannot hold.

Core ML has no int64: coremltools stores int64 constants as int32 and drops the upper half without a
word. A node that uses such a constant stays on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules.rule import INT32, Reason, ReasonCode


def constant_obstacles(program: ExportedProgram) -> dict[Node, Reason]:
    """The calls that use an int64 constant with values beyond int32, each with the reason.

    Args:
        program: In ATen or edge dialect.
    """
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[Node, Reason] = {}
    for name, tensor in _constants(program):
        if name not in placeholders or tensor.dtype is not torch.int64 or not tensor.numel():
            continue
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low >= INT32.min and high <= INT32.max:
            continue
        reason = Reason(
            ReasonCode.DTYPE,
            f"constant {name!r} has int64 values {low} to {high}, Core ML has int32",
            remedy="Keep its values within int32",
        )
        found.update(dict.fromkeys(placeholders[name].users, reason))
    return found


def _constants(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    signature = program.graph_signature
    lifted = (
        signature.inputs_to_parameters
        | signature.inputs_to_buffers
        | signature.inputs_to_lifted_tensor_constants
    )
    for name, key in lifted.items():
        # Non-persistent buffers and lifted literals are not part of the state dict.
        value = program.state_dict.get(key, program.constants.get(key))
        # ExecuTorch asks once more after lowering, when the state has become fake.
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            yield name, value
