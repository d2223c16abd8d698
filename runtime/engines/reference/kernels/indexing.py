"""Gathering and scattering by index, sorting, and constant tensors.

Indices are validated by the rules of each opset. Up to iOS16, negative indices count from the end
and others out of range fail. From iOS17 on, ``validate_indices`` decides: if it is true, indices
outside of [0, size) fail; if not, MIL leaves the result undefined but safe. Here negative indices
then count from the end, and others out of range are clamped.

Source: coremltools' MIL op reference, ``scatter_gather`` and ``tensor_operation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.targets import Opset


def _wrap_negative(indices: Tensor, size: int) -> Tensor:
    """Return indices as int64, with ``size`` added to negative indices.

    Raises:
        IndexError: An index is outside of [-size, size).
    """
    indices = indices.to(torch.int64)
    if indices.numel() and not bool(((indices >= -size) & (indices < size)).all()):
        raise IndexError(f"index outside of [{-size}, {size})")
    return torch.where(indices < 0, indices + size, indices)


def _check_or_clamp(indices: Tensor, size: int, validate: bool) -> Tensor:
    """Return indices as int64, validated or clamped by the rules of iOS17.

    Raises:
        IndexError: ``validate`` is set and an index is outside of [0, size).
    """
    indices = indices.to(torch.int64)
    if validate:
        if indices.numel() and not bool(((indices >= 0) & (indices < size)).all()):
            raise IndexError(f"index outside of [0, {size})")
        return indices
    return torch.where(indices < 0, indices + size, indices).clamp(0, max(0, size - 1))


# --- gather ---------------------------------------------------------------------------------------


@kernel("gather")
def gather_ios15(x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0) -> Tensor:
    """Slices of ``x`` along ``axis``, per element of the leading ``batch_dims`` dimensions.

    The dimensions of ``indices`` replace ``axis``.
    """
    return _gather(x, _wrap_negative(indices, x.shape[axis]), axis, batch_dims)


@kernel("gather", since=Opset.iOS17)
def gather_ios17(
    x: Tensor,
    indices: Tensor,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Tensor:
    """``gather`` per element of the leading ``batch_dims`` dimensions, with iOS17's index rules."""
    return _gather(x, _check_or_clamp(indices, x.shape[axis], validate_indices), axis, batch_dims)


def _gather(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Tensor:
    axis %= x.dim()
    result_shape = (*x.shape[:axis], *indices.shape[batch_dims:], *x.shape[axis + 1 :])
    if batch_dims == 0:
        return x.index_select(axis, indices.reshape(-1)).reshape(result_shape)
    batch = math.prod(x.shape[:batch_dims])
    rows = x.reshape(
        batch, math.prod(x.shape[batch_dims:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    )
    chosen = indices.reshape(batch, 1, -1, 1).expand(-1, rows.shape[1], -1, rows.shape[3])
    return rows.gather(2, chosen).reshape(result_shape)


@kernel("gather_along_axis")
def gather_along_axis_ios15(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """``y[i][j] = x[indices[i][j]][j]`` for axis 0."""
    return x.gather(axis, _wrap_negative(indices, x.shape[axis]))


@kernel("gather_along_axis", since=Opset.iOS17)
def gather_along_axis_ios17(
    x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool = False
) -> Tensor:
    """``gather_along_axis`` with iOS17's index rules."""
    return x.gather(axis, _check_or_clamp(indices, x.shape[axis], validate_indices))


@kernel("gather_nd")
def gather_nd_ios15(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    """Slices of ``x`` at coordinates, which are along the last dimension of ``indices``.

    The slices are taken per element of the leading ``batch_dims`` dimensions.
    """
    return _gather_nd(x, indices, batch_dims, _wrap_negative)


@kernel("gather_nd", since=Opset.iOS17)
def gather_nd_ios17(
    x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    """``gather_nd`` per element of the leading dimensions, with iOS17's index rules."""
    return _gather_nd(
        x, indices, batch_dims, lambda i, size: _check_or_clamp(i, size, validate_indices)
    )


def _gather_nd(
    x: Tensor, indices: Tensor, batch_dims: int, check: Callable[[Tensor, int], Tensor]
) -> Tensor:
    depth = indices.shape[-1]
    batch = math.prod(x.shape[:batch_dims])
    rows = x.reshape(batch, *x.shape[batch_dims:])
    coordinates = indices.reshape(batch, -1, depth)
    position = [check(coordinates[..., d], rows.shape[1 + d]) for d in range(depth)]
    chosen = rows[(torch.arange(batch)[:, None].expand(coordinates.shape[:2]), *position)]
    return chosen.reshape(*indices.shape[:-1], *x.shape[batch_dims + depth :])


# --- scatter --------------------------------------------------------------------------------------

_REDUCTIONS = {
    "add": "sum",
    "sub": "sum",
    "mul": "prod",
    "div": "prod",
    "max": "amax",
    "min": "amin",
}
_SCATTER_MODES = ("update", *_REDUCTIONS)


def _combine(data: Tensor, axis: int, indices: Tensor, updates: Tensor, mode: str) -> Tensor:
    """``data[indices[i][j]][j] = updates[i][j]`` for axis 0, or combined by ``mode``."""
    if mode not in _SCATTER_MODES:
        raise ValueError(f"scatter mode is {mode!r}, not one of {', '.join(_SCATTER_MODES)}")
    if mode == "update":
        return data.scatter(axis, indices, updates)
    if mode == "div":
        divisor = torch.ones_like(data).scatter_reduce(axis, indices, updates, "prod")
        return torch.div(data, divisor, rounding_mode=None if data.is_floating_point() else "trunc")
    operand = -updates if mode == "sub" else updates
    return data.scatter_reduce(axis, indices, operand, _REDUCTIONS[mode])


def _scatter(data: Tensor, indices: Tensor, updates: Tensor, axis: int, mode: str) -> Tensor:
    axis %= data.dim()
    per_slice = indices.reshape(-1, *(1,) * (data.dim() - axis - 1)).expand(updates.shape)
    return _combine(data, axis, per_slice, updates, mode)


def _scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str,
    check: Callable[[Tensor, int], Tensor],
) -> Tensor:
    depth = indices.shape[-1]
    row = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for d in range(depth):
        row = row * data.shape[d] + check(indices[..., d], data.shape[d])
    rows = data.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    changes = updates.reshape(-1, rows.shape[1])
    per_element = row.reshape(-1, 1).expand(changes.shape)
    return _combine(rows, 0, per_element, changes, mode).reshape(data.shape)


@kernel("scatter", widen=True)
def scatter_ios15(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> Tensor:
    """``data`` with slices along ``axis`` combined with ``updates``; ``indices``: [C]."""
    return _scatter(data, _wrap_negative(indices, data.shape[axis]), updates, axis, mode)


@kernel("scatter", since=Opset.iOS17, widen=True)
def scatter_ios17(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """``scatter`` with iOS17's index rules."""
    chosen = _check_or_clamp(indices, data.shape[axis], validate_indices)
    return _scatter(data, chosen, updates, axis, mode)


@kernel("scatter_along_axis", widen=True)
def scatter_along_axis_ios15(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> Tensor:
    """``data[indices[i][j]][j] = updates[i][j]`` for axis 0, or combined by ``mode``."""
    return _combine(data, axis, _wrap_negative(indices, data.shape[axis]), updates, mode)


@kernel("scatter_along_axis", since=Opset.iOS17, widen=True)
def scatter_along_axis_ios17(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """``scatter_along_axis`` with iOS17's index rules."""
    chosen = _check_or_clamp(indices, data.shape[axis], validate_indices)
    return _combine(data, axis, chosen, updates, mode)


@kernel("scatter_nd", widen=True)
def scatter_nd_ios15(data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add") -> Tensor:
    """``data`` with slices at coordinates combined with ``updates``; ``indices``: [*, depth]."""
    return _scatter_nd(data, indices, updates, mode, _wrap_negative)


@kernel("scatter_nd", since=Opset.iOS17, widen=True)
def scatter_nd_ios17(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """``scatter_nd`` with iOS17's index rules."""
    return _scatter_nd(
        data, indices, updates, mode, lambda i, size: _check_or_clamp(i, size, validate_indices)
    )


_Scalar = float | int | bool


@kernel("fill")
def fill(shape: Ints, value: _Scalar = 0.0) -> Tensor:
    """A tensor of shape ``shape``, every element ``value``."""
    return torch.full(shape, value)


@kernel("fill_like", since=Opset.iOS16)
def fill_like(ref_tensor: Tensor, value: _Scalar = 0.0) -> Tensor:
    """A tensor of the shape of ``ref_tensor``, every element ``value``."""
    return torch.full(ref_tensor.shape, value)


@kernel("range_1d")
def range_1d(end: _Scalar, start: _Scalar, step: _Scalar) -> Tensor:
    """``start``, ``start + step``, ... below ``end``."""
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
    """Coordinates [count, rank] of the nonzero elements."""
    return torch.nonzero(x)


@kernel("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    """Indices that sort along ``axis``; equal values keep their order."""
    return torch.argsort(x, dim=axis, descending=not ascending, stable=True)


@kernel("topk")
def topk(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,  # noqa: ARG001 - any order will do if it is false: sorted too
    return_indices: bool = True,
    output_indices_dtype: str = "int32",  # noqa: ARG001 - the declared type says the same
) -> tuple[Tensor, ...]:
    """The ``k`` largest (smallest if ``ascending``) along ``axis``, sorted, and their indices.

    ``k`` of -1 takes all elements.
    """
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    count = x.shape[axis] if k == -1 else k
    return (values.narrow(axis, 0, count), indices.narrow(axis, 0, count))[: 1 + return_indices]
