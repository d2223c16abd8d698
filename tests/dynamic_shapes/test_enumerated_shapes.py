"""The compile spec of enumerated shapes: its form, and what is refused with which remedy."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from coreml_delegate import CoreMLBackend
from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.errors import CoreMLDelegateError, OptionError
from coreml_delegate.options.lowering_options import CompileOptions

LISTED = {"x": [[1, 5, 10], [4, 6, 10]], "y": [[3, 11], [5, 11]]}


class Pair(nn.Module):
    def forward(self, x, y):
        return x.sum() + y


@functools.cache
def program(kind="free"):
    size = Dim("size", min=2, max=8)
    shapes = {
        "free": ({0: Dim.AUTO(min=1, max=4), 1: Dim.AUTO(min=5, max=6)}, {0: Dim.AUTO(max=5)}),
        "shared": ({0: size}, {0: size}),
        "derived": ({0: size}, {0: 2 * size}),
        "fixed": None,
    }[kind]
    inputs = {"shared": (4, 4), "derived": (4, 8)}.get(kind, (4, 5))
    example = (torch.zeros(inputs[0], 6, 10), torch.zeros(inputs[1], 11))
    return torch.export.export(Pair(), example, dynamic_shapes=shapes)


def spec(shapes, kind="free"):
    return CoreMLBackend.generate_enumerated_shapes_compile_spec(program(kind), shapes)


def test_json_has_the_form_of_executorch():
    found = importlib.util.find_spec("executorch")
    path = Path(found.submodule_search_locations[0])
    path = path / "backends/apple/coreml/compiler/enumerated_shape_utils.py"
    module_spec = importlib.util.spec_from_file_location("upstream_enumerated_shapes", path)
    theirs = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(theirs)
    table = theirs._SymbolicShapeToEnumeratedShapeMap
    expected = table.from_exported_program(program(), LISTED)
    made = spec(LISTED)
    assert made.key == "enumerated_shapes"
    assert table.from_json(made.value.decode()).to_json() == expected.to_json()
    assert json.loads(made.value) == json.loads(expected.to_json())


def test_round_trip():
    made = spec(LISTED)
    options = CompileOptions.from_specs([made])
    assert made in options.to_specs()
    assert options.enumerated_shapes.count == 2
    assert [list(binding.values()) for binding in options.enumerated_shapes.bindings()] == [
        [1, 5, 3],
        [4, 6, 5],
    ]


def test_consistent_derived_sizes_are_accepted():
    shapes = {"x": [[2, 6, 10], [3, 6, 10]], "y": [[4, 11], [6, 11]]}
    bindings = CompileOptions.from_specs([spec(shapes, "derived")]).enumerated_shapes.bindings()
    assert [list(binding.values()) for binding in bindings] == [[2], [3]]


@pytest.mark.parametrize(
    ("kind", "shapes", "message"),
    [
        ("free", {"X": [[1, 5, 10]] * 2}, "does not have: got 'X', expected perhaps|got 'X'"),
        ("free", {"xx": LISTED["x"], "y": LISTED["y"]}, "got 'xx', expected perhaps x"),
        ("free", {"x": LISTED["x"]}, "'y' has dynamic dimensions and no enumerated shapes.*List a"),
        ("free", {**LISTED, "y": [[3, 11]]}, "different numbers of.*'x' 2, 'y' 1. List as many"),
        ("free", {"x": [[1, 5, 10]], "y": [[3, 11]]}, "wrong number.*got 1, expected 2 to 128"),
        ("free", {**LISTED, "y": [[3], [5, 11]]}, "a different rank than the input: got 1"),
        (
            "free",
            {**LISTED, "y": [[3, 12], [5, 11]]},
            "changes dimension 1, which is fixed: got 12",
        ),
        ("free", {**LISTED, "x": [[1, 5, 10], [5, 6, 10]]}, "out of bounds in dimension 0: got 5"),
        ("free", {**LISTED, "x": [[1, 4, 10], [4, 6, 10]]}, "out of bounds in dimension 1: got 4"),
        ("free", {"x": [[1, 5, 10]] * 2, "y": [[3, 11]] * 2}, "listed twice"),
        ("free", {**LISTED, "y": [[3.0, 11], [5, 11]]}, "not a list of positive integers"),
        ("free", {**LISTED, "y": [[0, 11], [5, 11]]}, "not a list of positive integers"),
        ("free", {**LISTED, "y": 3}, "are not a list"),
        (
            "shared",
            {"x": [[2, 6, 10], [3, 6, 10]], "y": [[2, 11], [4, 11]]},
            "number 1 do not go together: got 4 as dimension 0 of 'y'.*is 3 by dimension 0 of 'x'",
        ),
        (
            "derived",
            {"x": [[2, 6, 10], [3, 6, 10]], "y": [[4, 11], [8, 11]]},
            r"number 1 do not go together: got 8 as dimension 0 of 'y', expected 2\*",
        ),
        ("fixed", {"x": [[4, 6, 10]] * 2, "y": [[5, 11]] * 2}, "no input has dynamic dimensions"),
    ],
)
def test_shapes_that_do_not_fit_the_program_are_refused(kind, shapes, message):
    with pytest.raises(OptionError, match=message):
        spec(shapes, kind)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b"[1]",
        b'[[{"shape": [2]}, [[[2, 3]], ["x"]]]]',
        b'[[{"shape": [{"key_name": "import os", "low": 1, "high": 2}]}, [[[2]], ["x"]]]]',
        b'[[{"shape": [{"key_name": "s0", "low": "a", "high": 2}]}, [[[2]], ["x"]]]]',
        b'[[{"shape": [{"key_name": "s0"}]}, [[[2]], ["x"]]]]',
        b'[[{"shape": [2]}, [[[2]], []]]]',
    ],
)
def test_a_malformed_spec_is_refused(content):
    with pytest.raises(OptionError):
        CompileOptions.from_pairs([("enumerated_shapes", content)])


def test_a_spec_of_a_different_program_is_refused():
    from executorch.exir import to_edge_transform_and_lower

    from coreml_delegate import CoreMLPartitioner

    partitioner = CoreMLPartitioner(compile_specs=[spec(LISTED)])
    with pytest.raises(CoreMLDelegateError, match="are of another program, by its input 'x'"):
        to_edge_transform_and_lower(program("shared"), partitioner=[partitioner])


def test_combinations_are_described_as_text():
    enumerated = EnumeratedShapes.decode(json.loads(spec(LISTED).value))
    assert enumerated.describe() == "x [1, 5, 10], y [3, 11] | x [4, 6, 10], y [5, 11]"
