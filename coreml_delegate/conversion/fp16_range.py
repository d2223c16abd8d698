"""Whether constants fit into fp16, found without copies of them.

Coremltools' fp16 pass asks this of every op. Its own answer indexes each constant with integers of
64 bits, which takes several times the memory of the constant.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from coreml_delegate.third_party import quiet_import

_LARGEST = 65504.0
_INFINITE = 1e38
"""Magnitudes from here on stand for infinity, and may become it."""
_CHUNK = 2**20  # elements


@contextmanager
def chunked_overflow_check() -> Generator[None]:
    """Let coremltools' fp16 pass ask ``overflows``."""
    with quiet_import():
        from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

    with mock.patch.object(FP16ComputePrecision, "fp16_overflow", staticmethod(overflows)):
        yield


def overflows(op: Any) -> bool:
    """Whether a constant that an op takes is finite, and beyond fp16.

    Args:
        op: A MIL operation.
    """
    return any(_leaves_fp16(np.asarray(value)) for value in _fp32_constants(op))


def _fp32_constants(op: Any) -> Iterator[Any]:
    for given in op.inputs.values():
        for var in given if isinstance(given, list | tuple) else (given,):
            if var.op is None or var.op.op_type != "const":
                continue
            if var.is_tensor_or_scalar_of(dtype="fp32"):
                yield var.op.val.val


def _leaves_fp16(values: np.ndarray[Any, Any]) -> bool:
    # Buffered, because a constant may be transposed, and flattening it would copy it.
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    for chunk in np.nditer(values, flags=flags, order="K", buffersize=_CHUNK):
        magnitudes = np.abs(chunk)
        if ((magnitudes > _LARGEST) & (magnitudes < _INFINITE)).any():
            return True
    return False
