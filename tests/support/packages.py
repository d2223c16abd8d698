"""The files of mlpackages made with coremltools' builder, as ``Model.from_files`` takes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mlpackage import assemble
from coreml_delegate.targets import Opset
from support import mil
from support.mil import ct, mb, types


def package_files(program: Any, opset: Opset = Opset.iOS18) -> dict[str, Buffer]:
    """A builder program as the files of an mlpackage."""
    with tempfile.TemporaryDirectory() as folder:
        message = mil.load(program, folder, specification_version=int(opset))
        weights = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return assemble(message.SerializeToString(deterministic=True), weights)


def long_chain(factor: float = 2.0, *, length: int = 60) -> dict[str, Buffer]:
    """``x * factor`` and back again and again: many ops, few bytes, quickly run."""

    def function(x: Any) -> Any:
        for _ in range(length // 2):
            x = mb.tanh(x=mb.mul(x=x, y=np.float32(factor)))
        return x

    example = {"x": np.zeros((2, 3), np.float32)}
    return package_files(mil.builder_program(function, example, Opset.iOS18))


def long_chain_of_rows() -> dict[str, Buffer]:
    """The same on 1 to 9 rows, softmax at the end."""
    spec = mb.TensorSpec((ct.RangeDim(1, 9).symbol, 4), dtype=types.fp32)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        for _ in range(40):
            x = mb.tanh(x=mb.add(x=x, y=np.float32(0.25)))
        return mb.softmax(x=x, name="y")

    return package_files(program)


def long_accumulator() -> dict[str, Buffer]:
    """A state that grows by ``x`` a step, and many ops that change nothing."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((3,), dtype=types.fp32),
            mb.StateTensorSpec((3,), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any, total: Any) -> Any:
        for _ in range(40):
            x = mb.mul(x=mb.mul(x=x, y=np.float32(2)), y=np.float32(0.5))
        before = mb.read_state(input=total)
        step = mb.cast(x=x, dtype="fp16")
        after = mb.coreml_update_state(state=total, value=mb.add(x=before, y=step))
        return mb.identity(x=before, name="before"), mb.identity(x=after, name="after")

    return package_files(program)
