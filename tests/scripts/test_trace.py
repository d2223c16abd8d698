"""``coreml-delegate trace``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.command import tiny_pte
from support.mil import Opset, builder_program, mb
from support.programs import export_case

from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """An RMS norm in fp16."""

    def norm(x):
        mean = mb.reduce_mean(x=mb.square(x=x, name="sq"), axes=[-1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-3)), name="y")

    ct = coremltools()
    program = builder_program(norm, {"x": np.zeros((1, 8), np.float16)}, Opset.iOS17)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    path = tmp_path_factory.mktemp("trace") / "norm.mlpackage"
    model.save(str(path))
    return path


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.full((1, 8), 300, np.float16))
    return path


def test_trace_names_the_first_bad_op_of_a_package(package, large, capsys):
    assert main(["trace", str(package), "--input", str(large), "--worst", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["model"], found["function"], found["values"]) == ("norm", "main", 4)
    bad = found["first_bad"]
    assert (bad["op"], bad["output"], bad["fault"]) == (
        "square",
        "sq",
        "infinite, and finite in fp32",
    )
    assert bad["location"].startswith("main op ")
    assert bad["sqnr_db"] == "-inf"
    assert found["worst"] == [bad]


def test_trace_prints_text(package, large, capsys):
    assert main(["trace", str(package), "--input", str(large), "--worst", "2"]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("norm: first bad: square 'sq' at main op 0: infinite")
    assert header.split() == ["SQNR", "max", "op", "output", "location", "fault"]
    assert len(rows) == 2


def test_trace_takes_random_inputs_and_a_limit(package, capsys):
    assert main(["trace", str(package)]) == 0
    assert capsys.readouterr().out.startswith("norm: 4 values, none bad\n")
    assert main(["trace", str(package), "--min-sqnr", "300", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["first_bad"]["fault"] == "inaccurate"


def test_trace_covers_every_delegate(tmp_path, capsys):
    path = tmp_path / "tiny.pte"
    path.write_bytes(tiny_pte())
    capsys.readouterr()  # of the export
    assert main(["trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in found] == ["forward_0", "forward_1"]
    assert all(model["first_bad"] is None for model in found)
    assert "conv" in {value["op"] for value in found[0]["worst"]}


def test_a_program_without_delegates_is_refused(tmp_path, capsys):
    path = tmp_path / "plain.pte"
    path.write_bytes(export_case("branches")[1])
    assert main(["trace", str(path)]) == 1
    assert "has no CoreMLBackend delegate" in capsys.readouterr().err
