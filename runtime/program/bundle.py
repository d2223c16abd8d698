"""Bundled programs (``.bpte``): a program with test inputs and expected outputs.

Source: ExecuTorch 1.5, ``devtools/bundled_program/schema``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.runtime.program.decoder import DTYPES
from coreml_delegate.runtime.program.flatbuffer import F64, I32, I64, U8, FlatBuffer, Table

IDENTIFIER: Final = b"BP08"

Value = torch.Tensor | int | float | bool


@dataclass(frozen=True, slots=True)
class BundledCase:
    """One call of a method; ``expected`` is empty if the bundle has no outputs."""

    method: str
    inputs: tuple[Value, ...]
    expected: tuple[Value, ...]


def is_bundle(view: memoryview) -> bool:
    """Whether ``view`` is a bundled program."""
    return bytes(view[4:8]) == IDENTIFIER


def program_of(bundle: memoryview) -> memoryview:
    """Return the program of a bundle, as a view.

    Raises:
        BlobFormatError: The bundle is truncated or corrupt.
    """
    return FlatBuffer(bundle).root().raw(2)


def cases_of(bundle: memoryview) -> tuple[BundledCase, ...]:
    """Return all cases of a bundle, in file order; tensors are copies.

    Raises:
        BlobFormatError: The bundle is truncated or corrupt.
    """
    if not is_bundle(bundle):
        raise BlobFormatError("not a bundled program", got=repr(bytes(bundle[4:8])))

    def read_suite(suite: Table) -> tuple[BundledCase, ...]:
        name = suite.text(0) or ""
        return suite.tables(
            1, lambda case: BundledCase(name, case.tables(0, _value), case.tables(1, _value))
        )

    suites = FlatBuffer(bundle).root().tables(1, read_suite)
    return tuple(case for suite in suites for case in suite)


def _value(table: Table) -> Value:
    kind, content = table.integer(0, U8), table.table(1)
    read: Any = _KINDS.get(kind)
    if read is None or content is None:
        raise BlobFormatError("a value of the bundle has an unknown type", got=str(kind))
    return read(content)


def _tensor(table: Table) -> torch.Tensor:
    number = table.integer(0, U8)
    sizes, data = table.integers(1, I32), table.raw(2)
    dtype = DTYPES.get(number)
    expected = -1 if dtype is None else math.prod(sizes) * dtype.itemsize
    if dtype is None or min(sizes, default=0) < 0 or not 0 < len(data) == expected:
        if dtype is not None and expected == 0 and max(sizes) < 2**20:
            return torch.empty(sizes, dtype=dtype)
        raise BlobFormatError(
            "a tensor of the bundle is corrupt",
            got=f"scalar type {number}, sizes {list(sizes)}, {len(data)} bytes",
        )
    order = table.integers(3, U8) or tuple(range(len(sizes)))
    if sorted(order) != list(range(len(sizes))):
        raise BlobFormatError("a tensor of the bundle is corrupt", got=f"dim order {order}")
    stored = torch.frombuffer(bytearray(data), dtype=dtype).reshape([sizes[d] for d in order])
    return stored.permute([order.index(d) for d in range(len(sizes))])


_KINDS: Final = {
    1: _tensor,
    2: lambda table: table.integer(0, I64),
    3: lambda table: bool(table.integer(0, U8)),
    4: lambda table: table.real(0, F64),
}
