"""Recurrent ops of ATen without their unrolling: their shapes, and ops that stand in for them.

To know the shapes of their results PyTorch unrolls the recurrent ops, step by step, whenever a
program is traced: once by ``torch.export``, a dozen times by ExecuTorch. A number of steps that
was to be dynamic becomes fixed thereby. ``dynamic_steps`` prevents it for ``torch.export``;
afterwards a stand-in, which has the schema of its op and computes the same, tells the shapes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload

_ATEN: Any = torch.ops.aten
_OWN: Any = torch.ops.coreml_delegate
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")
_LOCK = threading.RLock()


def _shapes(
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


def _stand_in(overload: Any) -> OpOverload:
    schema = str(overload._schema).removeprefix("aten::")
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, overload, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _shapes, "Meta")
    packet, _, suffix = name.partition(".")
    return getattr(getattr(_OWN, packet), suffix)


PLACEHOLDER_OPS: Mapping[OpOverload, OpOverload] = MappingProxyType(
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
    {own: overload for overload, own in PLACEHOLDER_OPS.items()}
)
"""By the op that stands for it."""


@contextmanager
def dynamic_steps() -> Generator[None]:
    """Let ``torch.export`` trace recurrent layers as they are, whatever their number of steps.

    ``torch.nn.LSTM``, ``GRU`` and ``RNN`` may have a dynamic number of steps then, which otherwise
    ``torch.export`` refuses. The time to export does not depend on the number.

    The tables of PyTorch are changed meanwhile, for the whole process. Layers of real tensors
    compute what they always do.
    """
    with _LOCK:
        tables: list[tuple[Any, dict[Any, Any]]] = [
            (op, dict(op.py_kernels)) for op in PLACEHOLDER_OPS
        ]
        try:
            for op, kernels in tables:
                _set_kernels(op, {key: _by_shape(kernel) for key, kernel in kernels.items()})
            yield
        finally:
            for op, kernels in tables:
                _set_kernels(op, kernels)


def _by_shape(kernel: Any) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        is_traced = detect_fake_mode(arguments[:1]) is not None
        return _shapes(*arguments) if is_traced else kernel(*arguments)

    return call


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    # Private to torch, whose release this project pins.
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
