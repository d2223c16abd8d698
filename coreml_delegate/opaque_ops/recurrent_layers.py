"""Recurrent layers, which PyTorch unrolls step by step: protect, translate, restore.

PyTorch unrolls recurrent ops to infer shapes whenever a program is traced: once by
``torch.export``, a dozen times by ExecuTorch. This fixes a dynamic number of steps.
``dynamic_steps`` prevents it for ``torch.export``; afterwards a placeholder op with the schema and
the results of its op infers the shapes. A call that Core ML refuses becomes the ATen op again, so
that its parts can be delegated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.mil.compose import recurrent
from coreml_delegate.mil.compose.recurrent import Stack
from coreml_delegate.ops import Reason, obstacle
from coreml_delegate.ops.call import RECURRENT, is_placeholder_op, overload_of, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.edits import arguments_of, decompose, shape_of
from coreml_delegate.ops.mil_ops import value_in
from coreml_delegate.patches.torch import OpOverload, detect_fake_mode, schema_of, wrapped_kernels
from coreml_delegate.targets import Opset

_OWN: Any = torch.ops.coreml_delegate
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")


def _result_shapes(
    sequence: torch.Tensor, states: torch.Tensor | list[torch.Tensor], *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Return empty tensors with the shapes of a recurrent op's results.

    Args:
        sequence: [steps, batch, width] or [batch, steps, width].
        states: [layers * directions, batch, units] each.
        arguments: Further arguments, as of ``aten.lstm.input``.
    """
    *_, is_bidirectional, _ = arguments
    listed = [states] if isinstance(states, torch.Tensor) else states
    width = listed[0].shape[-1] * (2 if is_bidirectional else 1)
    hidden = sequence.new_empty([*sequence.shape[:-1], width])
    return hidden, *(state.new_empty(state.shape) for state in listed)


def _define_placeholder(overload: Any) -> OpOverload:
    schema = str(schema_of(overload)).removeprefix("aten::")
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, overload, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _result_shapes, "Meta")
    packet, _, suffix = name.partition(".")
    return getattr(getattr(_OWN, packet), suffix)


PLACEHOLDER_OPS: Mapping[OpOverload, OpOverload] = {
    overload: _define_placeholder(overload) for overload in RECURRENT
}
"""Placeholder ops by ATen op."""


@contextmanager
def dynamic_steps() -> Generator[None]:
    """Let ``torch.export`` trace recurrent layers without unrolling them.

    ``torch.nn.LSTM``, ``GRU`` and ``RNN`` may then have a dynamic number of steps, which
    ``torch.export`` otherwise refuses. The export time does not depend on the number of steps.

    It holds for this thread; other threads wait to enter. Layers with real tensors compute as
    usual.
    """
    with wrapped_kernels(PLACEHOLDER_OPS, _infer_shapes_when_traced):
        yield


def _infer_shapes_when_traced(kernel: Any) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        is_traced = detect_fake_mode(arguments[:1]) is not None
        return _result_shapes(*arguments) if is_traced else kernel(*arguments)

    return call


def protect_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with placeholder ops for recurrent layers.

    Args:
        program: In ATen dialect; it is not changed.
    """
    return decompose(program, PLACEHOLDER_OPS)


def restore_refused_layers(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program``, with ATen ops in place of placeholder ops that Core ML refuses.

    Args:
        program: From ``protect_recurrent_layers``, perhaps transformed further; it is changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.

    Raises:
        UnsupportedOperatorError: See ``require_fixed_steps``.
    """
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_placeholder_op(node.target):
            continue
        reason = veto(node) or obstacle(node, target, constants)
        if reason is not None:
            require_fixed_steps(node, reason)
            node.target = overload_of(node.target)
    program.graph_module.recompile()
    return program


def require_fixed_steps(node: Node, reason: Reason) -> None:
    """Check that a recurrent layer that Core ML does not take can be unrolled.

    Args:
        node: The call.
        reason: Why it stays out of Core ML.

    Raises:
        UnsupportedOperatorError: It has a dynamic number of steps.
    """
    arguments = arguments_of(node)
    steps = shape_of(arguments["input"])[1 if arguments["batch_first"] else 0]
    if not isinstance(steps, int):
        raise UnsupportedOperatorError(
            "a recurrent layer of a dynamic number of steps cannot stay out of Core ML",
            got=f"{target_name(node.target)} of {steps} steps: {reason}",
            remedy="Export it with a fixed number of steps, or let Core ML take it",
        )


# Translation


def _of_layers(function: Callable[..., Any], *options: str) -> Callable[[Any, Any], None]:
    """Return the translation of a call of a recurrent op by a composition of its layers."""

    def translate(context: Any, node: Any) -> None:
        x, states, stack = _layers(context, node)
        context.add(function(x, states, stack, *options), torch_name=node.name)

    return translate


def _layers(context: Any, node: Any) -> tuple[Any, list[Any], Stack]:
    """Return sequence, initial states and layers of a call of a recurrent op."""
    x, states, parameters, has_biases, count, _, _, bidirectional, batch_first = node.inputs
    names = [states] if isinstance(states, str) else states
    arrays = [np.asarray(value_in(context, name), np.float32) for name in parameters]
    stack = Stack.of(
        arrays,
        layers=int(count),
        has_biases=bool(has_biases),
        is_bidirectional=bool(bidirectional),
        batch_first=bool(batch_first),
    )
    return context[x], [context[name] for name in names], stack


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    "coreml_delegate::lstm.input": _of_layers(recurrent.lstm),
    "coreml_delegate::gru.input": _of_layers(recurrent.gru),
    "coreml_delegate::rnn_tanh.input": _of_layers(recurrent.rnn, "tanh"),
    "coreml_delegate::rnn_relu.input": _of_layers(recurrent.rnn, "relu"),
}
"""Translations of the placeholder ops; each takes coremltools' context and the node."""
