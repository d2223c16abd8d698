"""``coreml-delegate verify``: the engine it compares on, and NaN and infinity."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command import MODELS, tiny_pte
from support.gates import needs_bf16, needs_compiler
from support.mil import TARGETS, Opset, builder_program, mb, types
from support.packages import package_files
from support.tolerances import SQNR_FP32

from coreml_delegate import runtime
from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.files import write_folder
from coreml_delegate.runtime.accuracy import Accuracy
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.commands.verify import require
from coreml_delegate.scripts.program_arguments import load

pytestmark = pytest.mark.xdist_group("cli")

_OVERFLOWING = f"{MODELS}:overflowing"
_MASKED = f"{MODELS}:masked"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_underflow_in_fp16_fails(capsys):
    assert main(["export", _OVERFLOWING, "-o", "a.pte"]) == 0
    capsys.readouterr()
    assert main(["verify", _OVERFLOWING, "a.pte"]) == 1
    captured = capsys.readouterr()
    assert "computed by reference in fp16\n" in captured.out
    assert "got output_0 at 0.0 dB" in captured.err
    for engine in ("openvino", "auto"):
        assert main(["verify", _OVERFLOWING, "a.pte", "--engine", engine]) == 0
        printed = capsys.readouterr().out
        assert "computed by openvino in fp32 (the program declares fp16)\n" in printed


@needs_bf16
def test_bf16_runs_on_openvino():
    Path("tiny.pte").write_bytes(tiny_pte())
    options = runtime.EngineOptions(precision="bf16")
    program = load(Path("tiny.pte"), method=None, engine=None, options=options)
    assert str(program.execution) == "openvino in bf16 (the program declares fp16)"


def test_dynamic_quantization_runs_on_openvino(capsys):
    Path("tiny.pte").write_bytes(tiny_pte())
    assert main(["verify", f"{MODELS}:tiny", "tiny.pte", "--dynamic-quantization", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == {"openvino": ["fp32"]}
    refused = ["run", "tiny.pte", "--dynamic-quantization", "--engine", "reference"]
    assert main(refused) == 1
    assert "Use the openvino engine, or leave the option out" in capsys.readouterr().err


def test_an_fp32_program_is_compared_on_the_fastest_engine(capsys):
    export = ["export", _OVERFLOWING, "-o", "a.pte", "--precision", "float32"]
    assert main(export) == 0
    capsys.readouterr()
    assert main(["verify", _OVERFLOWING, "a.pte", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engines"] == {"openvino": ["fp32"]}
    assert document["outputs"]["output_0"]["sqnr_db"] > SQNR_FP32


@pytest.mark.parametrize("host", ["python", pytest.param("stock", marks=needs_compiler)])
def test_every_delegate_of_the_method_decides_the_engine(host):
    Path("tiny.pte").write_bytes(tiny_pte())
    program = load(Path("tiny.pte"), method=None, host=host, engine=None)
    assert program.execution.engines == {"reference": ("fp16",)}


def test_a_program_without_core_ml_names_no_engine(capsys):
    assert main(["export", f"{MODELS}:in_doubles", "-o", "a.pte"]) == 0
    assert main(["verify", f"{MODELS}:in_doubles", "a.pte"]) == 0
    assert "computed by no engine of this package\n" in capsys.readouterr().out


# Which types a program computes in


def _half(x, **keywords):
    return mb.cast(x=x, dtype="fp16", **keywords)


def _single(x):
    return mb.cast(x=x, dtype="fp32")


def _quantized_weight(x):
    weight = mb.constexpr_affine_dequantize(
        quantized_data=np.ones((4, 4), np.int8),
        zero_point=np.int8(0),
        scale=np.float16(0.5),
        axis=0,
    )
    return mb.matmul(x=x, y=_single(weight))


_PROGRAMS = {
    "fp32": (lambda x: mb.exp(x=x), ("fp32",), False),
    "fp16": (lambda x: _single(mb.exp(x=_half(x))), ("fp16",), True),
    "fp16-inside": (lambda x: mb.exp(x=_single(mb.exp(x=_half(mb.exp(x=x))))), None, True),
    "rounded-on-the-way": (lambda x: mb.exp(x=_single(_half(x))), None, True),
    "fp16-weights": (
        lambda x: mb.matmul(x=x, y=_single(np.ones((4, 4), np.float16))),
        ("fp32",),
        False,
    ),
    "quantized-weights": (_quantized_weight, ("fp32",), False),
    "fp16-output": (lambda x: _half(mb.exp(x=x), name="y"), ("fp32",), False),
    "integers": (lambda x: mb.cast(x=x, dtype="int32"), (), False),
}


@pytest.mark.parametrize(("function", "types", "narrow"), _PROGRAMS.values(), ids=_PROGRAMS)
def test_reported_types_are_those_ops_compute_in(function, types, narrow):
    example = {"x": np.ones((4, 4), np.float32)}
    files = package_files(builder_program(function, example, Opset.iOS16))
    write_folder(files, Path("a.mlpackage"))
    program = load(Path("a.mlpackage"), method=None, engine=None)
    expected = "reference" if narrow else "openvino"
    assert list(program.execution.engines) == [expected]
    if types is not None:
        assert program.execution.declared == {expected: types}


def test_fp16_inputs_and_states_are_not_reported_as_computed():
    @mb.program(
        input_specs=[
            mb.TensorSpec((2, 3), dtype=types.fp16),
            mb.StateTensorSpec((2, 3), dtype=types.fp16),
        ],
        opset_version=TARGETS[Opset.iOS18],
    )
    def accumulate(x, held):
        total = mb.add(x=_single(mb.read_state(input=held)), y=_single(x))
        return _single(mb.coreml_update_state(state=held, value=_half(total), name="kept"))

    write_folder(package_files(accumulate), Path("a.mlpackage"))
    program = load(Path("a.mlpackage"), method=None, engine=None)
    assert program.execution.engines == {"openvino": ("fp32",)}


# NaN and infinities


def _accuracy(expected, actual):
    accuracy = Accuracy()
    accuracy.add(torch.tensor(expected), torch.tensor(actual))
    return accuracy


def test_nan_equals_only_nan():
    same = _accuracy([math.nan, 3.0, 4.0], [math.nan, 3.0, 4.5])
    assert same.sqnr_db == pytest.approx(20.0)
    assert (same.max_abs_error, same.nan) == (0.5, 1)
    all_nan = _accuracy([math.nan, math.nan], [math.nan, math.nan])
    assert (all_nan.sqnr_db, all_nan.nan) == (math.inf, 2)
    for pair in (([math.nan, 1.0], [0.0, 1.0]), ([0.0, 1.0], [math.nan, 1.0])):
        assert _accuracy(*pair).sqnr_db == -math.inf
        assert _accuracy(*pair).max_abs_error == math.inf


def test_equal_infinities_do_not_hide_other_errors():
    accuracy = _accuracy([-math.inf, 3.0, 4.0], [-math.inf, 3.0, 4.5])
    assert accuracy.sqnr_db == pytest.approx(20.0)
    assert _accuracy([math.inf, 1.0], [-math.inf, 1.0]).sqnr_db == -math.inf


def test_nan_on_both_sides_is_reported(capsys):
    assert main(["export", _MASKED, "-o", "a.pte"]) == 0
    values = np.ones((8, 2), np.float32)
    verify = ["verify", _MASKED, "a.pte", "--input", "x.npz"]
    for rows, code in ((slice(1, 2), 0), (slice(None), 1)):
        values[rows] = np.nan
        np.savez("x.npz", x=values, mask=np.ones((8, 2), bool))
        capsys.readouterr()
        assert main(verify) == code
        captured = capsys.readouterr()
        assert f"output_0: {int(np.isnan(values).sum())} values are NaN in both\n" in captured.out
    assert "output_0  all NaN" in captured.out
    assert "nothing was compared: got output_0 all NaN, output_1 all NaN, exp" in captured.err


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"y": [0.0, -0.0]}, "got y all 0,"),
        ({"y": [math.nan, 0.0]}, "got y all NaN or 0,"),
        ({"y": [0.0], "z": [0]}, "got y all 0, z all 0,"),
        ({"y": [math.nan], "z": [1]}, "got y all NaN,"),
        ({"y": [math.inf, -math.inf]}, "got y all infinite,"),
        ({"y": [math.inf, math.nan, 0.0]}, "got y all NaN or infinite or 0,"),
        ({"y": [math.inf], "z": [1]}, "got y all infinite,"),
        ({"y": [-math.inf, 0.0]}, None),
        ({"y": []}, "got y without values,"),
        ({"y": [0.0], "z": [math.nan, 1.0]}, None),
    ],
)
def test_zeros_nan_and_infinities_are_not_compared(outputs, message):
    results = {name: _accuracy(values, values) for name, values in outputs.items()}
    with pytest.raises(ProgramError, match=message) if message else contextlib.nullcontext():
        require(results, 30.0)


# Inputs


def test_the_example_comes_first_and_masks_are_kept(capsys):
    """The example overflows in fp16, and a row of which all is masked is NaN."""
    assert main(["export", _MASKED, "-o", "a.pte"]) == 0
    capsys.readouterr()
    assert main(["verify", _MASKED, "a.pte", "--samples", "1"]) == 1
    assert "got output_0 at -inf dB" in capsys.readouterr().err
    assert main(["verify", _MASKED, "a.pte", "--engine", "openvino", "--json"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["nan"] for output in outputs.values()] == [0, 0]
