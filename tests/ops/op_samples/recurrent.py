"""Calls of recurrent layers."""

from __future__ import annotations

from typing import Any

from ops.op_samples.sample import Rejected, Sample, TensorArg, accept, reject, w, x

from coreml_delegate.ops import ReasonCode

_LSTM, _GRU = "aten.lstm.input", "aten.gru.input"
_TANH, _RELU = "aten.rnn_tanh.input", "aten.rnn_relu.input"
_GATES = {_LSTM: 4, _GRU: 3, _TANH: 1, _RELU: 1}
_BATCH, _WIDTH, _UNITS = 2, 4, 3


def _arguments(
    target: str,
    *,
    steps: int = 3,
    layers: int = 1,
    bias: bool = True,
    both: bool = False,
    batch_first: bool = False,
    state: TensorArg | None = None,
    weight: Any = w,
    projected: int = 0,
    dropout: float = 0.0,
) -> tuple[Any, ...]:
    """The arguments of a call; states are inputs unless ``state`` is given, dropout is training."""
    directions, rows = (2 if both else 1), _GATES[target] * _UNITS
    hidden = projected or _UNITS
    parameters = []
    for layer in range(layers):
        for _ in range(directions):
            parameters += [weight(rows, hidden * directions if layer else _WIDTH)]
            parameters += [weight(rows, hidden)]
            parameters += [weight(rows), weight(rows)] if bias else []
            parameters += [weight(projected, _UNITS)] if projected else []
    count = layers * directions
    states = [state or x(count, _BATCH, hidden), state or x(count, _BATCH, _UNITS)]
    shape = (_BATCH, steps, _WIDTH) if batch_first else (steps, _BATCH, _WIDTH)
    return (
        x(*shape),
        states if target == _LSTM else states[0],
        parameters,
        *(bias, layers, dropout, dropout > 0, both, batch_first),
    )


def _accepted(target: str, note: str, takes: tuple[int, ...] | None = None, **form: Any) -> Sample:
    # Decomposed, a layer is dozens of ops for each step: one of each kind is enough.
    return accept(target, *_arguments(target, **form), note=note, takes=takes, core=not note)


def _rejected(target: str, text: str, note: str, compare: bool = True, **form: Any) -> Rejected:
    return reject(
        ReasonCode.ARGUMENT, text, target, *_arguments(target, **form), note=note, compare=compare
    )


ACCEPTED = (
    *(
        sample
        for target in _GATES
        for sample in (
            _accepted(target, ""),
            _accepted(target, "stack", layers=2, both=True, batch_first=True),
            _accepted(target, "no-bias", bias=False, both=True),
        )
    ),
    _accepted(_LSTM, "projected", projected=2),
    _accepted(_LSTM, "projected-stack", projected=2, layers=2, both=True, batch_first=True),
    _accepted(_LSTM, "projected-no-bias", projected=1, bias=False, both=True),
    *(
        sample
        for target in (_LSTM, _GRU)
        for sample in (
            _accepted(target, "last", takes=(1,), layers=3),
            _accepted(target, "steps", takes=(0,), both=True),
            _accepted(target, "one-step", steps=1, both=True),
            _accepted(target, "zeros", state=w(1, _BATCH, _UNITS, low=0.0, high=0.0)),
        )
    ),
)

REJECTED = (
    *(
        rejected
        for target in _GATES
        for rejected in (
            _rejected(
                target, "'params' is computed, Core ML takes a constant", "weights", weight=x
            ),
            _rejected(
                target,
                "dropout at training draws random numbers",
                "dropout",
                compare=False,
                layers=2,
                dropout=0.5,
            ),
        )
    ),
)
