"""``export`` and ``convert`` to an ``.mlpackage`` for an app, and ``verify`` of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from executorch.export import export as export_by_recipe
from support.cli_models import channels
from support.command import MODELS, leftovers
from support.tolerances import SQNR_FP16

from coreml_delegate.patches.third_party import quiet_import, torchvision_importable
from coreml_delegate.recipes import CoreMLRecipeType
from coreml_delegate.runtime import load_mlpackage, patch_coremltools
from coreml_delegate.scripts.cli import main

with quiet_import():
    import coremltools as ct

pytestmark = pytest.mark.xdist_group("cli")

_CHANNELS = f"{MODELS}:channels"
_COLORS = ("--labels", "colors.txt", "--softmax")
_MIL = "func.func public @main(%a: tensor<1x3x4x5xf32>) -> tensor<1x3x4x5xf32> {\n"
_MIL += "  %0 = stablehlo.add %a, %a : tensor<1x3x4x5xf32>\n  return %0 : tensor<1x3x4x5xf32>\n}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with labels, and an empty folder for temporary files beside it."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    Path("colors.txt").write_text("red\ngreen\nblue\n")
    yield here
    assert leftovers(temporary) == set()


def export(*args: str) -> int:
    return main(["export", *args])


def test_one_command_makes_a_classifier_of_pictures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = pytest.importorskip("PIL.Image").new("RGB", (5, 4), (90, 220, 30))
    picture.save("green.png")
    options = ("--image", "image:std=0.5", "--rename", "image=photo", "--author", "Me")
    assert export(_CHANNELS, "-o", "c.mlpackage", "--report", "c.html", *_COLORS, *options) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "(100.0%) in 1 partition(s)" in captured.out
    assert leftovers(folder) == {"c.mlpackage", "c.html", "colors.txt", "green.png"}
    with patch_coremltools("reference"):
        model = ct.models.MLModel("c.mlpackage")
        outputs = model.predict({"photo": picture})
    assert model.author == "Me"
    assert outputs["classLabel"] == "green"
    source, _ = channels()
    pixels = torch.tensor(np.asarray(picture)).permute(2, 0, 1)[None] / 255 / 0.5
    (expected,) = source.eval()(pixels).detach().softmax(-1)
    for name, value in zip(("red", "green", "blue"), expected.tolist(), strict=True):
        assert outputs["classLabel_probs"][name] == pytest.approx(value, abs=2e-3)
    assert main(["run", "c.mlpackage", "--input", "green.png"]) == 0
    assert "classLabel: green\n" in capsys.readouterr().out
    # verify gives the model the normalized pixels, and applies the softmax.
    for inputs in ([], ["--input", "green.png"]):
        assert main(["verify", _CHANNELS, "c.mlpackage", "--json", *inputs]) == 0
        (output,) = json.loads(capsys.readouterr().out)["outputs"].values()
        assert output["sqnr_db"] > SQNR_FP16


def test_verify_takes_the_outputs_in_the_order_of_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A classifier's probabilities come first, whatever the model returns first."""
    Path("beside.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Beside(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return {'mean': x.mean(), 'scores': x.mean((2, 3)) * 3, 'most': x.amax()}\n"
        "def make():\n    return Beside(), torch.rand(1, 3, 4, 5)\n"
    )
    assert export("beside:make", "-o", "b.mlpackage", *_COLORS) == 0
    assert [f.name for f in load_mlpackage("b.mlpackage").outputs] == [
        "classLabel_probs",
        "mean",
        "most",
    ]
    capsys.readouterr()
    assert main(["verify", "beside:make", "b.mlpackage", "--min-sqnr", str(SQNR_FP16)]) == 0


def test_flexible_sizes_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dynamic", "image:2=2..8", "--dynamic", "image:3=2..8", "--image", "image")
    assert export(_CHANNELS, "-o", "r.mlpackage", *options) == 0
    description = ct.utils.load_spec("r.mlpackage").description
    image = description.input[0].type.imageType
    assert (image.height, image.width) == (4, 5)  # of the example
    sizes = image.imageSizeRange
    assert (sizes.heightRange.lowerBound, sizes.widthRange.upperBound) == (2, 8)
    shapes = ("--enumerated-shapes", "image=1,3,4,5/1,3,8,8", "--image", "image")
    assert export(_CHANNELS, "-o", "e.mlpackage", *shapes) == 0
    image = ct.utils.load_spec("e.mlpackage").description.input[0].type.imageType
    assert [(s.height, s.width) for s in image.enumeratedSizes.sizes] == [(4, 5), (8, 8)]
    for name in ("r.mlpackage", "e.mlpackage"):
        assert main(["verify", _CHANNELS, name]) == 0


def test_options_of_a_lowering_reach_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    source = (f"{MODELS}:classifier", "--input-shape", "1,3,8,8", "-o", "q.mlpackage", "--json")
    assert export(*source, "--quantize", "int8-weight", "--precision", "auto") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["precision"] is not None
    assert report["quantization"]["delegate_weight_bytes"] is not None
    assert main(["inspect", "q.mlpackage"]) == 0
    assert "int8" in capsys.readouterr().out
    assert main(["check", "q.mlpackage"]) == 0


def test_calls_that_core_ml_does_not_take(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(f"{MODELS}:in_doubles", "-o", "a.mlpackage") == 1
    message = capsys.readouterr().err
    assert "error: Core ML cannot take " in message
    assert "Change the model, or export a .pte, which runs them on the CPU\n" in message
    assert leftovers(folder) == {"colors.txt"}
    assert export(f"{MODELS}:in_doubles", "-o", "a.mlpackage", "--dry-run") == 1
    assert "error: Core ML cannot take " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "a.pte", "--image", "image"), "--image is for an .mlpackage: got a.pte"),
        (("--dry-run", *_COLORS), "--labels, --softmax are for an .mlpackage: got no output"),
        (("-o", "a.mlmodel"), "unknown kind of output: got a.mlmodel, expected .pte or .mlpackage"),
        (("-o", "a.mlpackage", "--image", "photo"), "for --image: got 'photo', expected "),
        (("-o", "a.mlpackage", "--labels", "none.txt"), "cannot read the labels in none.txt: got "),
        (("-o", "a.mlpackage", "--softmax"), "softmax is for the output with the labels"),
        (("-o", "a.mlpackage", "--rename", "a=b"), "for --rename: got 'a', expected "),
        (("-o", "a.mlpackage", "--skip-op", "mul"), "leaves nothing to the CPU"),
        (("-o", "colors.txt/a.mlpackage"), "no such folder for the output"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(_CHANNELS, *options) == 1
    assert message in capsys.readouterr().err
    assert leftovers(folder) == {"colors.txt"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--etrecord", "a.etrecord"), "--etrecord belongs to a .pte, not to an .mlpackage"),
        (("--bundle", "2"), "--bundle belongs to a .pte"),
        (("--image", "x:hue=1"), "argument --image: 'x:hue=1' is no image: got hue=1"),
        (("--rename", "a"), "argument --rename: 'a' has no =: expected NAME=TEXT"),
    ],
)
def test_wrong_usage(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        export(_CHANNELS, "-o", "a.mlpackage", *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_package_is_replaced_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert export(_CHANNELS, "-o", "a.mlpackage") == 0
    assert export(_CHANNELS, "-o", "a.mlpackage") == 1
    assert "output exists: got a.mlpackage. Pass --force" in capsys.readouterr().err
    assert export(_CHANNELS, "-o", "a.mlpackage", "--force", "--rename", "image=x") == 0
    assert load_mlpackage("a.mlpackage").input_names == ("x",)
    Path("b.mlpackage").write_text("a file")
    assert export(_CHANNELS, "-o", "b.mlpackage", "--force") == 1
    assert "output is not a folder: got b.mlpackage" in capsys.readouterr().err


def test_convert_declares_an_interface(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    pictures = pytest.importorskip("PIL.Image")
    Path("a.mlir").write_text(_MIL)
    options = ("--image", "arg0:scale=0.5,bias=1", "--rename", "arg0=photo")
    assert main(["convert", "a.mlir", "-o", "a.mlpackage", *options, "--license", "MIT"]) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    with patch_coremltools("reference"):
        model = ct.models.MLModel("a.mlpackage")
        (result,) = model.predict({"photo": pictures.fromarray(pixels)}).values()
    assert model.license == "MIT"
    np.testing.assert_array_equal(result, (pixels.transpose(2, 0, 1)[None] * 0.5 + 1) * 2)
    assert main(["verify", "a.mlir", "a.mlpackage"]) == 0
    assert main(["convert", "a.mlir", "-o", "a.pte", *options]) == 1
    assert "--image, --rename are for an .mlpackage" in capsys.readouterr().err


_INTERFACE = (*_COLORS, "--image", "image:std=0.5", "--rename", "image=photo")


def _bytes_of(package: str) -> dict[Path, bytes]:
    root = Path(package)
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_package_of_a_written_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert export(_CHANNELS, "-o", "a.pte") == 0
    assert main(["extract", "a.pte", "-o", "b.mlpackage", *_INTERFACE]) == 0
    assert export(_CHANNELS, "-o", "c.mlpackage", *_INTERFACE) == 0
    assert _bytes_of("b.mlpackage") == _bytes_of("c.mlpackage")
    capsys.readouterr()
    assert main(["extract", "a.pte", "-o", "b.mlpackage", "--force", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "path": "b.mlpackage",
        "bytes": sum(map(len, _bytes_of("b.mlpackage").values())),
    }
    assert main(["verify", _CHANNELS, "b.mlpackage"]) == 0


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
def test_the_package_of_a_recipe() -> None:
    module, example = channels()
    recipe = ExportRecipe.get_recipe(CoreMLRecipeType.FP32)
    export_by_recipe(module, [(example,)], recipe).save_to_pte("a.pte")
    assert main(["extract", "a.pte", "-o", "a.mlpackage", "--rename", "image=photo"]) == 0
    assert load_mlpackage("a.mlpackage").input_names == ("photo",)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("in_doubles", (), "the program is not one Core ML model: got 0 delegates, aten::"),
        (
            "tiny",
            ("--skip-op", "sin", "--skip-op", "sum"),
            "the program is not one Core ML model: got aten::",
        ),
    ],
)
def test_programs_that_do_more_than_one_delegate(
    source: str,
    options: tuple[str, ...],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(f"{MODELS}:{source}", "-o", "a.pte", "--no-verify", *options) == 0
    assert main(["extract", "a.pte", "-o", "a.mlpackage"]) == 1
    assert message in capsys.readouterr().err
    assert main(["extract", "a.pte", "-o", "models", "--rename", "a=b"]) == 1
    assert "--rename is for an .mlpackage: got models" in capsys.readouterr().err
    assert leftovers(folder) == {"a.pte", "colors.txt"}


@pytest.mark.slow  # the import of timm
def test_a_model_of_timm(capsys: pytest.CaptureFixture[str]) -> None:
    with torchvision_importable():
        pytest.importorskip("timm")
    options = ("--image", "x:mean=0.485/0.456/0.406,std=0.229/0.224/0.225")
    assert export("timm:test_vit", "-o", "t.mlpackage", *options) == 0
    assert main(["verify", "timm:test_vit", "t.mlpackage"]) == 0
    assert export("timm:test_vat", "-o", "u.mlpackage") == 1
    assert "timm has no such model: got 'test_vat', expected perhaps" in capsys.readouterr().err
