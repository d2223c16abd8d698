"""``coreml-delegate inspect``, ``extract``, ``run`` and ``verify`` on one small program."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cli_models import tiny
from support.command import MODELS, leftovers, tiny_pte
from support.programs import export_case
from support.tolerances import ATOL_RTOL, sqnr_db

from coreml_delegate import runtime
from coreml_delegate.scripts import delegates
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.delegates import BlobModel

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(autouse=True)
def pte(tmp_path, monkeypatch):
    """``tiny.pte`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("tiny.pte")
    path.write_bytes(tiny_pte())
    return path


def read(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def error(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("coreml-delegate: error: ")
    return captured.err.removeprefix("coreml-delegate: error: ").rstrip("\n")


def eager() -> torch.nn.Module:
    """The model, rebuilt as documented: the seed is set, then the factory is called."""
    torch.manual_seed(0)
    module, _ = tiny()
    return module.eval()


# inspect


def test_inspect(capsys):
    assert main(["inspect", "tiny.pte", "--json"]) == 0
    summary = read(capsys)
    (method,) = summary["methods"]
    assert summary["bytes"] == len(tiny_pte())
    x = {"name": "x", "dtype": "float32", "shape": [1, 3, 16, 16], "dynamism": "static"}
    assert method["inputs"] == [x]
    assert [output["name"] for output in method["outputs"]] == ["output_0", "output_1"]
    assert [output["shape"] for output in method["outputs"]] == [[1, 10], []]
    assert method["operators_outside"] == {"aten::sin.out": 1}
    first = method["delegates"][0]
    assert first["backend"] == "CoreMLBackend"
    assert first["options"] == {
        "compute_unit": "all",
        "deployment_target": None,
        "precision": "float16",
        "model_type": "model",
        "enumerated_shapes": None,
        "weight_sharing": None,
    }
    (function,) = first["model"]["functions"]
    assert function["ops"]["conv"] == 1
    assert "const" not in function["ops"]
    assert set(function["computed_in"]) <= {"fp16", "fp32"}
    assert function["engine"] == "openvino"
    # conv.weight in fp16; what is small may be stored inline.
    weights = first["model"]["weights"]
    assert weights["bytes"] >= 8 * 3 * 3 * 3 * 2
    assert weights["by_dtype"].keys() == {"fp16"}


def test_inspect_prints_text(capsys):
    assert main(["inspect", "tiny.pte"]) == 0
    out = capsys.readouterr().out
    assert "  inputs: x float32[1, 3, 16, 16]\n" in out
    assert "  delegate 0: CoreMLBackend, " in out
    assert "    options: compute_unit all, precision float16, model_type model\n" in out
    assert "      engine here: openvino\n" in out


def test_inspect_package(capsys):
    assert main(["extract", "tiny.pte"]) == 0
    capsys.readouterr()
    assert main(["inspect", "tiny_coreml/forward_0.mlpackage", "--json"]) == 0
    package = read(capsys)
    assert main(["inspect", "tiny.pte", "--json"]) == 0
    assert read(capsys)["methods"][0]["delegates"][0]["model"] == package["model"]


def test_inspect_a_program_without_delegates(capsys):
    Path("plain.pte").write_bytes(export_case("arithmetic")[1])
    assert main(["inspect", "plain.pte", "--json"]) == 0
    (method,) = read(capsys)["methods"]
    assert method["delegates"] == []
    assert sum(method["operators_outside"].values()) > 2


# extract


def test_extract(capsys):
    assert main(["extract", "tiny.pte", "-o", "out", "--json"]) == 0
    listed = read(capsys)
    assert [entry["delegates"] for entry in listed] == [["forward_0"], ["forward_1"]]
    assert leftovers(Path("out")) == {"forward_0.mlpackage", "forward_1.mlpackage"}
    x = torch.randn(1, 3, 16, 16)
    model = runtime.load_mlpackage(listed[0]["path"])
    results = model.predict({model.input_names[0]: x.numpy()}).values()
    atol, rtol = ATOL_RTOL["fp16"]
    with torch.no_grad():
        expected = torch.relu(eager().conv(x)).numpy()
    # What else crosses the boundary depends on where the calls that may run in either partition do.
    features = next(result for result in results if result.shape == expected.shape)
    np.testing.assert_allclose(features, expected, atol=atol, rtol=rtol)


def test_a_model_without_weights_is_extracted_whole(capsys, monkeypatch):
    """Core ML refuses a package that lacks a folder of its manifest, even an empty one."""
    spec, weights = "com.apple.CoreML/model.mlmodel", "com.apple.CoreML/weights"
    manifest = {
        "itemInfoEntries": {"S": {"path": spec}, "W": {"path": weights}},
        "rootModelIdentifier": "S",
    }
    files = {"Manifest.json": json.dumps(manifest).encode(), f"Data/{spec}": b"specification"}
    bare = BlobModel(".mlpackage", {name: memoryview(data) for name, data in files.items()})
    monkeypatch.setattr(delegates, "models_of", lambda blob: [bare])
    assert main(["extract", "tiny.pte", "-o", "out", "--json"]) == 0
    for entry in read(capsys):
        assert leftovers(Path(entry["path"])) == {"Manifest.json", "Data"}
        assert (Path(entry["path"]) / "Data" / weights).is_dir()


def test_extract_overwrites_only_with_force(capsys):
    stale = Path("tiny_coreml/forward_1.mlpackage/stale")
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert main(["extract", "tiny.pte"]) == 1
    assert error(capsys) == (
        "output exists: got tiny_coreml/forward_1.mlpackage. Pass --force to replace it"
    )
    assert leftovers(Path("tiny_coreml")) == {"forward_1.mlpackage"}
    assert main(["extract", "tiny.pte", "--force"]) == 0
    assert not stale.exists()
    assert leftovers(Path("tiny_coreml")) == {"forward_0.mlpackage", "forward_1.mlpackage"}


@pytest.fixture
def full_disk():
    """A limit for the size of files in place of a full disk: writing fails alike."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(nbytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def test_extract_on_a_full_disk_leaves_nothing(full_disk, capsys):
    before = leftovers(Path())
    with full_disk(64):
        code = main(["extract", "tiny.pte", "-o", "new/out"])
    assert code == 1
    assert error(capsys) == "File too large: new/out/forward_0.mlpackage"
    assert leftovers(Path()) == before


def test_outputs_on_a_full_disk_are_named_and_removed(full_disk, capsys):
    # What a process needs of the disk once is there; else later tests would have no native calls.
    assert main(["run", "tiny.pte", "--repeat", "1"]) == 0
    capsys.readouterr()
    before = leftovers(Path())
    with full_disk(64):
        code = main(["run", "tiny.pte", "-o", "o.npz", "--repeat", "1"])
    assert code == 1
    assert error(capsys) == "File too large: o.npz"
    assert leftovers(Path()) == before


def test_extract_needs_a_core_ml_delegate(capsys):
    Path("plain.pte").write_bytes(export_case("arithmetic")[1])
    assert main(["extract", "plain.pte"]) == 1
    assert error(capsys) == "plain.pte has no Core ML delegate: got no delegate at all"
    assert not Path("plain_coreml").exists()


# run


def test_run_on_arrays(capsys):
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), dtype=np.float32)
    np.save("x.npy", x)
    np.savez("x.npz", anything=x)
    outputs = {}
    for name in ("x.npy", "x.npz"):
        args = ["run", "tiny.pte", "--input", name, "-o", "out.npz", "--force", "--repeat", "1"]
        assert main(args) == 0
        with np.load("out.npz") as archive:
            outputs[name] = dict(archive)
    expected = runtime.load_program("tiny.pte").run("forward", [torch.from_numpy(x)])
    for got in outputs.values():
        assert list(got) == ["output_0", "output_1"]
        for array, tensor in zip(got.values(), expected, strict=True):
            np.testing.assert_array_equal(array, tensor.numpy())
    out = capsys.readouterr().out
    best = int(expected[0].argmax())
    assert f"output_0 top 5: {best} (" in out
    assert "latency: " in out


def test_run_summary(capsys):
    assert main(["run", "tiny.pte", "--json", "--seed", "3", "--repeat", "2"]) == 0
    first = read(capsys)
    assert main(["run", "tiny.pte", "--json", "--seed", "3", "--engine", "reference"]) == 0
    reference = read(capsys)
    assert first["runs"] == 2
    assert first["latency_ms"] > 0
    logits, total = first["outputs"]
    assert (logits["name"], logits["dtype"], logits["shape"]) == ("output_0", "float32", [1, 10])
    assert logits["top"][0]["score"] == logits["max"]
    assert len(logits["top"]) == 5
    assert "top" not in total
    assert total["mean"] == pytest.approx(reference["outputs"][1]["mean"], rel=1e-2)


def test_run_package(capsys):
    assert main(["extract", "tiny.pte"]) == 0
    assert main(["run", "tiny_coreml/forward_0.mlpackage", "--threads", "1"]) == 0
    assert "fp" not in capsys.readouterr().err
    assert main(["run", "tiny_coreml/forward_0.mlpackage", "--host", "python"]) == 1
    assert error(capsys) == "host is for a .pte: got tiny_coreml/forward_0.mlpackage"


INPUTS = {
    "no file": (["gone.npy"], "no such input file: got gone.npy"),
    "unknown kind": (
        ["x.txt"],
        "unknown kind of input file: got x.txt, expected .npy, .npz, .jpeg, .jpg, .png",
    ),
    "wrong shape": (
        ["shape.npy"],
        "input 0 (x) of method 'forward' has the wrong shape: got float32[1, 3, 8, 8], "
        "expected float32[1, 3, 16, 16]",
    ),
    "wrong dtype": (
        ["dtype.npy"],
        "input 0 (x) of method 'forward' has the wrong dtype: got float64[1, 3, 16, 16], "
        "expected float32[1, 3, 16, 16]",
    ),
    "too many": (["shape.npy", "shape.npy"], "shape.npy holds more inputs than are left: got 1, "),
    "no array": (["text.npy"], "cannot read the array in text.npy: got "),
    "no archive": (["text.npz"], "cannot read the arrays in text.npz: got "),
    "pickles": (["objects.npy"], "cannot read the array in objects.npy: got Object arrays "),
    "no image": (["text.png"], "cannot read the image: got text.png ("),
}


@pytest.mark.parametrize(("files", "message"), INPUTS.values(), ids=INPUTS)
def test_run_refuses_inputs(files, message, capsys):
    for name in ("x.txt", "text.npy", "text.npz", "text.png"):
        Path(name).write_text("hello")
    np.save("shape.npy", np.zeros((1, 3, 8, 8), np.float32))
    np.save("dtype.npy", np.zeros((1, 3, 16, 16)))
    np.save("objects.npy", np.array([{}], object), allow_pickle=True)
    inputs = [arg for name in files for arg in ("--input", name)]
    assert main(["run", "tiny.pte", *inputs, "-o", "out.npz"]) == 1
    assert error(capsys).startswith(message)
    assert not Path("out.npz").exists()


def test_run_with_exact_nan(capsys):
    np.save("x.npy", np.full((1, 3, 16, 16), np.nan, np.float32))
    for options, is_nan in (((), False), (("--exact-nan",), True)):
        args = ["run", "tiny.pte", "--input", "x.npy", "--repeat", "1", "--json", *options]
        assert main([*args, "--engine", "openvino"]) == 0
        logits, _ = read(capsys)["outputs"]
        assert (logits["max"] == "nan") is is_nan


def test_run_refuses_methods(capsys):
    assert main(["run", "tiny.pte", "--method", "backward"]) == 1
    assert error(capsys) == "program has no such method: got 'backward', expected 'forward'"


# verify


def test_verify(capsys):
    assert main(["verify", f"{MODELS}:tiny", "tiny.pte", "--json", "--samples", "2"]) == 0
    document = read(capsys)
    assert document["engines"] == {"reference": ["fp16"]}
    result = document["outputs"]
    assert list(result) == ["output_0", "output_1"]
    assert result["output_0"]["top1_agreement"] == 1.0
    assert result["output_0"]["sqnr_db"] > 50


def test_verify_reports_the_true_error(capsys):
    x = np.random.default_rng(1).standard_normal((1, 3, 16, 16), dtype=np.float32)
    np.save("x.npy", x)
    args = ["verify", f"{MODELS}:tiny", "tiny.pte", "--input", "x.npy", "--json"]
    assert main(args) == 0
    result = read(capsys)["outputs"]
    with torch.no_grad():
        expected = eager()(torch.from_numpy(x))[0].numpy()
    program = runtime.load_program("tiny.pte", engine="reference")
    actual = program.run("forward", [torch.from_numpy(x)])[0].numpy()
    assert result["output_0"]["sqnr_db"] == pytest.approx(sqnr_db(expected, actual), abs=1e-3)
    assert result["output_0"]["max_abs_error"] == pytest.approx(abs(expected - actual).max())


def test_verify_fails_below_the_limit(capsys):
    assert main(["verify", f"{MODELS}:tiny", "tiny.pte", "--seed", "1"]) == 1
    captured = capsys.readouterr()
    assert "top-1 agreement" in captured.out
    assert captured.err.startswith(
        "coreml-delegate: error: the program differs from its model: got output_0 at "
    )
    assert captured.err.endswith(" dB, expected at least 30 dB\n")


def test_verify_refuses_another_model(capsys):
    assert main(["verify", f"{MODELS}:noisy", "tiny.pte"]) == 1
    assert error(capsys) == (
        "input 0 (x) of method 'forward' has the wrong shape: got float32[4], "
        "expected float32[1, 3, 16, 16]"
    )


def test_integers_beyond_int32_are_named(capsys):
    model = f"{MODELS}:squares"
    assert main(["export", model, "-o", "squares.pte"]) == 0
    for name, values in (("small.npy", [200, 3]), ("large.npy", [60000, 3])):
        np.save(name, np.array(values))
    capsys.readouterr()
    verify = ["verify", model, "squares.pte", "--input"]
    for engine in ("openvino", "reference"):
        assert main([*verify, "small.npy", "--engine", engine, "--json"]) == 0
        assert {accuracy["beyond_int32"] for accuracy in read(capsys)["outputs"].values()} == {None}
        assert main([*verify, "large.npy", "--engine", engine, "--json"]) == 1
        captured = capsys.readouterr()
        found = {n: a["beyond_int32"] for n, a in json.loads(captured.out)["outputs"].items()}
        # A truth says nothing of the integers it comes from; what is equal is not accused.
        said = "aten.mul.Tensor"
        assert found == {"output_0": said, "output_1": said, "output_2": None}
        assert f"dB (beyond int32: int64 values of {said} in PyTorch)" in captured.err
    assert main(["trace", "squares.pte", "--input", "large.npy"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("forward_0: first bad: mul ")
    assert "beyond int32" in output


# files that are no programs


BROKEN = {
    "missing": (None, "cannot read the program: got x.pte (No such file or directory)"),
    "empty": (b"", "x.pte: not an ExecuTorch program: got file identifier b'' in 0 bytes"),
    "text": (b"hello world, hello", "x.pte: not an ExecuTorch program: got file identifier"),
    "truncated": (5000, "x.pte: program is truncated or its header is corrupt: got 5000 bytes"),
}


@pytest.mark.parametrize("command", ["inspect", "extract", "run"])
@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_missing_program_is_an_error(command, content, message, capsys):
    if content is not None:
        Path("x.pte").write_bytes(tiny_pte()[:content] if isinstance(content, int) else content)
    before = leftovers(Path())
    assert main([command, "x.pte"]) == 1
    assert error(capsys).startswith(message)
    assert leftovers(Path()) == before


@pytest.mark.parametrize("command", ["inspect", "extract", "run"])
def test_a_corrupt_blob_is_an_error(command, capsys):
    spoiled = bytearray(tiny_pte())
    # A blob ends in its directory, written backwards: '{"nodes":' reversed.
    end = spoiled.index(b'"sedon"{') + len(b'"sedon"{')
    spoiled[end - 1] = ord("x")
    Path("x.pte").write_bytes(spoiled)
    assert main([command, "x.pte"]) == 1
    assert error(capsys).startswith("not a Core ML blob: got ")
    assert not Path("x_coreml").exists()


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_missing_package_is_an_error(command, capsys):
    Path("x.mlpackage").mkdir()
    assert main([command, "x.mlpackage"]) == 1
    assert error(capsys) == "mlpackage lacks its manifest: expected Manifest.json"
