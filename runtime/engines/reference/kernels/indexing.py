"""Gathering and scattering by index, sorting, and constant tensors.

Indices are validated by the rules of each opset. Up to iOS16, negative indices count from the end
and others out of range fail. From iOS17 on, ``validate_indices`` decides: if it is true, indices
outside of [0, size) fail; if not, MIL leaves the result undefined but safe. Here negative indices
then count from the end, and others out of range are clamped.

Source: coremltools' MIL op reference, ``scatter_gather`` and ``tensor_operation``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel
from coreml_delegate.targets import Opset


def _resolve(indices: Tensor, size: int, validate: bool | None) -> Tensor:
    """Return indices as int64, not negative, by the rules of iOS17, or earlier ones for None.

    Raises:
        IndexError: An index is outside of [0, size), or of [-size, size) by the earlier rules.
    """
    indices = indices.to(torch.int64)
    if validate is not False and indices.numel():
        least = -size if validate is None else 0
        if not bool(((indices >= least) & (indices < size)).all()):
            raise IndexError(f"index outside of [{least}, {size})")
    wrapped = torch.where(indices < 0, indices + size, indices)
    return wrapped.clamp(0, max(0, size - 1)) if validate is False else wrapped


# --- gather ---------------------------------------------------------------------------------------


@kernel("gather", since=Opset.iOS17)
@kernel("gather", validate_indices=None)
def gather(
    x: Tensor,
    indices: Tensor,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool | None = False,
) -> Tensor:
    """Slices of ``x`` along ``axis``, per element of the leading ``batch_dims`` dimensions.

    The dimensions of ``indices`` replace ``axis``.
    """
    axis %= x.dim()
    indices = _resolve(indices, x.shape[axis], validate_indices)
    result_shape = (*x.shape[:axis], *indices.shape[batch_dims:], *x.shape[axis + 1 :])
    if batch_dims == 0:
        return x.index_select(axis, indices.reshape(-1)).reshape(result_shape)
    batch = math.prod(x.shape[:batch_dims])
    rows = x.reshape(
        batch, math.prod(x.shape[batch_dims:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    )
    chosen = indices.reshape(batch, 1, -1, 1).expand(-1, rows.shape[1], -1, rows.shape[3])
    return rows.gather(2, chosen).reshape(result_shape)


@kernel("gather_along_axis", since=Opset.iOS17)
@kernel("gather_along_axis", validate_indices=None)
def gather_along_axis(
    x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool | None = False
) -> Tensor:
    """``y[i][j] = x[indices[i][j]][j]`` for axis 0."""
    return x.gather(axis, _resolve(indices, x.shape[axis], validate_indices))


@kernel("gather_nd", since=Opset.iOS17)
@kernel("gather_nd", validate_indices=None)
def gather_nd(
    x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool | None = False
) -> Tensor:
    """Slices of ``x`` at coordinates, which are along the last dimension of ``indices``.

    The slices are taken per element of the leading ``batch_dims`` dimensions.
    """
    depth = indices.shape[-1]
    batch = math.prod(x.shape[:batch_dims])
    rows = x.reshape(batch, *x.shape[batch_dims:])
    coordinates = indices.reshape(batch, -1, depth)
    position = [
        _resolve(coordinates[..., d], rows.shape[1 + d], validate_indices) for d in range(depth)
    ]
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


@kernel("scatter", since=Opset.iOS17, widen=True)
@kernel("scatter", widen=True, validate_indices=None)
def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = False,
) -> Tensor:
    """``data`` with slices along ``axis`` combined with ``updates``; ``indices``: [C]."""
    axis %= data.dim()
    chosen = _resolve(indices, data.shape[axis], validate_indices)
    per_slice = chosen.reshape(-1, *(1,) * (data.dim() - axis - 1)).expand(updates.shape)
    return _combine(data, axis, per_slice, updates, mode)


@kernel("scatter_along_axis", since=Opset.iOS17, widen=True)
@kernel("scatter_along_axis", widen=True, validate_indices=None)
def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = False,
) -> Tensor:
    """``data[indices[i][j]][j] = updates[i][j]`` for axis 0, or combined by ``mode``."""
    chosen = _resolve(indices, data.shape[axis], validate_indices)
    return _combine(data, axis, chosen, updates, mode)


@kernel("scatter_nd", since=Opset.iOS17, widen=True)
@kernel("scatter_nd", widen=True, validate_indices=None)
def scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool | None = False,
) -> Tensor:
    """``data`` with slices at coordinates combined with ``updates``; ``indices``: [*, depth]."""
    depth = indices.shape[-1]
    row = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for d in range(depth):
        chosen = _resolve(indices[..., d], data.shape[d], validate_indices)
        row = row * data.shape[d] + chosen
    rows = data.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    changes = updates.reshape(-1, rows.shape[1])
    per_element = row.reshape(-1, 1).expand(changes.shape)
    return _combine(rows, 0, per_element, changes, mode).reshape(data.shape)


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
