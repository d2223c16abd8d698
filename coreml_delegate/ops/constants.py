"""Two kinds of constants in a program: stored and derived.

stored
    The program has the value: a parameter, a buffer that nothing mutates, a lifted literal.
derived
    Stored, or dequantized from derived values. Core ML stores quantized values and dequantizes them
    itself, so a rule that demands a constant takes a derived one.

A value computed from stored constants may become stored: see ``transforms.constant_folding``.

The quantizer works on modules, whose constants are attributes: see ``attribute_constants``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from coreml_delegate.ops.call import (
    CASTS,
    DECOMPRESS,
    DEQUANTIZE,
    NARROW,
    Reason,
    ReasonCode,
    target_name,
)
from coreml_delegate.patches.torch import FakeTensor

_MARK = "coreml_delegate_constant"
FOLDED = "coreml_delegate_folded"
NOT_FOLDED = "coreml_delegate_not_folded"
"""Keys below ``node.meta["custom"]``, which decompositions keep."""

Inputs = Mapping[int, torch.Tensor | None]
"""Inputs of a branch that are constants of the outer program, by position; None if not at hand."""
NO_INPUTS: Inputs = MappingProxyType({})


# Stored


def stored_nodes(program: ExportedProgram) -> frozenset[Node]:
    """Return the placeholders of stored constants."""
    return frozenset(node for node, _ in _stored_placeholders(program))


def stored_constants(program: ExportedProgram) -> Iterator[tuple[Node, str, torch.Tensor | None]]:
    """Yield placeholder, name in the state and value of every stored constant.

    The value may be a fake tensor; it is None where the program does not have it.
    """
    for node, key in _stored_placeholders(program):
        yield node, key, state_value(program, key)


def known_values(program: ExportedProgram, inputs: Inputs) -> dict[Node, torch.Tensor | None]:
    """Return the values of the stored constants and of the constant ``inputs`` of a branch."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    names = list(program.graph_signature.user_inputs)
    values = {node: value for node, _, value in stored_constants(program)}
    return values | {nodes[str(names[position])]: value for position, value in inputs.items()}


def state_value(program: ExportedProgram, key: str) -> torch.Tensor | None:
    """Return a parameter, buffer or lifted constant by its name in the state, None if missing."""
    # Non-persistent buffers and lifted literals are not part of the state dict.
    value = program.state_dict.get(key, program.constants.get(key))
    return value if isinstance(value, torch.Tensor) else None


def _stored_placeholders(program: ExportedProgram) -> Iterator[tuple[Node, str]]:
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


def mark_stored(program: ExportedProgram) -> None:
    """Mark stored placeholders in their metadata, for rewrites, which see only one node."""
    for node, _, value in stored_constants(program):
        node.meta[_MARK] = value


def is_stored(argument: Any) -> bool:
    """Return whether an argument is a number, None or a constant that ``mark_stored`` marked."""
    return not isinstance(argument, Node) or argument.op == "get_attr" or _MARK in argument.meta


def stored_value(argument: Any) -> torch.Tensor | None:
    """Return the value of a stored argument as a tensor; None if it is not at hand."""
    if isinstance(argument, int | float):
        return torch.tensor(argument)
    value = argument.meta.get(_MARK) if isinstance(argument, Node) else None
    return None if isinstance(value, FakeTensor) else value


def attribute_constants(graph: Graph) -> frozenset[Node]:
    """Return the attributes of a module's graph, and the calls computed only from attributes."""
    constants: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_computed = node.op == "call_function" and bool(sources)
        if node.op == "get_attr" or (is_computed and constants.issuperset(sources)):
            constants.add(node)
    return frozenset(constants)


# Derived


def is_derived(node: Node, constants: Collection[Node]) -> bool:
    """Return whether a node is in ``constants``, an attribute, or dequantized from such nodes."""
    if node.op == "get_attr" or node in constants:
        return True
    if node.op != "call_function" or not _dequantizes(node):
        return False
    return all(is_derived(source, constants) for source in node.all_input_nodes)


def casts_codes(node: Node) -> bool:
    """Return whether a call only widens the indices of compressed weights."""
    return (
        node.op == "call_function"
        and target_name(node.target) in CASTS
        and bool(node.users)
        and all(target_name(user.target) in DECOMPRESS for user in node.users)
    )


# Folded


def note_fold(constant: Node, growth: int) -> None:
    """Note a folded value and its growth of the program, in bytes, at its users."""
    value = constant.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    entry = {constant.name: (f"{dtype}{list(value.shape)}", growth)}
    for user in constant.users:
        custom = user.meta.get("custom") or {}
        user.meta["custom"] = {**custom, FOLDED: {**custom.get(FOLDED, {}), **entry}}


def noted_folds(nodes: Iterable[Node]) -> dict[str, tuple[str, int]]:
    """Return dtype and shape, and growth, of the folded values that ``note_fold`` noted."""
    folds: dict[str, tuple[str, int]] = {}
    for node in nodes:
        folds |= (node.meta.get("custom") or {}).get(FOLDED, {})
    return folds


# Refused


def narrow_constants(program: ExportedProgram) -> dict[Node, Reason]:
    """Return the calls on stored constants of 8 or 16 bits, each with the reason to refuse it.

    Core ML would store them with 8 or 16 bits, but compute with int32. Quantized weights, for which
    this storage is meant, are not refused.
    """
    reasons: dict[Node, Reason] = {}
    for node, _ in _stored_placeholders(program):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in NARROW:
            dtype = str(value.dtype).removeprefix("torch.")
            text = f"constant {node.name!r} is {dtype}, Core ML computes with int32"
            reason = Reason(ReasonCode.DTYPE, text, remedy="Store it as int32")
            reasons |= dict.fromkeys((u for u in node.users if not _dequantizes(u)), reason)
    return reasons


def _dequantizes(user: Node) -> bool:
    return target_name(user.target) in DEQUANTIZE | DECOMPRESS or casts_codes(user)
