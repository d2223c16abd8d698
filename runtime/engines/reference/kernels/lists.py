"""Lists of tensors, and the classifier's output.

Source: coremltools' MIL op reference, ``control_flow`` and ``classify``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.limits import MAX_LIST
from coreml_delegate.runtime.engines.reference.kernels import EachInt, kernel
from coreml_delegate.runtime.engines.reference.values import TensorList, storage_dtype
from coreml_delegate.runtime.mil.dtypes import DType


@kernel("make_list")
def make_list(
    elem_shape: EachInt,
    init_length: int = 1,
    dynamic_length: bool = True,  # noqa: ARG001 - every list grows when written beyond its end
    dtype: str = "fp32",
) -> TensorList:
    """A list of zeros, or of unwritten elements if the element's shape is unknown."""
    if not 0 <= init_length < MAX_LIST:
        raise ValueError(f"a list of {init_length} elements, not of fewer than {MAX_LIST}")
    if any(isinstance(size, str) for size in elem_shape):
        return TensorList([None] * init_length)
    zeros = torch.zeros(elem_shape, dtype=storage_dtype(DType.from_label(dtype)))
    return TensorList([zeros] * init_length)


@kernel("list_length")
def list_length(ls: TensorList) -> Tensor:
    """The number of elements."""
    return torch.tensor(len(ls), dtype=torch.int32)


@kernel("list_read")
def list_read(ls: TensorList, index: int) -> Tensor:
    """One element."""
    return _read_element(ls, index)


@kernel("list_write")
def list_write(ls: TensorList, index: int, value: Tensor) -> TensorList:
    """The list with the element at ``index`` replaced by ``value``."""
    return ls.replaced([index], [value])


@kernel("list_gather")
def list_gather(ls: TensorList, indices: tuple[int, ...]) -> Tensor:
    """Several elements along a new first dimension."""
    return torch.stack([_read_element(ls, index) for index in indices])


@kernel("list_scatter")
def list_scatter(ls: TensorList, indices: tuple[int, ...], value: Tensor) -> TensorList:
    """The list with the elements at ``indices`` replaced by ``value`` [indices, *element]."""
    return ls.replaced(indices, value.unbind(0))


@kernel("classify")
def classify(probabilities: Tensor, classes: tuple[Any, ...]) -> tuple[Any, dict[Any, float]]:
    """The most probable class, and the probability of every class."""
    scores = probabilities.reshape(-1).tolist()
    by_class = dict(zip(classes, scores, strict=True))
    best = classes[int(torch.argmax(probabilities))]
    return (best if isinstance(best, str) else torch.tensor(best)), by_class


def _read_element(ls: TensorList, index: int) -> Tensor:
    """Return an element; zeros if it was never written but the shape is known."""
    if not 0 <= index < len(ls):
        raise IndexError(f"list index {index} is outside of [0, {len(ls)})")
    element = ls[index]
    if element is not None:
        return element
    like = next((other for other in ls if other is not None), None)
    if like is None:
        raise IndexError(f"list element {index} has no known shape: nothing was ever written")
    return torch.zeros_like(like)
