"""Stacks of recurrent layers against PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_runs import assert_close, run
from torch import nn

from coreml_delegate.mil.compose import Var, recurrent
from coreml_delegate.mil.compose.recurrent import Stack
from coreml_delegate.runtime.engines.base import Engine
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_LAYERS: dict[str, tuple[Callable[..., nn.RNNBase], Callable[..., Any]]] = {
    "lstm": (nn.LSTM, recurrent.lstm),
    "projected lstm": (functools.partial(nn.LSTM, proj_size=3), recurrent.lstm),
    "gru": (nn.GRU, recurrent.gru),
    "tanh": (nn.RNN, functools.partial(recurrent.rnn, activation="tanh")),
    "relu": (
        functools.partial(nn.RNN, nonlinearity="relu"),
        functools.partial(recurrent.rnn, activation="relu"),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("engine", [REFERENCE, OPENVINO], ids=lambda e: e.name)
@pytest.mark.parametrize("name", _LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "bidirectional"])
def test_layers(engine: Engine, name: str, bidirectional: bool) -> None:
    make, composition = _LAYERS[name]
    torch.manual_seed(0)
    layer = make(4, 5, num_layers=2, bias=bidirectional, bidirectional=bidirectional)
    stack = Stack.of(
        [parameter.detach().numpy() for parameter in layer._flat_weights],
        layers=2,
        has_biases=bidirectional,
        is_bidirectional=bidirectional,
        batch_first=False,
    )
    rows = 4 if bidirectional else 2
    x = torch.randn(6, 2, 4)
    widths = [layer.proj_size or 5, 5] if isinstance(layer, nn.LSTM) else [5]
    states = [torch.randn(rows, 2, width) for width in widths]
    with torch.no_grad():
        steps, last = layer(x, tuple(states) if len(states) > 1 else states[0])
    expected = [steps, *(last if isinstance(last, tuple) else (last,))]

    def build(x: Var, **initial: Var) -> Any:
        return composition(x, list(initial.values()), stack)

    inputs = {"x": x.numpy()} | {f"s{n}": state.numpy() for n, state in enumerate(states)}
    for actual, tensor in zip(run(engine, build, inputs), expected, strict=True):
        assert_close(actual, np.asarray(tensor))
