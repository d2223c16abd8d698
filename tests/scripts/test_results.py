"""``run`` and ``verify`` with arguments and results that are no tensors, and written inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli_models import assorted, channels
from support.command import MODELS
from support.mil import ct, mb
from support.tolerances import ATOL_RTOL

from coreml_delegate import runtime
from coreml_delegate.errors import InputError
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")

MODEL = f"{MODELS}:assorted"
HOSTS = ("python", "stock")
ATOL, RTOL = ATOL_RTOL["fp32"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("assorted") / "a.pte"
    assert main(["export", MODEL, "-o", str(path), "--precision", "float32"]) == 0
    return path


@pytest.fixture(autouse=True)
def pte(exported, tmp_path, monkeypatch):
    """``a.pte`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("a.pte")
    path.write_bytes(exported.read_bytes())
    return path


def eager(x):
    """Expected outputs of the program by name."""
    module, (_, *rest) = assorted()
    written = x.clone()
    results, (on, tenth, (z,)) = module(written, *rest)
    return {
        "mutated_input_x": written,
        "output_0.y": results["y"],
        "output_0.none": None,
        "output_0.rows": 2,
        "output_1[0]": on,
        "output_1[1]": tenth,
        "output_1[2][0]": z,
    }


@pytest.mark.parametrize("host", HOSTS)
def test_run(host, capsys):
    x = torch.linspace(-2, 2, 6).reshape(2, 3)
    np.save("x.npy", x.numpy())
    options = ["--host", host, "--repeat", "2", "--input", "x.npy"]
    assert main(["run", "a.pte", *options, "-o", "out.npz", "--json"]) == 0
    expected = eager(x)
    shown = {entry.pop("name"): entry for entry in json.loads(capsys.readouterr().out)["outputs"]}
    assert list(shown) == list(expected)
    assert shown["output_0.none"] == {"dtype": None, "shape": None}
    assert (shown["output_0.rows"]["dtype"], shown["output_0.rows"]["max"]) == ("int64", 2)
    with np.load("out.npz") as archive:
        assert set(archive.files) == expected.keys() - {"output_0.none"}
        for name in archive.files:
            np.testing.assert_allclose(archive[name], expected[name], atol=ATOL, rtol=RTOL)


def test_run_prints_text(capsys):
    assert main(["run", "a.pte", "--repeat", "1"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["output_0.none", "None", "-"] in rows
    assert ["output_0.rows", "int64", "[]"] in rows


@pytest.mark.parametrize("host", HOSTS)
def test_verify(host, capsys):
    assert main(["verify", MODEL, "a.pte", "--host", host, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["outputs"]
    assert list(found) == list(eager(torch.zeros(2, 3)))
    equal = ("output_0.none", "output_0.rows", "output_1[0]", "output_1[1]")
    assert all(found[name]["sqnr_db"] == "inf" for name in equal)


def test_verify_takes_inputs_of_a_file(capsys):
    np.save("x.npy", np.zeros((2, 3), np.float32))
    assert main(["verify", MODEL, "a.pte", "--input", "x.npy"]) == 0


def test_verify_compares_the_inputs_that_are_written(capsys):
    assert main(["verify", f"{MODELS}:assorted_with_another_final", "a.pte"]) == 1
    assert "differs from its model: got mutated_input_x at " in capsys.readouterr().err


def test_verify_a_package_of_tensors(capsys):
    """A package has only the tensors."""
    assert main(["export", f"{MODELS}:scaled", "-o", "b.pte"]) == 0
    assert main(["extract", "b.pte"]) == 0
    assert main(["verify", f"{MODELS}:scaled", "b_coreml/forward_0.mlpackage"]) == 0


def test_trace(capsys):
    assert main(["trace", "a.pte", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["first_bad"] is None


@pytest.mark.parametrize("host", HOSTS)
def test_text_arguments_are_accepted(host):
    """ExecuTorch stores None for a text, so any text is accepted there, and nothing else."""
    program = runtime.load_program("a.pte", host=host)
    x = torch.randn(2, 3)
    given = [x, "tanh", 3, None, True, 0.5]
    for inputs in (given, [x, None, *given[2:]]):
        results = program.run("forward", inputs)
        torch.testing.assert_close(results[1], eager(x)["output_0.y"], atol=ATOL, rtol=RTOL)
        assert results[2] is None
    with pytest.raises(
        InputError, match=r"input 1 \(form\) .* fixed at export: got 4, expected None, or"
    ):
        program.run("forward", [x, 4, *given[2:]])
    with pytest.raises(
        InputError, match=r"input 2 \(scale\) .* fixed at export: got 4, expected 3"
    ):
        program.run("forward", [x, "tanh", 4, *given[3:]])


def test_a_text_among_the_results_is_none_and_warned_of(capsys):
    assert main(["export", f"{MODELS}:returning_text", "-o", "b.pte"]) == 0
    assert capsys.readouterr().err == (
        "coreml-delegate: warning: the model returns text ('text'), which a .pte cannot; "
        "it returns None instead\n"
    )
    for host in HOSTS:
        assert main(["verify", f"{MODELS}:returning_text", "b.pte", "--host", host]) == 0
        text, tensor = runtime.load_program("b.pte", host=host).run("forward", [torch.zeros(3)])
        assert text is None
        assert tensor.tolist() == [1, 1, 1]


def test_models_without_tensor_results_are_refused(capsys):
    assert main(["export", f"{MODELS}:returning_a_number", "-o", "b.pte"]) == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: the model returns no tensor, which ExecuTorch requires: got 3, "
        "None, expected a tensor among the outputs, or an input or buffer that is written\n"
    )
    assert not Path("b.pte").exists()


def test_what_a_bundle_cannot_hold_is_refused(capsys):
    assert main(["export", MODEL, "-o", "b.pte", "--bundle", "1"]) == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: a bundled program cannot hold None or text: got form, absent, "
        "output_0.none, expected tensors and numbers as inputs and outputs. Leave --bundle out; "
        "record keeps inputs and outputs of every kind\n"
    )
    assert not Path("b.pte").exists()


# Classifiers, pipelines, models of other types


@pytest.fixture
def classifier():
    """A classifier of pictures, which the model in ``cli_models`` was converted to."""
    model, example = channels()
    package = ct.convert(
        torch.jit.trace(model.eval(), example),
        inputs=[ct.ImageType("image", example.shape)],
        outputs=[ct.TensorType("scores")],
        classifier_config=ct.ClassifierConfig(["red", "green", "blue"], "color"),
        skip_model_load=True,
    )
    package.save("c.mlpackage")
    Path("pictures").mkdir()
    Image.new("RGB", (5, 4), (90, 120, 30)).save("pictures/green.png")
    return package


def test_a_classifier_and_its_labels(classifier, capsys):
    assert main(["run", "c.mlpackage", "--input", "pictures/green.png", "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["label"] == {"color": "green"}
    assert [entry["label"] for entry in output["top"]] == ["green", "red", "blue"]
    assert main(["run", "c.mlpackage", "--input", "pictures/green.png"]) == 0
    assert "color: green\n" in capsys.readouterr().out
    assert main(["inspect", "c.mlpackage"]) == 0
    shown = capsys.readouterr().out
    assert "classifier: color, one of 3 labels (red, green, blue), by color_probs\n" in shown


@pytest.mark.parametrize("inputs", [[], ["--data", "pictures"], ["--input", "pictures/green.png"]])
def test_verify_compares_on_pixels(inputs, classifier, capsys):
    verify = ["verify", f"{MODELS}:channels", "c.mlpackage", "--engine", "reference", "--json"]
    assert main([*verify, *inputs]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"].values()
    assert 30 < output["sqnr_db"] < 90  # rounded to fp16, and not the same for all classes
    assert output["compared"] == (3 if inputs else 12)


def test_a_pipeline(classifier, capsys):
    inverted = mb.program(input_specs=[mb.TensorSpec((1, 3, 4, 5))])(
        lambda raw: mb.sub(x=np.float32(255), y=raw, name="image")
    )
    image = ct.ImageType("image")
    first = ct.convert(
        inverted,
        inputs=[ct.ImageType("raw", (1, 3, 4, 5))],
        outputs=[image],
        minimum_deployment_target=ct.target.iOS16,
        skip_model_load=True,
    )
    ct.utils.make_pipeline(first, classifier).save("p.mlpackage")
    assert main(["run", "p.mlpackage", "--input", "pictures/green.png"]) == 0
    assert "color: blue\n" in capsys.readouterr().out
    assert main(["inspect", "p.mlpackage"]) == 0
    shown = capsys.readouterr().out
    assert "  inputs: raw\n  outputs: color, color_probs\n  model 1: ML Program\n" in shown
    assert main(["record", "p.mlpackage", "-o", "p.cmlrun"]) == 0
    assert main(["replay", "p.cmlrun", "p.mlpackage", "--engine", "openvino"]) == 0
    assert main(["trace", "p.mlpackage"]) == 1
    assert "pipeline cannot be traced: got several models" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "inspect", "check", "extract"])
def test_models_of_the_old_format(command, capsys):
    model = ct.proto.Model_pb2.Model()
    model.neuralNetwork.SetInParent()
    Path("a.mlmodel").write_bytes(model.SerializeToString())
    assert main([command, "a.mlmodel"]) == 1
    message = "no ExecuTorch program" if command == "extract" else "got neuralNetwork, a neural net"
    assert message in capsys.readouterr().err
