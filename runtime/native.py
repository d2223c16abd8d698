"""Functions that run without Python, called with addresses of tensors."""

from __future__ import annotations

import ctypes
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coreml_delegate.runtime.snapshots import Array

HEADER: Final = "native_calls.h"
"""The header that declares the interface of native functions."""

VERSION: Final = 3
"""Version of the header and of the description of functions and models; equal to
``kNativeVersion`` of the header."""

SMALL: Final = 4 << 20
"""Size of a model, in bytes, up to which native calls are prepared when it is loaded: 15 ms
for a model of 2 MB on a busy machine. For larger models the overhead of a call is negligible."""


def header() -> bytes:
    """Return the content of the header."""
    return importlib.resources.files("coreml_delegate.runtime").joinpath(HEADER).read_bytes()


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The sizes that a dimension of an input may have.

    Attributes:
        low: The smallest size.
        high: The largest size, or None.
        same_as: (input, dimension), by number, that must have the same size, or None.
    """

    low: int
    high: int | None
    same_as: tuple[int, int] | None = None


InputLimits = tuple[SizeLimit, ...] | None
"""The limits of the dimensions of one input, in order; None if only the shapes of the compiled
models limit them."""


@dataclass(frozen=True, slots=True)
class NativeInterface:
    """The tensors of native calls.

    Attributes:
        inputs: Feature names, in the order in which calls pass the tensors.
        outputs: Feature names, in the order in which calls pass the tensors.
        limits: The sizes that each input may have.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    limits: tuple[InputLimits, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class NativeCall:
    """A call of a function without Python, valid for the lifetime of this object.

    Attributes:
        run: Address of a ``NativeRun``; see ``native_calls.h`` for its arguments. Any thread may
            call it at any time, if the function has no states.
        model: The first argument of ``run``.
    """

    run: int
    model: int


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A compiled model of a function, as the engine exports it.

    ``words`` describe the model's ports and states: int64 numbers that ``native_calls.cpp`` reads.
    """

    words: tuple[int, ...]
    content: bytes


@dataclass(frozen=True, slots=True)
class NativeProgram:
    """The form of a function that is loaded without Python.

    Attributes:
        machine: Versions and the CPU, on which the models depend.
        device: Name of the engine's device.
        config: Names and values of the engine's properties.
        words: The description of the function, like ``NativeModel.words``.
        models: One model, or one for each combination of enumerated input shapes.
    """

    machine: str
    device: str
    config: tuple[tuple[str, str], ...]
    words: tuple[int, ...]
    models: tuple[NativeModel, ...]


class NativeArgument(ctypes.Structure):
    """A tensor of a native call, as in ``native_calls.h``."""

    _fields_ = (
        ("data", c_void_p),
        ("sizes", POINTER(c_int32)),
        ("rank", c_int32),
        ("type", c_int32),
    )


class NativeState(ctypes.Structure):
    """The states of a caller, as in ``native_calls.h``."""

    _fields_ = (
        ("side", c_int64),
        ("has_rows", POINTER(c_int64)),
        ("memory", POINTER(c_void_p) * 2),
    )


NATIVE_RESIZE: Final = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64, POINTER(c_int64), c_uint64)
"""Type of the callback that resizes outputs."""

NATIVE_RUN: Final = ctypes.CFUNCTYPE(
    c_int32, c_void_p, POINTER(NativeArgument), c_uint64, c_void_p, c_void_p
)
"""Type of ``NativeCall.run``. Calling it releases the interpreter's lock."""

SCALAR_TYPES: Final[Mapping[str, int]] = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "complex32": 8,
    "complex64": 9,
    "complex128": 10,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
    "float8_e5m2fnuz": 25,
    "float8_e4m3fnuz": 26,
    "uint16": 27,
    "uint32": 28,
    "uint64": 29,
}
"""Name of a dtype in torch, and in NumPy -> ExecuTorch's ``ScalarType`` number, without quantized
and bit types. Native calls identify dtypes by these numbers."""

ArrayType = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Name, dtype and shape of an array."""

_COPIED: Final = 1 << 16
"""Bytes up to which arrays are copied, because getting an address takes a microsecond."""


class _Frame:
    """The arguments of a call, with memory for small arrays; for one call at a time."""

    def __init__(self, inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> None:
        self.arguments: Any = (NativeArgument * (len(inputs) + len(outputs)))()
        self.buffers: list[Array | None] = []
        for argument, (_, dtype, shape) in zip(self.arguments, (*inputs, *outputs), strict=True):
            argument.rank, argument.type = len(shape), SCALAR_TYPES[dtype.name]
            argument.sizes = (c_int32 * len(shape))(*shape)
            is_small = dtype.itemsize * math.prod(shape) <= _COPIED
            buffer = np.empty(shape, dtype) if is_small else None
            if buffer is not None:
                argument.data = buffer.ctypes.data
            self.buffers.append(buffer)


class ArrayCall:
    """A native call with NumPy arrays, in the order of the call. Several threads may use it."""

    def __init__(
        self, call: NativeCall, inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]
    ) -> None:
        self._call = call
        self._run = NATIVE_RUN(call.run)
        self._types = inputs, outputs
        self._inputs = [(n, name) for n, (name, _, _) in enumerate(inputs)]
        self._outputs = [(len(inputs) + n, *output) for n, output in enumerate(outputs)]
        self._idle = [_Frame(inputs, outputs)]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run once, with arrays of the constructor's dtypes and shapes, and any strides.

        Returns:
            New arrays by name; None if the native call declined the arguments.
        """
        try:
            frame = self._idle.pop()  # atomic, so no lock
        except IndexError:
            frame = _Frame(*self._types)
        arguments, buffers = frame.arguments, frame.buffers
        results: dict[str, Array] = {}
        alive: list[Array] = []  # keeps the memory of inputs until the call ends
        for n, name in self._inputs:
            buffer = buffers[n]
            if buffer is not None:
                np.copyto(buffer, inputs[name], casting="no")
                continue
            array = np.ascontiguousarray(inputs[name])
            arguments[n].data = array.ctypes.data
            alive.append(array)
        for n, name, dtype, shape in self._outputs:
            if buffers[n] is None:
                results[name] = array = np.empty(shape, dtype)
                arguments[n].data = array.ctypes.data
        has_run = not self._run(self._call.model, arguments, len(buffers), None, None)
        if has_run:
            for n, name, _, _ in self._outputs:
                buffer = buffers[n]
                # Reinserted, for the order of the outputs.
                results[name] = results.pop(name) if buffer is None else buffer.copy()
        self._idle.append(frame)
        return results if has_run else None
