"""``save_mlpackage``: described as coremltools describes the same model, and equal to PyTorch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tolerances import ATOL_RTOL, SQNR_FP16, sqnr_db
from torch import Tensor, nn
from torch.export import Dim

from coreml_delegate.backend import CoreMLBackend
from coreml_delegate.errors import LoweringError, OptionError, ProgramError
from coreml_delegate.options.model_interface import ImageFeature, ModelInterface
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.partition.package import example_inputs, package_files, save_mlpackage
from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime import load_mlpackage, patch_coremltools

with quiet_import():
    import coremltools as ct

_LABELS = ["cat", "dog", "bird", "fish", "tree"]
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Filter(nn.Module):
    """Pixels to pixels."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, 8, 3, padding=1)
        self.outer = nn.Conv2d(8, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).sigmoid() * 255


class Scores(nn.Module):
    """Scores of five classes, optionally as probabilities or beside another result."""

    def __init__(self, *, softmax: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3)
        self.softmax, self.beside = softmax, beside

    def forward(self, x: Tensor) -> Any:
        scores = self.layer(x).mean((2, 3))
        scores = scores.softmax(-1) if self.softmax else scores
        return (x.mean((1, 2, 3)), scores) if self.beside else scores


def _program(model: nn.Module, *examples: Any, sizes: Any = None) -> Any:
    torch.manual_seed(0)
    return torch.export.export(model.eval(), examples, dynamic_shapes=sizes)


def _description(path: Path) -> Any:
    description = ct.utils.load_spec(str(path)).description
    description.ClearField("metadata")
    return description


# Beside coremltools


@dataclass(frozen=True)
class Case:
    """A model, its interface, and the same as keywords of ``coremltools.convert``."""

    model: Callable[[], nn.Module]
    interface: ModelInterface
    keywords: Callable[[], dict[str, Any]]
    shape: tuple[int, ...] = (1, 3, 16, 24)
    sizes: Any = None
    enumerated: Sequence[Sequence[int]] | None = None
    target: str | None = None


_HEIGHT, _WIDTH = Dim("height", min=8, max=64), Dim("width", min=8, max=64)
_IMAGE = ImageFeature(scale=1 / 255, bias=(-0.1, -0.2, -0.3))
_SHAPES = ((1, 3, 16, 24), (1, 3, 32, 48), (1, 3, 64, 64))


def _image(shape: Any, **options: Any) -> list[Any]:
    return [ct.ImageType("x", shape, scale=1 / 255, bias=[-0.1, -0.2, -0.3], **options)]


def _ranges() -> Any:
    return ct.Shape((1, 3, ct.RangeDim(8, 64, 16), ct.RangeDim(8, 64, 24)))


_CASES = {
    "arrays": Case(
        Filter,
        ModelInterface(),
        lambda: {"inputs": [ct.TensorType("x", (1, 3, 16, 24))]},
    ),
    "arrays of a range": Case(
        Filter,
        ModelInterface(),
        lambda: {"inputs": [ct.TensorType("x", _ranges())]},
        sizes=({2: _HEIGHT, 3: _WIDTH},),
    ),
    "arrays of iOS18": Case(
        Filter,
        ModelInterface(),
        lambda: {"inputs": [ct.TensorType("x", (1, 3, 16, 24), dtype=np.float32)]},
        target="iOS18",
    ),
    "images": Case(
        Filter,
        ModelInterface(images={"x": _IMAGE, "output": ImageFeature("bgr")}),
        lambda: {
            "inputs": _image((1, 3, 16, 24)),
            "outputs": [ct.ImageType("output", color_layout=ct.colorlayout.BGR)],
        },
    ),
    "images of a range": Case(
        Filter,
        ModelInterface(images={"x": _IMAGE, "output": ImageFeature()}),
        lambda: {"inputs": _image(_ranges()), "outputs": [ct.ImageType("output")]},
        sizes=({2: _HEIGHT, 3: _WIDTH},),
    ),
    "images of one open size": Case(
        Filter,
        ModelInterface(images={"x": _IMAGE}),
        lambda: {"inputs": _image(ct.Shape((1, 3, ct.RangeDim(8, 64, 16), 24)))},
        sizes=({2: _HEIGHT},),
    ),
    "images of enumerated sizes": Case(
        Filter,
        ModelInterface(images={"x": _IMAGE}),
        lambda: {"inputs": _image(ct.EnumeratedShapes(_SHAPES))},
        sizes=({2: _HEIGHT, 3: _WIDTH},),
        enumerated=_SHAPES,
    ),
    "images of iOS18": Case(
        Filter,
        ModelInterface(images={"x": ImageFeature("bgr", 1 / 255, (-0.1, -0.2, -0.3))}),
        lambda: {"inputs": _image((1, 3, 16, 24), color_layout=ct.colorlayout.BGR)},
        target="iOS18",
    ),
    "gray images": Case(
        lambda: Filter(1),
        ModelInterface(images={"x": ImageFeature("grayscale", 0.5, -1)}),
        lambda: {
            "inputs": [
                ct.ImageType("x", (1, 1, 16, 24), 0.5, -1.0, color_layout=ct.colorlayout.GRAYSCALE)
            ]
        },
        shape=(1, 1, 16, 24),
    ),
    "labels": Case(
        Scores,
        ModelInterface(images={"x": _IMAGE}, labels=_LABELS),
        lambda: {
            "inputs": _image((1, 3, 16, 24)),
            "classifier_config": ct.ClassifierConfig(_LABELS),
        },
    ),
    "labels of iOS18": Case(
        Scores,
        ModelInterface(
            labels=_LABELS, names={"classLabel": "kind", "classLabel_probs": "kind_probs"}
        ),
        lambda: {
            "inputs": [ct.TensorType("x", (1, 3, 16, 24), dtype=np.float32)],
            "classifier_config": ct.ClassifierConfig(_LABELS, "kind"),
        },
        target="iOS18",
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_the_description_is_that_of_coremltools(name: str, tmp_path: Path) -> None:
    case = _CASES[name]
    program = _program(case.model(), torch.rand(case.shape), sizes=case.sizes)
    target = None if case.target is None else ct.target[case.target]
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=target)
    if case.enumerated is not None:
        shapes = {"x": [list(shape) for shape in case.enumerated]}
        specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(program, shapes))
    own, other = tmp_path / "own.mlpackage", tmp_path / "other.mlpackage"
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    save_mlpackage(program, own, partitioner, case.interface)
    keywords = case.keywords()
    if "classifier_config" not in keywords:
        keywords = {"outputs": [ct.TensorType("output")], **keywords}
    with quiet_import():
        converted = ct.convert(
            program.run_decompositions({}),
            minimum_deployment_target=target,
            skip_model_load=True,
            **keywords,
        )
    converted.save(str(other))
    assert _description(own) == _description(other)
    # The first operations scale the image, and the last looks the label up.
    kinds = [_computing(path) for path in (own, other)]
    if case.interface.images:
        assert kinds[0][:2] == kinds[1][:2]
    assert (kinds[0][-1] == "classify") == (kinds[1][-1] == "classify")


def _computing(path: Path) -> list[str]:
    function = ct.utils.load_spec(str(path)).mlProgram.functions["main"]
    (block,) = function.block_specializations.values()
    return [operation.type for operation in block.operations if operation.type != "const"]


# Beside PyTorch


def _predicted(path: Path, inputs: dict[str, Any], engine: str = "reference") -> dict[str, Any]:
    with patch_coremltools(engine):
        return ct.models.MLModel(str(path)).predict(inputs)


@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_a_classifier_predicts_from_a_picture(engine: str, tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    model, path = Scores(), tmp_path / "a.mlpackage"
    image = ImageFeature.normalized(mean=_MEAN, std=_STD)
    interface = ModelInterface(images={"x": image}, labels=_LABELS, softmax=True)
    save_mlpackage(_program(model, torch.rand(1, 3, 16, 24)), path, None, interface)
    outputs = _predicted(path, {"x": pictures.fromarray(pixels)}, engine)
    # As torchvision's ToTensor and Normalize compute it.
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    normal = (tensor - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]
    with torch.no_grad():
        (expected,) = model(normal).softmax(-1)
    assert outputs["classLabel"] == _LABELS[int(expected.argmax())]
    probabilities = outputs["classLabel_probs"]
    assert list(probabilities) == _LABELS
    atol, rtol = ATOL_RTOL["fp16"]
    np.testing.assert_allclose([*probabilities.values()], expected, atol=atol, rtol=rtol)


def test_pictures_go_in_and_come_out(tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    model, path = Filter(), tmp_path / "a.mlpackage"
    program = _program(model, torch.rand(1, 3, 16, 24), sizes=({2: _HEIGHT, 3: _WIDTH},))
    interface = ModelInterface(
        images={"x": ImageFeature("bgr", scale=1 / 255), "output": ImageFeature("bgr")}
    )
    save_mlpackage(program, path, None, interface)
    for height, width in ((16, 24), (9, 33)):
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = _predicted(path, {"x": pictures.fromarray(pixels)})["output"]
        assert picture.size == (width, height)
        swapped = torch.from_numpy(pixels[..., ::-1].copy()).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            expected = model(swapped)[0].permute(1, 2, 0).numpy()[..., ::-1]
        difference = np.abs(np.asarray(picture, np.float32) - expected)
        assert difference.max() <= 1  # of 255: rounded to a pixel, and in fp16


class Unusual(nn.Module):
    """Nested values, an input that is an output, one value twice, and None."""

    def forward(self, input: Tensor, past: dict[str, list[Tensor]], scale: float) -> Any:
        total = input * scale + past["key"][0]
        return {"total": total, "again": [total, None], "state": input}


def test_names_and_outputs_of_a_model(tmp_path: Path) -> None:
    model, path = Unusual(), tmp_path / "a.mlpackage"
    examples = (torch.randn(2, 3), {"key": [torch.randn(2, 3)]}, 2.0)
    save_mlpackage(_program(model, *examples), path)
    loaded = load_mlpackage(path, engine="reference")
    assert loaded.input_names == ("input", "past_key_0")
    assert loaded.output_names == ("total", "again_0", "state_")
    inputs = {"input": examples[0].numpy(), "past_key_0": examples[1]["key"][0].numpy()}
    outputs = loaded.predict(inputs)
    expected = model(*examples)
    for name, value in (
        ("total", expected["total"]),
        ("again_0", expected["total"]),
        ("state_", examples[0]),
    ):
        assert sqnr_db(value.numpy(), outputs[name]) > SQNR_FP16


class Counter(nn.Module):
    """Counts calls from 3 on, in a buffer of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("total", torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.inner.total.add_(1)
        return x * self.inner.total


@pytest.mark.filterwarnings("ignore:Input, 'inner.total', of the source model")
def test_states_keep_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.mlpackage"
    interface = ModelInterface(names={"inner.total": "total", "output": "product"})
    save_mlpackage(_program(Counter(), torch.ones(2)), path, None, interface)
    image = ModelInterface(images={"inner.total": ImageFeature()})
    with pytest.raises(OptionError, match="a state cannot be an image: got 'inner_total'"):
        save_mlpackage(_program(Counter(), torch.ones(2)), tmp_path / "b.mlpackage", None, image)
    (state,) = [s for s in _description(path).state if "started" not in s.name]
    assert state.name == "total"
    loaded = load_mlpackage(path, engine="reference")
    memory = loaded.make_state()
    for expected in (4.0, 5.0):
        outputs = loaded.predict({"x": np.ones(2, np.float32)}, memory)
        np.testing.assert_array_equal(outputs["product"], [expected, expected])


class Taken(nn.Module):
    """Its values have names that users may want."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + 1)


def test_new_names_do_not_meet_inner_names(tmp_path: Path) -> None:
    program = _program(Taken(), torch.randn(2, 3))
    path = tmp_path / "a.mlpackage"
    save_mlpackage(program, path)
    function = ct.utils.load_spec(str(path)).mlProgram.functions["main"]
    (block,) = function.block_specializations.values()
    inner = [op.outputs[0].name for op in block.operations if op.type != "const"]
    names = {"x": inner[0], "output": inner[1]}
    save_mlpackage(program, path, None, ModelInterface(names=names), overwrite=True)
    outputs = load_mlpackage(path, engine="reference").predict({inner[0]: np.zeros((2, 3))})
    np.testing.assert_array_equal(outputs[inner[1]], np.ones((2, 3)))


def test_the_description_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "a.mlpackage"
    interface = ModelInterface(
        author="A. Author",
        license="MIT",
        description="Scores of animals.",
        version="1.2",
        descriptions={"x": "A photo.", "classLabel": "The animal."},
        labels=_LABELS,
        names={"x": "photo"},
    )
    program = _program(Scores(softmax=True, beside=True), torch.rand(1, 3, 8, 8))
    save_mlpackage(program, path, None, interface)
    model = ct.models.MLModel(str(path), skip_model_load=True)
    assert (model.author, model.license, model.version) == ("A. Author", "MIT", "1.2")
    assert model.short_description == "Scores of animals."
    assert model.input_description["photo"] == "A photo."
    assert model.output_description["classLabel"] == "The animal."
    outputs = [feature.name for feature in _description(path).output]
    assert outputs == ["classLabel", "classLabel_probs", "output_0"]


def test_equal_programs_give_equal_bytes(tmp_path: Path) -> None:
    model = Scores()
    interface = ModelInterface(images={"x": _IMAGE}, labels=_LABELS, softmax=True)
    contents: list[dict[str, bytes]] = []
    for name in ("a.mlpackage", "b.mlpackage"):
        folder = tmp_path / name
        save_mlpackage(_program(model, torch.rand(1, 3, 8, 8)), folder, None, interface)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        contents.append({str(f.relative_to(folder)): f.read_bytes() for f in files})
    assert contents[0] == contents[1]


# Errors


class Refused(nn.Module):
    """An operation that stays on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.erfcx(x) + 1


class Unused(nn.Module):
    """An input without effect."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + 1


class Writing(nn.Module):
    """An input that is written."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Buffered(nn.Module):
    """A buffer that no state can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, 3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Constant(nn.Module):
    """A number among the results."""

    def forward(self, x: Tensor) -> Any:
        return x + 1, 3


class Same(nn.Module):
    """Nothing to compute."""

    def forward(self, x: Tensor) -> Tensor:
        return x


_X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("model", "examples", "message"),
    [
        (Refused(), (_X,), "Core ML cannot take .*erfcx.* export a .pte, which runs them on"),
        (
            Unused(),
            (_X, torch.ones(1)),
            "does not use an input.*: got mask. Leave it out of",
        ),
        (Writing(), (_X,), "writes to an input, which Core ML cannot: got x"),
        (Buffered(), (_X,), "a mutable buffer is no state.*: got count: "),
        (Constant(), (_X,), "an output does not depend on the model's inputs: got output_1, 3"),
        (Same(), (_X,), "the program is not one Core ML model: got 0 delegates"),
    ],
)
def test_programs_that_are_no_model(
    model: nn.Module, examples: tuple[Tensor, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match=message):
        save_mlpackage(_program(model, *examples), tmp_path / "a.mlpackage")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        (
            {"images": {"y": ImageFeature()}},
            "input or output for --image: got 'y', expected output, x",
        ),
        (
            {"images": {"x": ImageFeature("grayscale")}},
            "'x' does not have the shape of an image with",
        ),
        ({"images": {"output": ImageFeature()}}, "got [1, 5], expected [1, 3, height, width]"),
        ({"labels": ["a", "b"]}, "no output has an element for each label: got output [1, 5] for"),
        ({"names": {"z": "a"}}, "for --rename: got 'z'"),
        ({"names": {"x": "a", "output": "a"}}, "--rename gives two inputs or outputs one name"),
        ({"names": {"output": "x"}}, "--rename gives two inputs or outputs one name"),
        ({"descriptions": {"z": "a"}}, "for --describe: got 'z'"),
    ],
)
def test_interfaces_that_do_not_fit(interface: dict[str, Any], message: str) -> None:
    lowered, inputs = _lowered_scores()
    with pytest.raises(OptionError, match=re.escape(message)):
        package_files(lowered, ModelInterface(**interface), inputs)


@functools.cache
def _lowered_scores() -> tuple[bytes, list[tuple[str, Any]]]:
    program = _program(Scores(), torch.rand(1, 3, 8, 8))
    inputs = example_inputs(program)
    return bytes(lower_methods({"forward": program}, CoreMLPartitioner()).buffer), inputs


def test_an_image_output_has_no_scale(tmp_path: Path) -> None:
    interface = ModelInterface(images={"output": ImageFeature(scale=2)})
    with pytest.raises(OptionError, match="'output' is an image of pixels from 0 to 255, without"):
        save_mlpackage(
            _program(Filter(), torch.rand(1, 3, 8, 8)), tmp_path / "a.mlpackage", None, interface
        )


def test_two_outputs_fit_the_labels(tmp_path: Path) -> None:
    class Two(Scores):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return scores, scores.softmax(-1)

    with pytest.raises(OptionError, match="2 outputs have an element for each label: got output_0"):
        save_mlpackage(
            _program(Two(), torch.rand(1, 3, 8, 8)),
            tmp_path / "a.mlpackage",
            None,
            ModelInterface(labels=_LABELS),
        )


@pytest.mark.parametrize("shape", [(5,), (1, 5, 1, 1)])
def test_softmax_is_over_the_classes(shape: tuple[int, ...], tmp_path: Path) -> None:
    class Reshaped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).reshape(shape)

    path, scores = tmp_path / "a.mlpackage", torch.randn(1, 5)
    interface = ModelInterface(labels=_LABELS, softmax=True)
    save_mlpackage(_program(Reshaped(), scores), path, None, interface)
    probabilities = _predicted(path, {"x": scores.numpy()})["classLabel_probs"]
    expected = (scores[0] * 2).softmax(-1)
    atol, rtol = ATOL_RTOL["fp16"]
    np.testing.assert_allclose([*probabilities.values()], expected, atol=atol, rtol=rtol)


def test_softmax_needs_the_classes_in_one_dimension(tmp_path: Path) -> None:
    interface = ModelInterface(labels=["a", "b", "c", "d", "e", "f"], softmax=True)
    with pytest.raises(OptionError, match="softmax needs the classes in one dimension: got"):
        save_mlpackage(_program(Taken(), _X), tmp_path / "a.mlpackage", None, interface)


@pytest.mark.parametrize("softmax", [True, False])
def test_scores_that_are_no_probabilities_are_named(
    softmax: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = _program(Scores(softmax=softmax), torch.rand(1, 3, 8, 8))
    save_mlpackage(program, tmp_path / "a.mlpackage", None, ModelInterface(labels=_LABELS))
    assert ("--softmax applies one" in caplog.text) == (not softmax)


def test_a_package_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "a.mlpackage"
    program = _program(Taken(), _X)
    save_mlpackage(program, path)
    with pytest.raises(ProgramError, match="output exists"):
        save_mlpackage(program, path)
    with pytest.raises(OptionError, match=r"unknown kind of file: .*a.pte, expected .mlpackage"):
        save_mlpackage(program, tmp_path / "a.pte")
    assert [*tmp_path.iterdir()] == [path]


def test_an_input_may_have_the_name_of_the_label(tmp_path: Path) -> None:
    class Labelled(nn.Module):
        def forward(self, classLabel: Tensor) -> Tensor:
            return classLabel.softmax(-1)

    interface = ModelInterface(labels=_LABELS, names={"classLabel": "scores"})
    path = tmp_path / "a.mlpackage"
    save_mlpackage(_program(Labelled(), torch.rand(1, 5)), path, None, interface)
    loaded = load_mlpackage(path, engine="reference")
    assert loaded.input_names == ("scores",)
    assert loaded.classifiers[0].label == "classLabel_out"
