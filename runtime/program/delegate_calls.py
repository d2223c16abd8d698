"""Native calls of a delegate, without Python, with the Python host's tensors.

``delegate_calls.h`` does the same with ExecuTorch's tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coreml_delegate.runtime.native import (
    NATIVE_RESIZE,
    NATIVE_RUN,
    NativeArgument,
    NativeCall,
)
from coreml_delegate.runtime.program.decoder import SCALAR_TYPES


@dataclass(frozen=True, slots=True)
class CallValue:
    """An argument of a delegate.

    Attributes:
        index: Index in the value table of the method.
        shape: Shape, or the largest shape if it is dynamic.
        is_dynamic: Whether the shape varies between calls.
        is_new: Whether the argument is an output for which each call makes a new tensor.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_dynamic: bool
    is_new: bool


class DelegateStep:
    """A step of a method that runs a delegate without Python; one call at a time.

    Args:
        arguments: Inputs, then outputs, all row-major.
    """

    def __init__(
        self, native: NativeCall, values: list[Any], arguments: Sequence[CallValue]
    ) -> None:
        self._native = native
        self._run = NATIVE_RUN(native.run)
        self._values = values
        self._arguments = arguments
        self._frame = (NativeArgument * len(arguments))()
        for native_argument, argument in zip(self._frame, arguments, strict=True):
            native_argument.rank = len(argument.shape)
            native_argument.type = SCALAR_TYPES[argument.dtype]
            native_argument.sizes = (ctypes.c_int32 * len(argument.shape))(*argument.shape)
        numbered = list(enumerate(arguments))
        self._existing = [(n, value) for n, value in numbered if not value.is_new]
        # New tensors of dynamic shapes are allocated in ``_resized``.
        self._allocated = [
            (n, value) for n, value in numbered if value.is_new and not value.is_dynamic
        ]
        self._new: list[tuple[int, torch.Tensor]] = []
        is_resized = any(value.is_dynamic for value in arguments)
        self._resize = NATIVE_RESIZE(self._resized) if is_resized else None

    def __call__(self) -> bool:
        """Run the delegate.

        Returns:
            Whether the delegate ran. If not, nothing has changed, and Python has to call it.
        """
        values, frame = self._values, self._frame
        self._new.clear()
        for n, value in self._existing:
            tensor = values[value.index]
            shape = tensor.shape
            if not tensor.is_contiguous():
                return False
            frame[n].data = tensor.data_ptr()
            if not value.is_dynamic:
                if shape != value.shape:  # a damaged program may have moved another tensor here
                    return False
            elif len(shape) != len(value.shape):
                return False
            else:
                for axis, size in enumerate(shape):
                    frame[n].sizes[axis] = size
        for n, value in self._allocated:
            self._new.append((value.index, torch.empty(value.shape, dtype=value.dtype)))
            frame[n].data = self._new[-1][1].data_ptr()
        if self._run(self._native.model, frame, len(frame), self._resize, None):
            return False
        for index, tensor in self._new:
            values[index] = tensor
        self._new.clear()
        return True

    def _resized(self, _: object, n: int, sizes: Any, rank: int) -> int | None:
        """Resize an output and return its address; see ``NativeResize``."""
        value, shape = self._arguments[n], tuple(sizes[:rank])
        if not value.is_dynamic or rank != len(value.shape):
            return None
        if value.is_new:
            tensor = torch.empty(shape, dtype=value.dtype)
            self._new.append((value.index, tensor))
        else:
            tensor = self._values[value.index].resize_(shape)
        return tensor.data_ptr()
