"""Our patches make coremltools' conversion cheaper, and do not change the bytes that it writes."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from coreml_delegate import graph
from coreml_delegate.errors import ConversionError
from coreml_delegate.lowering.build import convert_mil, convert_program
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches import patched
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset


def _files() -> dict[str, bytes]:
    builder = graph.Backend("reference").builder()
    x = builder.parameter("x", "float32", (2, 3))
    executable = builder.compile([builder.softmax(x), builder.reduce_sum(builder.tanh(x), 1)])
    return {path: bytes(content) for path, content in executable.files.items()}


def test_the_bytes_are_those_of_validating_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seldom = _files()
    monkeypatch.setattr(coremltools_patches, "faster", tuple)
    assert _files() == seldom


@pytest.mark.parametrize("is_compressed", [False, True])
def test_compressed_constants_are_traced_where_there_are_some(
    is_compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it is a third of the passes' time, or more."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Block, types

    traced: list[Any] = []
    monkeypatch.setattr(Block, "_propagate_nonreplaceable_vars", traced.append)

    def build() -> Any:
        spec = mb.TensorSpec((2, 2), types.fp32)

        @mb.program(input_specs=[spec], opset_version=coremltools().target.iOS17)
        def program(x: Any) -> Any:
            if not is_compressed:
                return mb.exp(x=x)
            data = np.zeros((2, 2), np.uint8)
            weight = mb.constexpr_affine_dequantize(
                quantized_data=data, zero_point=np.uint8(0), scale=np.float32(1), axis=np.int32(0)
            )
            return mb.matmul(x=x, y=weight)

        return program, {}

    with convert_mil(build, CompileOptions(deployment_target=Opset.iOS17)):
        assert bool(traced) == is_compressed


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
    monkeypatch.setattr(coremltools_patches, "_CHUNK", 16)
    values = np.linspace(-1, 1, 7 * 5, dtype=np.float32).reshape(7, 5)
    for place in ((0, 0), (3, 2), (6, 4)):
        for change in (0.0, 1e-3, np.nan):
            other = values.copy()
            other[place] += change
            for atol in (1e-12, 1e-2):
                expected = np.allclose(values, other, rtol=0, atol=atol)
                with patched(coremltools_patches.COMPARE_IN_CHUNKS):
                    assert np.allclose(values, other, rtol=0, atol=atol) == expected


def test_halves_are_written_uncopied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Products(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.linspace(-3, 3, 32 * 16)
            self.register_buffer("rows", values.reshape(32, 16))
            self.register_buffer("columns", values.reshape(32, 16).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.rows @ self.columns

    def package() -> dict[str, bytes]:
        program = torch.export.export(Products(), (torch.ones(2, 32),)).run_decompositions({})
        with convert_program(program, CompileOptions()) as conversion:
            return {
                str(path.relative_to(conversion.package)): path.read_bytes()
                for path in sorted(conversion.package.rglob("*.bin"))
            }

    uncopied = package()
    assert sum(map(len, uncopied.values())) > 2 * 32 * 16
    monkeypatch.setattr(coremltools_patches, "faster", tuple)
    assert package() == uncopied


_FREES = """
import resource
from pathlib import Path
from coreml_delegate.lowering import build

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

large = bytearray(31 * 2**20)
del large  # from now on, blocks of this size are not mapped by themselves
blocks = [(bytearray(b"x" * 2**20), bytes(200_000)) for _ in range(60)]
between = [small for _, small in blocks]
blocks.clear()
kept = resident()
build._return_freed_memory()
print(kept - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep less")
def test_freed_memory_is_returned() -> None:
    # In a process of its own: what other tests have allocated decides where blocks lie.
    done = subprocess.run(
        [sys.executable, "-c", _FREES], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) > 40 * 2**20
