"""Ops that stand in a program for the recurrent ones of ATen, while it is lowered.

To know the shapes of their results PyTorch unrolls the recurrent ops, step by step, each time that a
program is traced, as ExecuTorch's passes do a dozen times; a number of steps that is dynamic becomes
fixed thereby. A stand-in has the schema of its op, computes the same, and tells the shapes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

_ATEN: Any = torch.ops.aten
_OWN: Any = torch.ops.coreml_delegate
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")


def shapes_of_results(
    sequence: torch.Tensor, states: torch.Tensor | list[torch.Tensor], *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Return tensors without values, of the shapes that a recurrent op results in.

    Args:
        sequence: [steps, batch, width] or [batch, steps, width].
        states: [layers * directions, batch, units] each.
        arguments: The others, as ``aten.lstm.input`` has them.
    """
    *_, is_bidirectional, _ = arguments
    given = [states] if isinstance(states, torch.Tensor) else states
    width = given[0].shape[-1] * (2 if is_bidirectional else 1)
    hidden = sequence.new_empty([*sequence.shape[:-1], width])
    return hidden, *(state.new_empty(state.shape) for state in given)


def _stand_in(overload: OpOverload) -> OpOverload:
    schema = str(overload._schema).removeprefix("aten::")
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, overload, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes_of_results, "Meta")
    packet, _, suffix = name.partition(".")
    return getattr(getattr(_OWN, packet), suffix)


STAND_INS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        overload: _stand_in(overload)
        for overload in (
            _ATEN.lstm.input,
            _ATEN.gru.input,
            _ATEN.rnn_tanh.input,
            _ATEN.rnn_relu.input,
        )
    }
)
"""By the op of ATen."""

ORIGINALS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {own: overload for overload, own in STAND_INS.items()}
)
"""By the op that stands for it."""
