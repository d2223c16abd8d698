"""Check the inputs of a method before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.program.plan import (
    Dynamism,
    MethodInfo,
    TensorSpec,
    ValueSpec,
    describe,
)
from coreml_delegate.runtime.program.signature import input_names

Value: TypeAlias = "torch.Tensor | bool | int | float | str | None"
"""An input or output of a method; usually a tensor."""


def check_inputs(method: MethodInfo, inputs: Sequence[Value]) -> None:
    """Check the caller's ``inputs`` against the metadata of ``method``.

    Raises:
        InputError: Wrong count, kind, dtype, shape or device; names the input by index and path.
    """
    if len(inputs) != len(method.inputs):
        raise InputError(
            f"method {method.name!r} takes another number of inputs",
            got=str(len(inputs)),
            expected=f"{len(method.inputs)}: "
            + ", ".join(_describe_spec(spec) for spec in method.input_specs),
        )
    for index, (spec, value) in enumerate(zip(method.input_specs, inputs, strict=True)):
        if isinstance(spec, TensorSpec):
            if isinstance(value, torch.Tensor) and _is_usual(spec, value):
                continue
            _check_tensor(index, method, spec, value)
        elif not _is_exported_value(spec, value):
            raise _wrong(index, method, "was fixed at export", _describe(value), spec)


def _is_exported_value(spec: ValueSpec, value: object) -> bool:
    """Whether ``value`` equals the value at export; a program stores None for a string."""
    if spec is None:
        return value is None or isinstance(value, str)
    return type(value) is type(spec) and value == spec


def _is_usual(spec: TensorSpec, value: torch.Tensor) -> bool:
    """Whether ``value`` agrees with ``spec`` exactly: a quick check that most inputs pass."""
    return (
        value.shape == spec.shape
        and value.dtype is spec.dtype
        and value.is_cpu
        and value.layout is torch.strided
    )


def _check_tensor(index: int, method: MethodInfo, spec: TensorSpec, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise _wrong(index, method, "is no tensor", _describe(value), spec)
    if value.dtype != spec.dtype:
        raise _wrong(index, method, "has the wrong dtype", _describe(value), spec)
    if not shape_fits(spec, value.shape):
        raise _wrong_shape(index, method, spec, value)
    if value.device.type != "cpu" or value.layout is not torch.strided:
        got = f"{value.layout} on {value.device}"
        raise _wrong(index, method, "is not a dense tensor on the CPU", got, spec)


def shape_fits(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Whether ``spec`` allows a tensor of ``shape``."""
    if len(shape) != len(spec.shape):
        return False
    if spec.dynamism is Dynamism.UNBOUNDED:
        return True
    if spec.dynamism is Dynamism.BOUNDED:
        return all(size <= bound for size, bound in zip(shape, spec.shape, strict=True))
    return tuple(shape) == spec.shape


def in_dim_order(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return ``tensor`` in the memory layout of ``spec``; copies it if needed."""
    if spec.is_row_major and tensor.is_contiguous():
        return tensor
    strides = spec.strides_for(tuple(tensor.shape))
    if tensor.stride() == strides:
        return tensor
    dense = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype)
    return dense.copy_(tensor)


def _wrong(index: int, method: MethodInfo, what: str, got: str, spec: ValueSpec) -> InputError:
    name = input_names(method)[index]
    label = "" if name == str(index) else f" ({name})"
    return InputError(
        f"input {index}{label} of method {method.name!r} {what}",
        got=got,
        expected=_describe_spec(spec),
    )


def _wrong_shape(
    index: int, method: MethodInfo, spec: TensorSpec, value: torch.Tensor
) -> InputError:
    too_large = (
        f" ({size} in dimension {dim}, at most {bound})"
        for dim, (size, bound) in enumerate(zip(value.shape, spec.shape, strict=False))
        if size > bound
    )
    is_bounded = spec.dynamism is Dynamism.BOUNDED and value.dim() == len(spec.shape)
    got = _describe(value) + (next(too_large, "") if is_bounded else "")
    return _wrong(index, method, "has the wrong shape", got, spec)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return describe(value.dtype, value.shape)
    return repr(value)


def _describe_spec(spec: ValueSpec) -> str:
    if spec is None:
        return "None, or the text that the model was exported with"
    return str(spec) if isinstance(spec, TensorSpec) else _describe(spec)
