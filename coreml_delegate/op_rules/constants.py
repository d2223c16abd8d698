"""Constants of a program, and those whose values Core ML cannot hold.

Core ML has no int64: coremltools stores int64 constants as int32 and drops the upper half without
a word. A node that uses such a constant stays on the CPU. ExecuTorch shows partitioners a program
whose state is fake, without values; so what its earlier form, in ATen dialect, tells is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules.constraints import casts_codes
from coreml_delegate.op_rules.rule import (
    DECOMPRESS,
    DEQUANTIZE,
    INT32,
    NARROW,
    OpCall,
    Reason,
    ReasonCode,
    numbers_fit,
    target_name,
)


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


class WideConstants:
    """What is known about int64 constants with values beyond int32, by their names in the state."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        self._seen: set[str] = set()
        self._has_literals = False

    def note(self, program: ExportedProgram) -> None:
        """Look at the values in a program.

        Args:
            program: In ATen dialect, or edge dialect with its real state.
        """
        for _, key in _constants(program):
            self._seen.add(key)
            extent = _extent(_value(program, key))
            if extent is not None:
                self._ranges[key] = extent
        calls = (node for node in program.graph.nodes if node.op == "call_function")
        self._has_literals |= any(numbers_fit(OpCall.of(node)) is not None for node in calls)

    def obstacles(self, program: ExportedProgram) -> dict[Node, Reason]:
        """The calls in ``program`` that such a constant reaches as an integer, with the reason."""
        wide: dict[Node, Reason] = {}
        for node, key in _constants(program):
            reason = self._reason(node, key, _value(program, key))
            if reason is not None:
                wide[node] = reason
        found: dict[Node, Reason] = {}
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            reasons = [wide[n] for n in node.all_input_nodes if n in wide]
            if reasons:
                found[node] = reasons[0]
            reason = found.get(node) or numbers_fit(OpCall.of(node))
            if reason is not None and _is_int64(node):
                wide[node] = reason
        return found

    def _reason(self, node: Node, key: str, value: torch.Tensor | None) -> Reason | None:
        extent = _extent(value) or self._ranges.get(key)
        if extent is not None:
            text = f"constant {node.name!r} has int64 values {extent[0]} to {extent[1]}"
        elif self._has_literals and key not in self._seen and _is_hidden_integer(value):
            # On the way to edge dialect, ExecuTorch made it of a number, perhaps of that one.
            text = f"constant {node.name!r} is a number that may be beyond int32"
        else:
            return None
        return Reason(
            ReasonCode.DTYPE, f"{text}, Core ML has int32", remedy="Keep its values within int32"
        )


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


def _extent(value: torch.Tensor | None) -> tuple[int, int] | None:
    """Smallest and largest value of a tensor that does not fit int32; None for all others."""
    if value is None or isinstance(value, FakeTensor):
        return None
    if value.dtype is not torch.int64 or not value.numel():
        return None
    low, high = (int(limit) for limit in torch.aminmax(value))
    return None if INT32.min <= low and high <= INT32.max else (low, high)


def _is_int64(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.int64 for v in values)


def _is_hidden_integer(value: torch.Tensor | None) -> bool:
    return isinstance(value, FakeTensor) and value.dtype is torch.int64 and value.dim() == 0
