"""Placeholder ops for ATen's recurrent ops, with shape rules that do not unroll them.

PyTorch unrolls recurrent ops step by step to infer shapes whenever a program is traced: once by
``torch.export``, a dozen times by ExecuTorch. This fixes a dynamic number of steps.
``dynamic_steps`` prevents it for ``torch.export``; afterwards a placeholder op with the schema and
the results of its op infers the shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from coreml_delegate.patches.torch import OpOverload, detect_fake_mode, schema_of, wrapped_kernels

_ATEN: Any = torch.ops.aten
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


PLACEHOLDER_OPS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        overload: _define_placeholder(overload)
        for overload in (
            _ATEN.lstm.input,
            _ATEN.gru.input,
            _ATEN.rnn_tanh.input,
            _ATEN.rnn_relu.input,
        )
    }
)
"""Placeholder ops by ATen op."""

ORIGINALS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {placeholder: overload for overload, placeholder in PLACEHOLDER_OPS.items()}
)
"""ATen ops by placeholder op."""


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
