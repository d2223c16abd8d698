"""Constants of a program: parameters, buffers that nothing mutates, lifted literals."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops.call import (
    DECOMPRESS,
    DEQUANTIZE,
    NARROW,
    Reason,
    ReasonCode,
    target_name,
)
from coreml_delegate.ops.constraints import casts_codes


def constant_nodes(program: ExportedProgram) -> frozenset[Node]:
    """The placeholders of parameters, of buffers that nothing mutates and of lifted constants."""
    return frozenset(node for node, _ in _constants(program))


def constants_of(program: ExportedProgram) -> Iterator[tuple[Node, str, torch.Tensor | None]]:
    """Placeholder, name in the state and value, perhaps a fake one, of every constant."""
    for node, key in _constants(program):
        yield node, key, _value(program, key)


def narrow_constants(program: ExportedProgram) -> dict[Node, Reason]:
    """The calls on constants of 8 or 16 bits, which would be stored as they are, not as int32.

    Quantized weights are meant to be.
    """
    found: dict[Node, Reason] = {}
    for node, _ in _constants(program):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in NARROW:
            dtype = str(value.dtype).removeprefix("torch.")
            text = f"constant {node.name!r} is {dtype}, Core ML computes with int32"
            reason = Reason(ReasonCode.DTYPE, text, remedy="Store it as int32")
            found |= dict.fromkeys((u for u in node.users if not _takes_bytes(u)), reason)
    return found


def _takes_bytes(user: Node) -> bool:
    return target_name(user.target) in DEQUANTIZE | DECOMPRESS or casts_codes(user)


def _constants(program: ExportedProgram) -> Iterator[tuple[Node, str]]:
    signature = program.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    mutated = set(signature.buffers_to_mutate.values())
    for node in program.graph.find_nodes(op="placeholder"):
        key = lifted.get(node.name)
        if key is not None and key not in mutated:
            yield node, key


def _value(program: ExportedProgram, key: str) -> torch.Tensor | None:
    # Non-persistent buffers and lifted literals are not part of the state dict.
    value = program.state_dict.get(key, program.constants.get(key))
    return value if isinstance(value, torch.Tensor) else None
