"""Recurrent layers, which PyTorch's decompositions would unroll into an op or more per step."""

from __future__ import annotations

from functools import partial

from torch.fx import Node

from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.call import OpCall, ReasonCode, overload_of
from coreml_delegate.ops.constraints import IsConstant, holds
from coreml_delegate.ops.flops import elements
from coreml_delegate.ops.record import OpRecord

_MATRIX = 2


def _has_no_dropout(call: OpCall) -> bool:
    """Dropout between layers is off; it is active only in training."""
    arguments = call.arguments
    return not (arguments["train"] and arguments["dropout"] and arguments["num_layers"] > 1)


def _flops(call: OpCall) -> int:
    """Two per matrix weight, step and sequence; the gates are negligible."""
    inputs = call.tensor("input")
    if inputs is None:
        return 0
    rows = elements(inputs[..., 0])
    matrices = (tensor for _, tensor in call.tensors("params") if tensor.dim() == _MATRIX)
    return 2 * rows * sum(map(elements, matrices))


def _use_placeholder(node: Node) -> None:
    """Replace the ATen op with its placeholder op, whose translation is registered."""
    node.target = mil_ops.placeholder_op(overload_of(node.target))


_op = partial(
    OpRecord,
    constraints=(
        # The gates of PyTorch are in another order.
        IsConstant("params", may_be_dequantized=False),
        holds(_has_no_dropout, ReasonCode.ARGUMENT, "dropout at training draws random numbers"),
    ),
    rewrite=_use_placeholder,
    flops=_flops,
)

RECORDS = (
    _op("aten.lstm.input"),
    _op("aten.gru.input"),
    _op("aten.rnn_tanh.input"),
    _op("aten.rnn_relu.input"),
)
