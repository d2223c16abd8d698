"""Containers that torch takes apart and saves, and what programs say of them."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from coreml_delegate.exported.containers import (
    keys_of,
    name_return_types,
    paths_of,
    register_containers,
)
from coreml_delegate.transforms.executorch_gaps import name_values


class Returning(torch.nn.Module):
    """A module made of a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


RETURN_TYPES = {
    "max": lambda x: torch.max(x, 1),
    "median": lambda x: torch.median(x, 1),
    "sort": torch.sort,
    "topk": lambda x: (torch.topk(x, 2), torch.aminmax(x)),
    "linalg": torch.linalg.slogdet,
}


@pytest.mark.parametrize("name", RETURN_TYPES)
def test_programs_that_return_what_torch_returns_are_saved_and_loaded(name):
    name_return_types()
    x = torch.randn(3, 3)
    program = torch.export.export(Returning(RETURN_TYPES[name]), (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    expected, actual = RETURN_TYPES[name](x), loaded.module()(x)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_torch_saves_no_return_types_before_they_are_named():
    script = (
        "import io, torch; from coreml_delegate import CoreMLPartitioner\n"
        "from coreml_delegate.exported.containers import name_return_types\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x): return torch.max(x, 0)\n"
        "program = torch.export.export(M(), (torch.ones(2, 2),))\n"
        "try: torch.export.save(program, io.BytesIO())\n"
        "except NotImplementedError: pass\n"
        "else: raise SystemExit('torch names them')\n"
        "name_return_types()\n"
        "torch.export.save(program, io.BytesIO())"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)


Pair = namedtuple("Pair", "first second")


@dataclass
class Known:
    a: Any
    absent: Any = None


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ((1, 2), None),
        ([1], None),
        ({"b": 1, "a": 2, 3: 4}, ["b", "a", 3]),
        (OrderedDict(b=1, a=2), ["b", "a"]),
        (defaultdict(int, b=1), ["b"]),
        ({(1, 2): 3}, None),
        (Pair(1, 2), ["first", "second"]),
        (torch.max(torch.ones(2, 2), 0), ["values", "indices"]),
    ],
)
def test_keys(value, keys):
    assert keys_of(pytree.tree_structure(value)) == keys


def test_dataclasses_are_registered_once_and_have_keys():
    value = [{"x": Known(Pair(1, Known(2)))}]
    assert register_containers(value)
    assert not register_containers(value)
    assert paths_of(pytree.tree_structure(value)) == [
        (0, "x", "a", "first"),
        (0, "x", "a", "second", "a"),
    ]


def test_named_values_are_those_of_the_program():
    """The program with names takes and returns the same values in the same order."""

    class Model(torch.nn.Module):
        def forward(self, pair, *rest, factor):
            return Pair(pair.first * factor, {"z": rest[0], "a": pair.second + rest[1]})

    args = (Pair(torch.randn(2), torch.randn(2)), torch.randn(2), torch.randn(2))
    program = torch.export.export(Model(), args, {"factor": torch.randn(2)})
    before = program.call_spec.in_spec
    named = name_values(program)
    assert program.call_spec.in_spec == before
    positional, by_name = named.example_inputs
    assert positional == ()
    assert list(by_name) == ["pair", "rest_0", "rest_1", "factor"]
    assert list(by_name["pair"]) == ["first", "second"]
    results = named.module()(**by_name)
    expected = program.module()(*args, factor=by_name["factor"])
    assert list(results) == ["first", "second"]
    for one, other in zip(*map(pytree.tree_leaves, (results, expected)), strict=True):
        torch.testing.assert_close(one, other)
