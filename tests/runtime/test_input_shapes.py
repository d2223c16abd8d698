"""Shapes of inputs against what a function takes: ranges, enumerated shapes, related sizes."""

from __future__ import annotations

import json

import pytest

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.errors import BlobFormatError, InputError
from coreml_delegate.runtime.engines.input_shapes import InputShapes
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, TensorType


def feature(name, *, shapes=(), bounds=()):
    rank = len(bounds) or len(shapes[0])
    return Feature(name, TensorType(DType.FP32, (None,) * rank), shapes=shapes, bounds=bounds)


X = feature("x", bounds=((2, 8), (4, 4)))
Y = feature("y", bounds=((2, 32),))


def shapes_of(sizes):
    metadata = {}
    input_sizes.write(metadata, {"main": sizes})
    return InputShapes([X, Y], input_sizes.read(metadata, "main"))


@pytest.mark.parametrize(
    ("sizes", "x", "y"),
    [
        ({}, (2, 4), (3,)),
        ({"x": ["s0", 4], "y": ["s0"]}, (3, 4), (3,)),
        ({"x": ["s0", 4], "y": ["2*s0 + 1"]}, (3, 4), (7,)),
        ({"x": ["2*s0", 4], "y": ["3*s0"]}, (4, 4), (6,)),
        ({"x": ["s0", 4], "y": ["Max(2, s0//2)"]}, (8, 4), (4,)),
        ({"x": ["(s0 + 1)//2", 4], "y": ["s1"]}, (3, 4), (9,)),
    ],
)
def test_shapes_that_fit_are_accepted(sizes, x, y):
    shapes_of(sizes).check({"x": x, "y": y})


@pytest.mark.parametrize(
    ("sizes", "x", "y", "message"),
    [
        ({}, (9, 4), (3,), r"'x' has the wrong size in dimension 0: got 9 .*expected 2\.\.8"),
        ({}, (3, 5), (3,), r"'x' has the wrong size in dimension 1: got 5 .*expected 4"),
        ({}, (3, 4, 1), (3,), "'x' has the wrong rank: got 3"),
        (
            {"x": ["s0", 4], "y": ["s0"]},
            (3, 4),
            (4,),
            r"'y' .* dimension 0: got 4 .*expected 3 \(equal to dimension 0 of 'x'\)",
        ),
        (
            {"x": ["s0", 4], "y": ["2*s0 + 1"]},
            (3, 4),
            (8,),
            r"'y' .* dimension 0: got 8 .*expected 7 \(2\*s0 \+ 1, given by dimension 0 of 'x'\)",
        ),
        ({"x": ["2*s0", 4]}, (3, 4), (3,), r"'x' .*: got 3 .*expected 2\*s0 for a whole number s0"),
        ({"x": ["s0", 4], "y": ["s0//2 + 1"]}, (8, 4), (4,), r"'y' .*: got 4 .*expected 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(sizes, x, y, message):
    with pytest.raises(InputError, match=message):
        shapes_of(sizes).check({"x": x, "y": y})


def test_enumerated_shapes_go_together():
    shapes = InputShapes(
        [feature("x", shapes=((1, 4), (2, 4))), feature("y", shapes=((3,), (5,)))], {}
    )
    shapes.check({"x": (1, 4), "y": (3,)})
    shapes.check({"x": (2, 4), "y": (5,)})
    with pytest.raises(
        InputError,
        match=r"not enumerated together: got 'x' \[1, 4\], 'y' \[5\], expected 'x' \[1, 4\], "
        r"'y' \[3\] \| 'x' \[2, 4\], 'y' \[5\]",
    ):
        shapes.check({"x": (1, 4), "y": (5,)})
    with pytest.raises(InputError, match=r"'y' has a shape that is not enumerated: got \[4\]"):
        shapes.check({"x": (1, 4), "y": (4,)})


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"main": []}', '{"main": {"x": [1.5, 4]}}', '{"main": {"x": ["import os", 4]}}'],
)
def test_malformed_metadata_is_refused(content):
    with pytest.raises(BlobFormatError, match=r"malformed metadata coreml_delegate\.input_sizes"):
        input_sizes.read({input_sizes.METADATA_KEY: content}, "main")


def test_sizes_of_an_unknown_input_are_refused():
    metadata = {input_sizes.METADATA_KEY: json.dumps({"main": {"z": ["s0"]}})}
    with pytest.raises(BlobFormatError, match="'z'"):
        InputShapes([X], input_sizes.read(metadata, "main"))


def test_independent_sizes_are_not_stored():
    metadata = {}
    input_sizes.write(metadata, {"main": {}})
    assert metadata == {}
