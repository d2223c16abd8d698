"""Making, selecting and ordering values.

Source: coremltools' MIL op reference, ``tensor_operation`` and ``control_flow``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.registry import Ints, kernel
from coreml_delegate.runtime.mil.opset import Opset

_Scalar = float | int | bool


@kernel("select")
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``a`` where ``cond`` is true, else ``b``; all three broadcast."""
    return torch.where(cond, a, b)


@kernel("fill")
def fill(shape: Ints, value: _Scalar = 0.0) -> Tensor:
    """``value`` in every element."""
    return torch.full(shape, value)


@kernel("fill_like", since=Opset.iOS16)
def fill_like(ref_tensor: Tensor, value: _Scalar = 0.0) -> Tensor:
    """``value`` in every element, in the shape of ``ref_tensor``."""
    return torch.full(ref_tensor.shape, value)


@kernel("range_1d")
def range_1d(end: _Scalar, start: _Scalar, step: _Scalar) -> Tensor:
    """``start``, ``start + step`` ... up to but not including ``end``."""
    if (end - start) * step <= 0:
        return torch.arange(start, start, 1)  # empty, of the dtype of start
    return torch.arange(start, end, step)


@kernel("one_hot")
def one_hot(
    indices: Tensor,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: _Scalar = 1,
    off_value: _Scalar = 0,
) -> Tensor:
    """A new dimension ``axis`` with ``on_value`` at the index, ``off_value`` elsewhere."""
    hot = indices.unsqueeze(-1) == torch.arange(one_hot_vector_size, dtype=indices.dtype)
    return torch.where(hot, torch.tensor(on_value), torch.tensor(off_value)).movedim(-1, axis)


@kernel("non_zero")
def non_zero(x: Tensor) -> Tensor:
    """Coordinates of the elements that are not 0: [count, rank]."""
    return torch.nonzero(x)


@kernel("band_part")
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """The band of the innermost matrices between two diagonals; negative bounds keep all."""
    row = torch.arange(x.shape[-2])[:, None]
    column = torch.arange(x.shape[-1])
    inside = torch.ones(x.shape[-2:], dtype=torch.bool)
    if lower >= 0:
        inside &= row - column <= lower
    if upper >= 0:
        inside &= column - row <= upper
    return torch.where(inside, x, torch.zeros_like(x))


@kernel("cumsum", widen=True)
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along ``axis``, from its end if ``reverse``, of those before if ``exclusive``."""
    ordered = x.flip(axis) if reverse else x
    if exclusive and x.shape[axis]:
        first = torch.zeros_like(x.narrow(axis, 0, 1))
        ordered = torch.cat([first, ordered.narrow(axis, 0, x.shape[axis] - 1)], dim=axis)
    total = ordered.cumsum(axis)
    return total.flip(axis) if reverse else total


@kernel("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    """Indices that sort along ``axis``; equal values keep their order."""
    return torch.argsort(x, dim=axis, descending=not ascending, stable=True)


@kernel("topk")
def topk(x: Tensor, k: int = 1, axis: int = -1, ascending: bool = False) -> tuple[Tensor, Tensor]:
    """The ``k`` largest (smallest if ``ascending``) along ``axis``, sorted, and their indices."""
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    count = x.shape[axis] if k == -1 else k
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@kernel("topk", since=Opset.iOS16)
def topk_optional_indices(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,  # noqa: ARG001 - any order will do if it is false: sorted too
    return_indices: bool = True,
) -> tuple[Tensor, ...]:
    """``topk`` with or without indices."""
    return topk(x, k, axis, ascending)[: 1 + return_indices]


@kernel("topk", since=Opset.iOS17)
def topk_typed_indices(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,  # noqa: ARG001 - any order will do if it is false: sorted too
    return_indices: bool = True,
    output_indices_dtype: str = "int32",  # noqa: ARG001 - the declared type says the same
) -> tuple[Tensor, ...]:
    """``topk`` with or without indices, of a dtype of choice; ``k`` of -1 takes all."""
    return topk(x, k, axis, ascending)[: 1 + return_indices]
