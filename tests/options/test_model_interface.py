"""``ModelInterface``: its options as text and as keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coreml_delegate.errors import OptionError
from coreml_delegate.options.declaration import options_of
from coreml_delegate.options.model_interface import (
    ColorLayout,
    ImageFeature,
    ModelInterface,
    feature_name,
)

_ARGUMENTS = {option.name: option.argument for option in options_of(ModelInterface)}


def _parsed(option: str, text: str) -> Any:
    argument = _ARGUMENTS[option]
    assert argument is not None
    return argument.parse(text)


@pytest.mark.parametrize(
    ("text", "name", "image"),
    [
        ("x", "x", ImageFeature()),
        ("x:scale=0.0078,bias=-1,layout=bgr", "x", ImageFeature(ColorLayout.BGR, 0.0078, -1)),
        ("x:bias=1/2/3", "x", ImageFeature(bias=[1, 2, 3])),
        ("a.b[0]:scale=2/2/2", "a.b[0]", ImageFeature(scale=2.0)),
        ("x:layout=grayscale,scale=2", "x", ImageFeature("grayscale", scale=2)),
        ("x:std=1", "x", ImageFeature(scale=1 / 255)),
        ("x:mean=0.5,std=0.5", "x", ImageFeature(scale=2 / 255, bias=-1)),
        ("x:std=0.25/0.5/1", "x", ImageFeature(scale=[4 / 255, 2 / 255, 1 / 255])),
        ("x:mean=1/2/4,std=2", "x", ImageFeature(scale=0.5 / 255, bias=[-0.5, -1, -2])),
    ],
)
def test_images_as_text(text: str, name: str, image: ImageFeature) -> None:
    assert _parsed("images", text) == (name, image)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x:scale", "'x:scale' is no image: got scale, expected scale, bias, mean, std or layout"),
        ("x:size=2", "got size=2"),
        ("x:scale=1,scale=2", "each once"),
        ("x:scale=a", "scale is no number: got a, expected a number, or three separated by /"),
        ("x:scale=1/2", "scale has a wrong number of values: got 2, expected 1, or 3 separated"),
        ("x:layout=grayscale,bias=1/2/3", "bias has a wrong number of values: got 3, expected 1"),
        ("x:scale=nan", "scale must be a finite number"),
        ("x:layout=hsv", "layout has an unknown value: got 'hsv', expected rgb | bgr | grayscale"),
        ("x:mean=1,scale=1", "mean and std exclude scale and bias"),
        ("x:std=0", "std must not be 0"),
        ("x:mean=1/2/3,std=1/2", "mean and std have different numbers of channels"),
    ],
)
def test_images_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        _parsed("images", text)
    assert message in str(caught.value)


def test_labels_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("tench\n großer Hai \ncrane, bird\n\n", encoding="utf-8")
    assert _parsed("labels", str(path)) == path
    assert ModelInterface(labels=path).labels == ("tench", "großer Hai", "crane, bird")
    path.write_text("tench\r\nshark\r\n", encoding="utf-8-sig")  # as editors on Windows write it
    assert ModelInterface(labels=path).labels == ("tench", "shark")
    path.write_text("a\n\nb\n")
    with pytest.raises(OptionError, match="has an empty line: got line 2"):
        ModelInterface(labels=path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot read the labels"):
        ModelInterface(labels=path)
    with pytest.raises(OptionError, match=r"cannot read the labels in .*missing\.txt: got No such"):
        ModelInterface(labels=tmp_path / "missing.txt")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"labels": []}, "labels are empty"),
        ({"labels": ["a", "b", "a"]}, "labels have a label twice: got 'a'"),
        ({"labels": "abc"}, "labels must be a list of texts"),
        ({"softmax": True}, "softmax is for the output with the labels"),
        ({"names": {"x": "2d"}}, "Core ML does not take a name in names: got '2d'"),
        ({"names": {"x": "state"}}, "no word of MIL such as state"),
        ({"names": [("x", "a"), ("x", "b")]}, "names has a name twice: got 'x'"),
        ({"images": {"x": 1}}, "images must be an ImageFeature"),
        ({"images": {"": ImageFeature()}}, "images must have names of inputs and outputs"),
        ({"author": 1}, "author must be a text"),
    ],
)
def test_values_that_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        ModelInterface(**keywords)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x", "x"),
        ("_x", "_x"),
        ("past.key[0]", "past_key_0"),
        ("[3]", "_3"),
        ("['a b']", "a_b"),
        ("größe", "gr__e"),
        ("tensor", "tensor_"),
        ("", "_"),
    ],
)
def test_names_that_core_ml_takes(name: str, expected: str) -> None:
    assert feature_name(name) == expected
