"""Inputs of the commands: images, random values, weights; and how outputs are compared."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from support.mil import ct
from support.tolerances import ATOL_RTOL, sqnr_db

from coreml_delegate.errors import ExecutionError, InputError, OptionError, ProgramError
from coreml_delegate.runtime.accuracy import Accuracy
from coreml_delegate.scripts.arguments import new_output
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.inputs import images, vision
from coreml_delegate.scripts.inputs.random_tensors import generator, random_tensor, resample


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).resize((427, 640)).save(path)
    return path


@pytest.mark.parametrize("name", ["mobilenet_v2", "inception_v3"])
@pytest.mark.parametrize("rotate", [False, True])
def test_images_are_prepared_as_torchvision_does(name, rotate, photo):
    with Image.open(photo) as opened:
        image = opened.rotate(90, expand=True) if rotate else opened.copy()
    image.save(photo)
    weights = vision.import_torchvision().models.get_model_weights(name)
    # The first weights of each model were trained with the plain ImageNet recipe.
    expected = weights.IMAGENET1K_V1.transforms()(image)
    shape = (2, 3, *expected.shape[1:])
    actual = images.read_image(photo, shape, torch.float32)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected.expand(shape))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 3, 8), torch.float32), ((1, 1, 8, 8), torch.float32), ((1, 3, 8, 8), torch.int32)],
)
def test_images_for_inputs_that_take_none_are_refused(shape, dtype, photo):
    with pytest.raises(InputError, match="is an image, but the input does not take one"):
        images.read_image(photo, shape, dtype)


def test_random_values_depend_only_on_the_seed():
    first = random_tensor(torch.float32, (2, 3), generator(1))
    torch.manual_seed(5)
    torch.testing.assert_close(random_tensor(torch.float32, (2, 3), generator(1)), first)
    assert not torch.equal(random_tensor(torch.float32, (2, 3), generator(2)), first)


def test_tensors_larger_than_memory_are_refused():
    with pytest.raises(ExecutionError, match=r"a random float32\[1000000000000, 8\] does not fit"):
        random_tensor(torch.float32, (1000000000000, 8), generator(0))


def test_resampled_indices_stay_in_range():
    example = torch.tensor([3, 7, 2] * 50)
    again = resample(example, generator(0))
    assert again.dtype == example.dtype
    assert again.shape == example.shape
    assert (int(again.min()), int(again.max())) == (2, 7)
    assert resample(5, generator(0)) == 5
    assert resample(torch.tensor([4]), generator(0)).tolist() == [4]


_CAUSAL = torch.ones(4, 4).tril()


@pytest.mark.parametrize(
    ("example", "kept"),
    [
        (_CAUSAL > 0, True),
        (_CAUSAL, True),
        (_CAUSAL.int(), True),
        (_CAUSAL.log(), True),
        ((_CAUSAL - 1) * 1e9, True),
        (torch.arange(8).expand(2, 8), True),
        (torch.tensor([0, 3, 3, 7]), True),
        (torch.tensor([3, 7, 5]), False),
        (torch.tensor([[3], [7]], dtype=torch.uint8), False),
        (torch.tensor([200, 3, 90], dtype=torch.uint8), False),
        (torch.zeros(1, 8), False),
        (torch.linspace(0, 1, 8), False),
    ],
    ids=str,
)
def test_masks_offsets_and_positions_are_kept(example, kept):
    draws = [resample(example, generator(seed)) for seed in range(8)]
    assert all(torch.equal(draw, example) for draw in draws) is kept


def test_accuracy_over_several_samples():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((4, 1, 10))
    actual = expected + 0.01 * rng.standard_normal(expected.shape)
    accuracy = Accuracy()
    for want, got in zip(expected, actual, strict=True):
        accuracy.add(torch.from_numpy(want), torch.from_numpy(got))
    assert accuracy.sqnr_db == pytest.approx(sqnr_db(expected, actual))
    assert accuracy.max_abs_error == pytest.approx(abs(expected - actual).max())
    agreeing = (expected.argmax(-1) == actual.argmax(-1)).mean()
    assert accuracy.top1_agreement == pytest.approx(agreeing)


@pytest.mark.parametrize(
    ("expected", "actual", "sqnr"),
    [
        ([1.0, 2.0], [1.0, 2.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], math.inf),
        ([0.0, 0.0], [0.0, 1.0], -math.inf),
        ([1.0, 2.0], [1.0, math.nan], -math.inf),
        ([math.inf, 2.0], [math.inf, 2.0], math.inf),
        ([1.0, 2.0], [math.inf, 2.0], -math.inf),
    ],
)
def test_accuracy_of_special_values(expected, actual, sqnr):
    accuracy = Accuracy()
    accuracy.add(torch.tensor(expected), torch.tensor(actual))
    assert accuracy.sqnr_db == sqnr
    assert accuracy.top1_agreement is None


def test_accuracy_refuses_different_shapes():
    accuracy = Accuracy()
    accuracy.add(torch.tensor(1.0), torch.tensor([1.0]))
    with pytest.raises(ProgramError, match="outputs of different shapes"):
        accuracy.add(torch.zeros(2, 3), torch.zeros(3, 2))


def test_accuracy_takes_none_only_on_both_sides():
    accuracy = Accuracy()
    accuracy.add(None, None)
    assert accuracy.sqnr_db == math.inf
    with pytest.raises(ProgramError, match=r"different kinds: got None, expected .* shape \[2\]"):
        accuracy.add(torch.zeros(2), None)
    with pytest.raises(ProgramError, match=r"different kinds: got .* shape \[\], expected None"):
        accuracy.add(None, torch.tensor(3))


def interrupted(path):
    with new_output(path, force=True) as file:
        file.write(b"new")
        raise KeyboardInterrupt


def test_an_unfinished_file_is_removed(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


def overtaken(path):
    with new_output(path, force=False) as file:
        file.write(b"ours")
        path.write_text("theirs")


def test_a_file_created_meanwhile_is_kept(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(OptionError, match="output exists"):
        overtaken(path)
    assert path.read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mobilenet_v2", (1, 3, 224, 224)),
        ("inception_v3", (1, 3, 299, 299)),
        ("efficientnet_b4", (1, 3, 380, 380)),
        ("fcn_resnet50", (1, 3, 520, 520)),
        ("r3d_18", (1, 3, 16, 112, 112)),
        ("mnasnet0_75", (1, 3, 224, 224)),
    ],
)
def test_input_shapes_of_torchvision(name, shape):
    assert vision.input_shape(name) == shape


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet", "lraspp_mobilenet_v3_large"])
def test_torchvision_models_need_no_download(name):
    model = vision.build_model(name)
    assert not model.training


_FACTORY = """
import torch, torchvision
def make():
    return torch.nn.Identity(), torchvision.INPUTS
"""

_LOADING = """
import sys
from coreml_delegate.patches import third_party
from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.inputs import source
finders = list(sys.meta_path)
try:
    loaded = source.load_source("factory:make", shapes=(), weights=None, seed=0)
    import torchvision
    print(loaded.input_names, type(torchvision.__spec__.loader).__name__, end=" ")
except OptionError as error:
    print(error, end=" ")
print(third_party._declare_operators.cache_info().misses, sys.meta_path == finders)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torchvision", "result"),
    [
        (
            "import torch\n"
            "torch.library.register_fake('torchvision::nms')(lambda *boxes: None)\n"
            "INPUTS = {'input': torch.ones(2)}",
            "['input'] SourceFileLoader 1 True",
        ),
        (
            "raise RuntimeError('something else')",
            "cannot import factory: got RuntimeError: something else 0 True",
        ),
    ],
    ids=["the operators are missing", "something else"],
)
def test_factories_import_a_torchvision_whose_library_does_not_load(torchvision, result, tmp_path):
    """In a fresh process, operators are declared only if the import fails for their want."""
    (tmp_path / "torchvision.py").write_text(torchvision)
    (tmp_path / "factory.py").write_text(_FACTORY)
    done = subprocess.run(
        [sys.executable, "-c", _LOADING],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [result]


# Images as a model declares them


_LAYOUTS = {
    "RGB": (3, lambda image: np.asarray(image).transpose(2, 0, 1)),
    "BGR": (3, lambda image: np.asarray(image)[..., ::-1].transpose(2, 0, 1)),
    "GRAYSCALE": (1, lambda image: np.asarray(image.convert("L"))[None]),
    "GRAYSCALE_FLOAT16": (1, lambda image: np.asarray(image.convert("F"))[None]),
}


_BIAS = (-1.0, -2.0, -3.0)


def _package_of_an_image(layout, path):
    """Save a model that returns the pixels of an image, scaled and with a bias."""
    channels, _ = _LAYOUTS[layout]
    shape = (1, channels, 4, 5)
    bias = _BIAS[0] if channels == 1 else list(_BIAS)
    color = ct.colorlayout[layout]
    ct.convert(
        torch.jit.trace(torch.nn.Flatten().eval(), torch.rand(shape)),
        inputs=[ct.ImageType("x", shape, scale=0.25, bias=bias, color_layout=color)],
        outputs=[ct.TensorType("y", dtype=np.float32)],
        minimum_deployment_target=ct.target.iOS16,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    ).save(str(path))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_images_go_in_as_the_model_declares_them(layout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _package_of_an_image(layout, "a.mlpackage")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA")
    image.save("x.png")
    # Twice the size, on a strip whose ends are cut off.
    strip = Image.new("RGB", (30, 8))
    strip.paste(image.convert("RGB").resize((10, 8), Image.Resampling.NEAREST), (10, 0))
    strip.save("wide.png")
    channels, expected = _LAYOUTS[layout]
    bias = np.array(_BIAS[:channels]).reshape(channels, 1, 1)
    for name in ("x.png", "wide.png"):
        assert main(["run", "a.mlpackage", "--input", name, "-o", "y.npz", "--force"]) == 0
        actual = np.load("y.npz")["y"].reshape(channels, 4, 5)
        wanted = expected(image.convert("RGB")) * 0.25 + bias
        if name == "x.png":
            atol, rtol = ATOL_RTOL["fp16" if layout.endswith("FLOAT16") else "fp32"]
            np.testing.assert_allclose(actual, wanted, atol=atol, rtol=rtol)
        else:
            assert np.abs(actual - wanted).mean() < np.abs(wanted - wanted.mean()).mean() / 2
    capsys.readouterr()
    assert main(["inspect", "a.mlpackage"]) == 0
    assert f"inputs: x {layout} image[1, {channels}, 4, 5]\n" in capsys.readouterr().out
    assert main(["run", "a.mlpackage", "-o", "y.npz", "--force"]) == 0
    drawn = (np.load("y.npz")["y"].reshape(channels, 4, 5) - bias) * 4
    np.testing.assert_allclose(drawn, drawn.round(), atol=1e-3)
    assert drawn.min() >= 0
    assert 128 < drawn.max() <= 255
