"""``export --quantize``, ``inspect`` of the quantized weights, and ``quantize-report``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cli_models import sensitive
from support.command import MODELS, leftovers
from support.tolerances import SQNR_INT8, sqnr_db

from coreml_delegate import runtime
from coreml_delegate.quantization import QuantizationAssignment, mode_of
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")
SENSITIVE = f"{MODELS}:sensitive"
SAMPLES = f"{MODELS}:sensitive_samples"
ERROR = "coreml-delegate: error: "


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder, and an empty folder for temporary files beside it."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield here
    assert leftovers(temporary) == set()


def export(*args: str, source: str = SENSITIVE) -> int:
    return main(["export", source, *args])


def read(capsys):
    return json.loads(capsys.readouterr().out)


def _weights(capsys, path="a.pte"):
    assert main(["inspect", path, "--json"]) == 0
    (delegate,) = read(capsys)["methods"][0]["delegates"]
    return delegate["model"]["weights"]


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("mode", "scheme", "stored_as"),
    [
        ("int8-weight", "affine", "uint8"),
        ("int4-group16", "blockwise", "int4"),
        ("palettize-4", "lut", "uint4"),
    ],
)
def test_weights_are_stored_by_the_mode(mode, scheme, stored_as, capsys):
    source = f"{MODELS}:wide" if mode.startswith("palettize") else SENSITIVE
    assert export("--quantize", mode, "-o", "a.pte", "--json", source=source) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    quantization = json.loads(captured.out)["quantization"]
    assert quantization["config"]["mode"] == mode
    assert quantization["program_bytes"] == Path("a.pte").stat().st_size
    weights = _weights(capsys)
    assert weights["bytes"] == quantization["delegate_weight_bytes"]
    assert weights["bytes"] < quantization["model_weight_bytes"] / 3
    matrices = [t for t in weights["tensors"] if len(t["shape"]) == 2]
    assert {(t["scheme"], t["stored_as"]) for t in matrices} == {(scheme, stored_as)}
    bits = int(stored_as.lstrip("uint"))
    for tensor in matrices:
        elements = int(np.prod(tensor["shape"]))
        # Scales and tables come on top.
        assert bits <= tensor["bits_per_weight"] < bits + 2
        assert tensor["stored_bytes"] == round(tensor["bits_per_weight"] * elements / 8)
        assert tensor["uncompressed_bytes"] == 2 * elements
    assert weights["uncompressed_bytes"] == sum(t["uncompressed_bytes"] for t in weights["tensors"])


def test_sparse_weights_are_stored_without_their_zeros(capsys):
    assert export("--quantize", "prune-75", "-o", "a.pte", source=f"{MODELS}:wide") == 0
    capsys.readouterr()
    matrices = [t for t in _weights(capsys)["tensors"] if len(t["shape"]) == 2]
    assert {(t["scheme"], t["stored_as"]) for t in matrices} == {("sparse", "fp16")}
    # A quarter of 16 bits, and a bit of mask.
    assert all(abs(t["bits_per_weight"] - 5) < 0.1 for t in matrices)


def test_inspect_prints_the_weights(capsys):
    assert export("--quantize", "int8-weight", "-o", "a.pte") == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.startswith("quantized by int8-weight: weights 9.5 kB before, ")
    assert main(["inspect", "a.pte", "--weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(" stored, " in line and " uncompressed (" in line for line in lines)
    (heading,) = (n for n, line in enumerate(lines) if "scheme" in line)
    assert "stored as" in lines[heading]
    assert " 32x32  affine " in lines[heading + 1]


@pytest.mark.parametrize("form", ["folder", "npz", "factory"])
def test_static_quantization_is_calibrated(form, folder, capsys):
    batches = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)).numpy()
    where = SAMPLES
    if form == "folder":
        Path("data").mkdir()
        for number, batch in enumerate(batches):
            np.save(f"data/{number}.npy", batch)
        torch.save(torch.from_numpy(batches), "data/all.pt")
        where = "data"
    elif form == "npz":
        np.savez("data.npz", x=batches.reshape(6, 32))
        where = "data.npz"
    assert export("--quantize", "int8-static", "--calibration", where, "-o", "a.pte") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "quantized_decomposed.quantize_per_tensor" in captured.out
    assert main(["verify", SENSITIVE, "a.pte", "--min-sqnr", str(SQNR_INT8)]) == 0


def test_calibration_decides_the_ranges(capsys):
    for number, scale in enumerate((1.0, 100.0)):
        np.savez(f"{number}.npz", np.full((4, 2, 32), scale, np.float32))
        given = ("--calibration", f"{number}.npz", "-o", f"{number}.pte")
        assert export("--quantize", "int8-static", *given) == 0
    assert Path("0.pte").read_bytes() != Path("1.pte").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int8-static"], "int8-static quantizes activations and needs calibration"),
        (["--calibration", "x"], "there is nothing to calibrate. Pass --quantize"),
        (
            ["--quantize", "int4-group32", "--deployment-target", "iOS17"],
            "--deployment-target must be iOS18 or higher for int4-group32: got iOS17",
        ),
        (["--quantize-config", "none.json"], "cannot read none.json"),
    ],
)
def test_invalid_quantization_options_are_refused_early(arguments, message, folder, capsys):
    assert export(*arguments, "-o", "a.pte", source="no:such") == 1
    assert capsys.readouterr().err.startswith(f"{ERROR}{message}")
    assert leftovers(folder) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int9"], "argument --quantize: unknown quantization mode: got 'int9'"),
        (["--quantize", "int8-weight", "--quantize-config", "x"], "not allowed with argument"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        export(*arguments, "-o", "a.pte")
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def _files(**contents):
    Path("data").mkdir()
    for name, content in contents.items():
        path = Path("data", name.replace("_", "."))
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "the folder of calibration data is empty: got data"),
        ({"a_txt": b""}, "the folder of calibration data has files of other formats: got a.txt"),
        (
            {"a_npy": np.zeros((2, 31), np.float32)},
            "data/a.npy does not fit input x: got float32[2, 31], expected float32[2, 32]",
        ),
        (
            {"a_npy": np.zeros((5, 2, 32))},
            "sample 0 of data/a.npy does not fit input x: got float64[2, 32], "
            "expected float32[2, 32]",
        ),
        (
            {"a_png": b"none"},
            "data/a.png is an image, but the input does not take one: got float32[2, 32]",
        ),
        ({"a_npy": b"none"}, "cannot read the array in data/a.npy"),
        ({"a_npz": b"none"}, "cannot read the arrays in data/a.npz"),
        ({"a_pt": b"none"}, "cannot read tensors from data/a.pt"),
    ],
)
def test_calibration_data_that_do_not_fit_are_refused(files, message, capsys):
    _files(**files)
    assert export("--quantize", "int8-static", "--calibration", "data", "-o", "a.pte") == 1
    assert capsys.readouterr().err.startswith(ERROR + message)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing", "no such calibration data: got 'nothing', expected a folder, FILE.npz"),
        ("none.npz", "no such calibration file: got none.npz"),
        ("no_such_module:f", "no such Python module: got 'no_such_module', expected a folder"),
        (f"{MODELS}:failing", f"{MODELS}:failing fails: got ValueError: no data"),
        (f"{MODELS}:number", f"{MODELS}:number fails: got TypeError"),
        (f"{MODELS}:no_samples", "no calibration data"),
        (
            f"{MODELS}:tiny",
            f"sample 0 of {MODELS}:tiny does not fit input x: got Tiny, expected float32[2, 32]",
        ),
    ],
)
def test_missing_calibration_data_are_an_error(where, message, capsys):
    assert export("--quantize", "int8-static", "--calibration", where, "-o", "a.pte") == 1
    assert capsys.readouterr().err.startswith(ERROR + message)


def test_an_unreadable_image_is_an_error(capsys):
    _files(a_png=b"none")
    given = ("--quantize", "int8-static", "--calibration", "data", "-o", "a.pte")
    assert export(*given, source=f"{MODELS}:tiny") == 1
    assert capsys.readouterr().err.startswith(f"{ERROR}cannot read the image: got data/a.png")


def test_images_are_calibration_data(capsys):
    from PIL import Image

    Path("data").mkdir()
    for number in range(2):
        Image.new("RGB", (20, 30), (40 * number, 90, 10)).save(f"data/{number}.png")
    given = ("--quantize", "int8-static", "--calibration", "data", "--dry-run")
    assert export(*given, source=f"{MODELS}:tiny") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("quantized by int8-static: weights ")


def test_warns_of_unused_calibration_and_layers_in_float(capsys):
    given = ("--quantize", "int4-group64", "--calibration", "nothing", "-o", "a.pte")
    assert export(*given, source=f"{MODELS}:wide") == 0
    assert capsys.readouterr().err.splitlines() == [
        "coreml-delegate: warning: int4-group64 quantizes only weights: --calibration is not read",
        "coreml-delegate: warning: modules left in float: 2 (96 columns are no multiple of 64)",
    ]


def test_weights_of_attention_stay_in_float(capsys):
    source = f"{MODELS}:attending"
    assert export("--quantize", "int4-group32", "-o", "a.pte", source=source) == 0
    stays = "attention.out_proj (nn.MultiheadAttention multiplies by its weight itself)"
    assert capsys.readouterr().err.splitlines() == [
        f"coreml-delegate: warning: modules left in float: {stays}"
    ]
    capsys.readouterr()
    schemes = [tensor["scheme"] for tensor in _weights(capsys)["tensors"]]
    assert schemes.count("blockwise") == 2
    assert main(["quantize-report", source, "--quantize", "int4-group32", "--json"]) == 0
    assert {layer["path"] for layer in read(capsys)["layers"]} == {"before", "after"}


@pytest.mark.parametrize(
    ("source", "mode", "message"),
    [
        (f"{MODELS}:classifier", "int8-channel", "nothing to quantize by int8-channel: got no lin"),
        (f"{MODELS}:in_doubles", "int8-weight", "nothing to quantize by int8-weight: got "),
        (SENSITIVE, "int4-group64", "nothing to quantize by int4-group64: got first: 32 columns"),
    ],
)
def test_a_model_with_nothing_to_quantize_is_an_error(source, mode, message, capsys):
    shape = ("--input-shape", "1,3,8,8") if source.endswith("classifier") else ()
    assert export("--quantize", mode, "-o", "a.pte", *shape, source=source) == 1
    assert ERROR + message in capsys.readouterr().err


def test_exported_programs_are_quantized_too(capsys):
    rows = torch.export.Dim("rows", min=1, max=8)
    model = torch.nn.Linear(8, 4)
    program = torch.export.export(model, (torch.randn(3, 8),), dynamic_shapes=({0: rows},))
    torch.export.save(program, "a.pt2")
    assert export("--quantize", "int8-weight", "-o", "a.pte", source="a.pt2") == 0
    (method,) = PteProgram.open("a.pte").methods
    assert method.input_specs[0].shape == (8, 8)  # the largest
    assert export("--quantize", "int8-channel", "-o", "b.pte", source="a.pt2") == 1
    assert "int8-channel quantizes modules, and a .pt2 has none" in capsys.readouterr().err


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["int8-weight", "int8-static"])
def test_half_precision_models_are_quantized(mode, dtype, capsys):
    torch.manual_seed(0)
    model = sensitive()[0].eval().to(dtype)
    inputs = torch.randn(2, 32).to(dtype)
    torch.export.save(torch.export.export(model, (inputs,)), "a.pt2")
    torch.save(torch.randn(2, 32).to(dtype), "c.pt")
    calibration = ("--calibration", "c.pt") if mode == "int8-static" else ()
    assert export("--quantize", mode, *calibration, "-o", "a.pte", source="a.pt2") == 0
    capsys.readouterr()
    program = runtime.load_program("a.pte")
    (actual,) = program.run("forward", [inputs])
    assert actual.dtype is dtype
    expected = model.float()(inputs.float()).detach()
    assert sqnr_db(expected.numpy(), actual.float().numpy()) > SQNR_INT8
    assert [tensor["scheme"] for tensor in _weights(capsys)["tensors"]].count("affine") == 3


def report(*args: str) -> int:
    return main(["quantize-report", SENSITIVE, *args])


def test_the_report_ranks_layers_and_suggests_modes(folder, capsys):
    files = [f"r{suffix}" for suffix in (".html", ".json", ".png", ".txt")]
    asked = [argument for file in files for argument in ("--report", file)]
    given = ("--quantize", "int4-channel", "--target-sqnr", "15", "--suggest", "s.json")
    assert report(*given, *asked) == 0
    table = capsys.readouterr().out
    assert leftovers(folder) == {"s.json", *files}
    assert Path("r.txt").read_text() == table
    document = json.loads(Path("r.json").read_text())
    ranking = [layer["path"] for layer in document["layers"]]
    assert ranking[0] == "middle"
    assert sorted(ranking) == ["first", "last", "middle"]
    suggestion = QuantizationAssignment.read(Path("s.json"))
    assert suggestion.as_dict() == document["suggestion"]["config"]
    assert suggestion.modules == {"middle": mode_of("int8-channel")}
    assert document["suggestion"]["reached"]
    page = Path("r.html").read_text()
    assert page.count("<rect") == 3
    assert page.count('class="relieved"') == 1
    assert "http" not in page.replace("http-equiv", "")
    from PIL import Image

    with Image.open("r.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.getcolors(1 << 20)) > 3
    # What is suggested is better in the program too.
    assert _sqnr(capsys, "--quantize", "int4-channel") + 3 < _sqnr(
        capsys, "--quantize-config", "s.json"
    )


def _sqnr(capsys, *quantization):
    assert export(*quantization, "-o", "a.pte", "--force") == 0
    capsys.readouterr()
    assert main(["verify", SENSITIVE, "a.pte", "--min-sqnr", "0", "--json"]) == 0
    return read(capsys)["outputs"]["output_0"]["sqnr_db"]


def test_the_report_on_static_quantization(capsys):
    given = ("--quantize", "int8-static", "--calibration", SAMPLES, "--target-sqnr", "200")
    assert report(*given, "--json") == 0
    captured = capsys.readouterr()
    assert "warning: no mixture of modes reaches 200 dB; the suggested mixture has " in captured.err
    document = json.loads(captured.out)
    assert {layer["kind"] for layer in document["layers"]} == {"linear"}
    assert document["uniform"]["sqnr_db"] > SQNR_INT8
    assert document["suggestion"]["sqnr_db"] >= document["uniform"]["sqnr_db"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "palettize-4"], "palettize-4 is applied after conversion"),
        (["--quantize", "int8-static"], "int8-static quantizes activations and needs calibration"),
        (["--quantize", "int4-group64"], "no layer of the model has anything to quantize by"),
    ],
)
def test_modes_and_models_that_cannot_be_reported_are_refused(arguments, message, capsys):
    assert report(*arguments) == 1
    assert capsys.readouterr().err.startswith(ERROR + message)


def test_a_config_for_another_model_is_refused(capsys):
    config = QuantizationAssignment(mode_of("int4-channel"), {"midle": None})
    Path("s.json").write_text(config.to_json())
    assert export("--quantize-config", "s.json", "-o", "a.pte") == 1
    assert "names a module that the model does not have: got 'midle', expected perhaps middle" in (
        capsys.readouterr().err
    )
