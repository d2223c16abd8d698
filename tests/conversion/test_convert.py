"""MIL is validated where it is read and written, not after each pass, and is what it would be."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from coreml_delegate import graph
from coreml_delegate.conversion import convert
from coreml_delegate.errors import ConversionError
from coreml_delegate.third_party import coremltools


def _files() -> dict[str, bytes]:
    builder = graph.Backend("reference").builder()
    x = builder.parameter("x", "float32", (2, 3))
    executable = builder.compile([builder.softmax(x), builder.reduce_sum(builder.tanh(x), 1)])
    return {path: bytes(content) for path, content in executable.files.items()}


def test_the_bytes_are_those_of_validating_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seldom = _files()
    monkeypatch.setattr(convert, "_validating_at_the_ends", nullcontext)
    assert _files() == seldom


def test_a_pass_that_breaks_the_program_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    coremltools()
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    elimination = PASS_REGISTRY["common::noop_elimination"]
    run = type(elimination).apply

    def breaks(self: Any, program: Any) -> None:
        run(self, program)
        for function in program.functions.values():
            next(iter(function.operations)).outputs[0]._child_ops.clear()

    monkeypatch.setattr(type(elimination), "apply", breaks)
    with pytest.raises(ConversionError, match="cannot convert"):
        _files()


def test_constants_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_COMPARED", 16)
    values = np.linspace(-1, 1, 7 * 5, dtype=np.float32).reshape(7, 5)
    for place in ((0, 0), (3, 2), (6, 4)):
        for change in (0.0, 1e-3, np.nan):
            other = values.copy()
            other[place] += change
            for atol in (1e-12, 1e-2):
                expected = np.allclose(values, other, rtol=0, atol=atol)
                assert convert._all_close(values, other, rtol=0, atol=atol) == expected
