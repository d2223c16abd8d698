"""Recurrent layers on the OpenVINO engine: run-time sizes, constructions, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from openvino import opset15 as ops
from support import mil
from support.engine_runs import assert_close
from support.mil import ct, mb
from support.op_cases.case import OpCase, normal
from support.op_cases.recurrent import CASES

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.translate import translate
from coreml_delegate.runtime.engines.openvino.translations import TRANSLATIONS
from coreml_delegate.targets import Opset

_BY_ID = {case.id.removesuffix("-iOS18"): case for case in CASES}

_BY_KERNEL = [
    "gru-reset-after-reverse-True",
    "lstm-bidirectional-True",
    "lstm-forward-False",
    "rnn-tanh-reverse-True",
]
_BY_LOOP = [
    "gru-hard_sigmoid-relu-after",
    "gru-both-biases-before",
    "gru-linear-scaled_tanh-before",
    "gru-reset-after-wide",
    "lstm-hard_sigmoid-relu-linear",
    "lstm-peephole-clip-bidirectional-True",
    "rnn-linear",
]


def _arrays(case: OpCase, steps: int, batch: int) -> dict[str, np.ndarray]:
    """Inputs of a case at other sizes."""
    sizes = {name: array.shape[-1] for name, array in case.inputs.items()}
    return {
        name: normal(*((steps,) if name == "x" else ()), batch, size, seed=seed)
        for seed, (name, size) in enumerate(sizes.items())
    }


def _answers(case: OpCase, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    given = {**arrays, **case.constants}
    values = case.expected(**{name: torch.as_tensor(value) for name, value in given.items()})
    return [value.numpy() for value in values]


def _function(case: OpCase, steps: int | None, batch: int | None) -> mil.Function:
    """The case's layer at these sizes; None for one known only at run time."""
    sizes = [ct.RangeDim(1, 64).symbol if size is None else size for size in (steps, batch)]
    specs = {
        name: mb.TensorSpec((*(sizes if name == "x" else sizes[1:]), array.shape[-1]))
        for name, array in case.inputs.items()
    }
    if "initial_c" in specs:

        def layer(x, initial_h, initial_c):
            return case.call("fp32", x=x, initial_h=initial_h, initial_c=initial_c)
    else:

        def layer(x, initial_h):
            return case.call("fp32", x=x, initial_h=initial_h)

    program = mb.program(input_specs=[*specs.values()], opset_version=ct.target.iOS18)(layer)
    return mil.main(mil.serialized(program, case.opset))


def _check(case: OpCase, compiled, steps: int, batch: int) -> None:
    arrays = _arrays(case, steps, batch)
    for result, answer in zip(compiled(arrays).values(), _answers(case, arrays), strict=True):
        assert_close(result, answer)


@pytest.mark.parametrize("name", _BY_KERNEL + _BY_LOOP)
def test_sizes_known_only_at_run_time(name):
    case = _BY_ID[name]
    compiled = OPENVINO.compile(_function(case, None, None), EngineOptions())
    for steps, batch in ((5, 1), (1, 3), (1, 1), (9, 2)):
        _check(case, compiled, steps, batch)


# At a batch of one the parts of a split lie in the memory of the whole, where a result of a step
# may then be computed in place.
@pytest.mark.parametrize("case", [c for c in CASES if c.opset.name == "iOS18"], ids=lambda c: c.id)
def test_batch_of_one(case):
    _check(case, OPENVINO.compile(_function(case, 4, 1), EngineOptions()), 4, 1)


@pytest.mark.parametrize("name", _BY_KERNEL + _BY_LOOP)
@pytest.mark.parametrize("steps", [5, None])
def test_construction(name, steps):
    model = translate(_function(_BY_ID[name], steps, 2)).model
    kinds = {node.get_type_name() for node in model.get_ops()}
    kernel = f"{_BY_ID[name].op.upper()}Sequence"
    assert kinds & {kernel, "Loop"} == {kernel if name in _BY_KERNEL else "Loop"}


@pytest.mark.parametrize("name", _BY_KERNEL)
def test_plugin_keeps_the_kernel_at_any_length(name):
    compiled = OPENVINO.compile(_function(_BY_ID[name], None, None), EngineOptions()).compiled
    graph = compiled.get_runtime_model().get_ops()
    assert "RNNSeq" in {node.get_rt_info()["layerType"].astype(str) for node in graph}


def _layer(op: str, **options) -> dict:
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[op]
    states = {"initial_h": ops.constant(np.zeros((1, 2), np.float32))}
    if op == "lstm":
        states["initial_c"] = states["initial_h"]
    return {
        "x": ops.constant(np.zeros((3, 1, 2), np.float32)),
        **states,
        "weight_ih": np.zeros((2 * gates, 2), np.float32),
        "weight_hh": np.zeros((2 * gates, 2), np.float32),
        **options,
    }


@pytest.mark.parametrize(
    ("op", "options", "reason"),
    [
        *(
            (op, {name: "softplus"}, "activation of a recurrent layer: got softplus, expected hard")
            for op, names in (
                ("rnn", ["activation"]),
                ("gru", ["activation", "recurrent_activation"]),
                ("lstm", ["activation", "cell_activation", "recurrent_activation"]),
            )
            for name in names
        ),
        ("rnn", {"direction": "bidirectional"}, "got bidirectional, expected forward, reverse"),
        ("gru", {"direction": "bidirectional"}, "got bidirectional, expected forward, reverse"),
        ("lstm", {"direction": "up"}, "got up, expected forward, reverse, bidirectional"),
        ("lstm", {"direction": "bidirectional"}, "got none, expected weight_ih_back"),
    ],
)
def test_refusals(op, options, reason):
    with pytest.raises(UnsupportedOpError, match=reason):
        TRANSLATIONS.get(op, Opset.iOS18).function(**_layer(op, **options))


def test_refusal_names_the_op():
    def function(x, initial_h):
        layer = _layer("gru", x=x, initial_h=initial_h, activation="softplus")
        return mb.gru(**layer, name="layer")

    inputs = {"x": normal(3, 1, 2), "initial_h": normal(1, 2)}
    (reason,) = OPENVINO.unsupported(mil.main(mil.build(function, inputs)))
    assert reason.startswith("gru (output 'layer'): activation of a recurrent layer: got softplus")
