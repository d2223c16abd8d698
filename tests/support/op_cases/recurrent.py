"""Recurrent layers: against torch where torch has the layer, else against the equations."""

from __future__ import annotations

import numpy as np
import torch

from coreml_delegate.targets import Opset
from support.op_cases.case import OpCase, normal

_I17 = Opset.iOS17

_SEQUENCE, _H, _C = normal(5, 2, 3), normal(2, 4, seed=1), normal(2, 4, seed=2)
_H2, _C2 = normal(2, 8, seed=1), normal(2, 8, seed=2)


def _layer(kind: type[torch.nn.RNNBase], units: int = 4, **options) -> torch.nn.RNNBase:
    torch.manual_seed(0)
    return kind(3, units, **options)


def _weights(cell: torch.nn.RNNBase, order: list[int], suffix: str = "") -> dict[str, np.ndarray]:
    """Weights of a torch layer with its gates in MIL's order, and its biases one by one."""

    def reordered(name: str) -> np.ndarray:
        parts = getattr(cell, f"{name}_l0{suffix}").detach().chunk(len(order))
        return torch.cat([parts[i] for i in order]).numpy()

    return {name: reordered(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}


def _one_bias(weights: dict[str, np.ndarray], suffix: str = "") -> dict[str, np.ndarray]:
    return {
        f"weight_ih{suffix}": weights["weight_ih"],
        f"weight_hh{suffix}": weights["weight_hh"],
        f"bias{suffix}": weights["bias_ih"] + weights["bias_hh"],
    }


def _ordered(x: torch.Tensor, direction: str) -> torch.Tensor:
    return x.flip(0) if direction == "reverse" else x


def _last(sequence: torch.Tensor, every: bool) -> torch.Tensor:
    return (sequence if every else sequence[-1:]).detach()


_ACTIVATIONS = {
    "hard_sigmoid": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "linear": lambda x: x,
    "relu": torch.relu,
    "scaled_tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sigmoid_hard": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "tanh": torch.tanh,
}

# LSTM

_LSTM, _BOTH = _layer(torch.nn.LSTM), _layer(torch.nn.LSTM, bidirectional=True)
_IFOZ = [0, 1, 3, 2]
_LSTM_WEIGHTS = _one_bias(_weights(_LSTM, _IFOZ))
_BOTH_WEIGHTS = {
    **_one_bias(_weights(_BOTH, _IFOZ)),
    **_one_bias(_weights(_BOTH, _IFOZ, "_reverse"), "_back"),
}
_PEEPHOLES = {"peephole": normal(12, seed=3), "peephole_back": normal(12, seed=4)}


def _run_lstm(x, initial_h, initial_c, every, direction, **_):
    sequence, (h, c) = _LSTM(_ordered(x, direction), (initial_h[None], initial_c[None]))
    return [_last(sequence, every), h[0].detach(), c[0].detach()]


def _run_both(x, initial_h, initial_c, every, **_):
    def split(state):
        return torch.stack(state.split(4, dim=1))

    sequence, (h, c) = _BOTH(x, (split(initial_h), split(initial_c)))
    joined = torch.cat([*h], dim=1)
    return [
        t.detach() for t in (sequence if every else joined[None], joined, torch.cat([*c], dim=1))
    ]


def _lstm_equations(activations, x, h, c, w_ih, w_hh, bias=0.0, peephole=None, clip=None):
    sigma, of_cell, of_output = (_ACTIVATIONS[name.lower()] for name in activations)
    p_i, p_f, p_o = (0, 0, 0) if peephole is None else peephole.chunk(3)
    sequence = []
    for step in x:
        i, f, o, z = (step @ w_ih.T + h @ w_hh.T + bias).chunk(4, dim=1)
        c = sigma(f + p_f * c) * c + sigma(i + p_i * c) * of_cell(z)
        c = c if clip is None else c.clamp(-float(clip), float(clip))
        h = sigma(o + p_o * c) * of_output(c)
        sequence.append(h)
    return torch.stack(sequence), h, c


def _lstm_case(note, direction="forward", every=True, activations=None, bias=True, **more):
    """A case with the result of the equations; ``more`` are its other constants."""
    both = direction == "bidirectional"
    activations = activations or ("sigmoid", "tanh", "tanh")
    constants = {
        name: value
        for name, value in (_BOTH_WEIGHTS if both else _LSTM_WEIGHTS).items()
        if bias or not name.startswith("bias")
    }

    def expected(x, initial_h, initial_c, clip=None, **weights):
        def one_pass(x, states, suffix=""):
            named = ("weight_ih", "weight_hh", "bias", "peephole")
            w_ih, w_hh, b, peephole = (weights.get(f"{name}{suffix}") for name in named)
            b = 0.0 if b is None else b
            return _lstm_equations(activations, x, *states, w_ih, w_hh, b, peephole, clip)

        if not both:
            sequence, h, c = one_pass(_ordered(x, direction), (initial_h, initial_c))
            return [_last(sequence, every), h, c]
        first, second = zip(initial_h.split(4, dim=1), initial_c.split(4, dim=1), strict=True)
        forward, *ahead = one_pass(x, first)
        backward, *back = one_pass(x.flip(0), second, "_back")
        h, c = (torch.cat(pair, dim=1) for pair in zip(ahead, back, strict=True))
        return [torch.cat([forward, backward.flip(0)], dim=2) if every else h[None], h, c]

    names = ("recurrent_activation", "cell_activation", "activation")
    return OpCase(
        "lstm",
        note,
        {"x": _SEQUENCE, "initial_h": _H2 if both else _H, "initial_c": _C2 if both else _C},
        {**constants, **more},
        {
            "direction": direction,
            "output_sequence": every,
            **dict(zip(names, activations, strict=True)),
        },
        expected=expected,
    )


LSTM = [
    *(
        OpCase(
            "lstm",
            f"{direction}-{every}",
            {"x": _SEQUENCE, "initial_h": _H, "initial_c": _C},
            _LSTM_WEIGHTS,
            {"direction": direction, "output_sequence": every},
            expected=lambda e=every, d=direction, **v: _run_lstm(every=e, direction=d, **v),
        )
        for direction in ("forward", "reverse")
        for every in (True, False)
    ),
    *(
        OpCase(
            "lstm",
            f"bidirectional-{every}",
            {"x": _SEQUENCE, "initial_h": _H2, "initial_c": _C2},
            _BOTH_WEIGHTS,
            {"direction": "bidirectional", "output_sequence": every},
            expected=lambda e=every, **v: _run_both(every=e, **v),
        )
        for every in (True, False)
    ),
    _lstm_case("no-bias", bias=False),
    _lstm_case("no-bias-bidirectional", "bidirectional", bias=False),
    *(
        _lstm_case("-".join(names), activations=names)
        for names in (
            ("hard_sigmoid", "relu", "linear"),
            ("sigmoid", "scaled_tanh", "TANH"),
            ("tanh", "sigmoid", "hard_sigmoid"),
            ("linear", "tanh", "relu"),
        )
    ),
    *(
        _lstm_case(
            f"peephole-clip-{direction}-{every}",
            direction,
            every,
            clip=np.float32(0.3),
            **(_PEEPHOLES if direction == "bidirectional" else {"peephole": normal(12, seed=3)}),
        )
        for direction in ("forward", "reverse", "bidirectional")
        for every in (True, False)
    ),
    _lstm_case("peephole", peephole=normal(12, seed=3)),
    _lstm_case("peephole-of-one-direction", "bidirectional", peephole=normal(12, seed=3)),
    _lstm_case("clip", clip=np.float32(0.1), bias=False),
]

# GRU

_GRU, _WIDE_GRU = _layer(torch.nn.GRU), _layer(torch.nn.GRU, 200)


def _gru_weights(cell: torch.nn.RNNBase) -> dict[str, np.ndarray]:
    weights = _weights(cell, [0, 2, 1])
    return {
        "weight_ih": weights["weight_ih"],
        "weight_hh": weights["weight_hh"],
        "bias": weights["bias_hh"],
        "input_bias": weights["bias_ih"],
    }


_GRU_WEIGHTS = _gru_weights(_GRU)
_PRODUCTS = {name: _GRU_WEIGHTS[name] for name in ("weight_ih", "weight_hh")}
_BIASES = {name: _GRU_WEIGHTS[name] for name in ("bias", "input_bias")}


def _run_gru(cell, x, initial_h, every=True, direction="forward", **_):
    sequence, h = cell(_ordered(x, direction), initial_h[None])
    return [_last(sequence, every), h[0].detach()]


def _gru_equations(x, h, weight_ih, weight_hh, bias, input_bias, after, names, every):
    sigma, phi = (_ACTIVATIONS[name] for name in names)
    by_reset, by_new, by_update = weight_hh.chunk(3)
    b_reset, b_new, b_update = bias.chunk(3)
    sequence = []
    for step in x:
        reset, new, update = (step @ weight_ih.T + input_bias).chunk(3, dim=1)
        r = sigma(reset + h @ by_reset.T + b_reset)
        z = sigma(update + h @ by_update.T + b_update)
        past = r * (h @ by_new.T + b_new) if after else (r * h) @ by_new.T + b_new
        h = (1 - z) * phi(new + past) + z * h
        sequence.append(h)
    return [_last(torch.stack(sequence), every), h]


def _gru_case(note, biases, direction="forward", every=True, after=None, names=None, **options):
    """A case with the result of the equations; ``after`` is None where it is unknown."""
    names = names or ("sigmoid", "tanh")
    attributes = {} if after is None else {"reset_after": after}
    zeros = torch.zeros(12)
    return OpCase(
        "gru",
        note,
        {"x": _SEQUENCE, "initial_h": _H},
        {**_PRODUCTS, **biases},
        {
            "direction": direction,
            "output_sequence": every,
            "recurrent_activation": names[0],
            "activation": names[1],
            **attributes,
        },
        expected=lambda x, initial_h, weight_ih, weight_hh, bias=zeros, input_bias=zeros: (
            _gru_equations(
                _ordered(x, direction),
                initial_h,
                weight_ih,
                weight_hh,
                bias,
                input_bias,
                after,
                names,
                every,
            )
        ),
        **options,
    )


GRU = [
    *(
        OpCase(
            "gru",
            f"reset-after-{direction}-{every}",
            {"x": _SEQUENCE, "initial_h": _H},
            _GRU_WEIGHTS,
            {"reset_after": True, "output_sequence": every, "direction": direction},
            expected=lambda e=every, d=direction, **v: _run_gru(_GRU, every=e, direction=d, **v),
        )
        for direction in ("forward", "reverse")
        for every in (True, False)
    ),
    OpCase(
        "gru",
        "reset-after-wide",
        {"x": _SEQUENCE, "initial_h": normal(2, 200, seed=1)},
        _gru_weights(_WIDE_GRU),
        {"reset_after": True, "output_sequence": True},
        expected=lambda **v: _run_gru(_WIDE_GRU, **v),
    ),
    *(
        _gru_case(
            f"reset-before-{direction}-{every}",
            {"bias": _BIASES["bias"]},
            direction,
            every,
            opset=_I17,
        )
        for direction in ("forward", "reverse")
        for every in (True, False)
    ),
    *(
        _gru_case(f"{note}-{'after' if after else 'before'}", biases, after=after)
        for after in (True, False)
        for note, biases in (
            ("both-biases", _BIASES),
            ("input-bias", {"input_bias": _BIASES["input_bias"]}),
            ("no-bias", {}),
        )
    ),
    *(
        _gru_case(
            f"{'-'.join(names)}-{'after' if after else 'before'}",
            _BIASES,
            "reverse" if after else "forward",
            after,
            after,
            names,
        )
        for after in (True, False)
        for names in (("hard_sigmoid", "relu"), ("tanh", "sigmoid"), ("linear", "scaled_tanh"))
    ),
]

# RNN

_RNN = {kind: _layer(torch.nn.RNN, nonlinearity=kind) for kind in ("tanh", "relu")}
_RNN_WEIGHTS = _one_bias(_weights(_RNN["tanh"], [0]))


def _run_rnn(kind, x, initial_h, every, direction, **_):
    sequence, h = _RNN[kind](_ordered(x, direction), initial_h[None])
    return [_last(sequence, every), h[0].detach()]


def _rnn_equations(name, x, h, weight_ih, weight_hh, bias=0.0):
    sequence = []
    for step in x:
        h = _ACTIVATIONS[name](step @ weight_ih.T + h @ weight_hh.T + bias)
        sequence.append(h)
    return [torch.stack(sequence), h]


RNN = [
    *(
        OpCase(
            "rnn",
            f"{kind}-{direction}-{every}",
            {"x": _SEQUENCE, "initial_h": _H},
            _RNN_WEIGHTS,
            {"activation": kind, "direction": direction, "output_sequence": every},
            expected=lambda k=kind, e=every, d=direction, **v: _run_rnn(
                k, every=e, direction=d, **v
            ),
        )
        for kind, direction, every in (
            ("tanh", "forward", False),
            ("tanh", "reverse", True),
            ("relu", "forward", True),
            ("relu", "reverse", False),
        )
    ),
    *(
        OpCase(
            "rnn",
            name,
            {"x": _SEQUENCE, "initial_h": _H},
            {k: v for k, v in _RNN_WEIGHTS.items() if k != "bias" or name != "linear"},
            {"activation": name, "output_sequence": True},
            expected=lambda x, initial_h, n=name, **v: _rnn_equations(n, x, initial_h, **v),
        )
        for name in ("sigmoid", "sigmoid_hard", "hard_sigmoid", "scaled_tanh", "linear")
    ),
]

CASES = [*LSTM, *GRU, *RNN]
