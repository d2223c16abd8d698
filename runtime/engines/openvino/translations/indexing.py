"""Ops that read or write elements by index, or return indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    convert_to,
    dim_of,
    dims,
    element_type,
    f32,
    fail_if,
    fit_slices,
    ints,
    is_compared,
    is_float,
    make_negative_invalid,
    normalize_axis,
    output,
    rank,
    replace_slices,
    require_room,
    reshape,
    scalar,
    shape_of,
)
from coreml_delegate.runtime.engines.openvino.plugin import integers, nan, top_k
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal
from coreml_delegate.targets import Opset

# MIL scatter mode -> OpenVINO's reduction; "sub" adds negatives, "div" multiplies by inverses.
_REDUCTIONS = {"update": "none", "add": "sum", "mul": "prod", "max": "max", "min": "min"}
_EXTREMA = {"max": 1, "min": -1}


def _reduction(mode: str, updates: Tensor) -> tuple[str, Any]:
    """Return OpenVINO's reduction for a scatter mode, and the updates for that reduction."""
    if mode == "sub":
        return "sum", ops.negative(updates)
    if mode == "div":
        return "prod", ops.divide(scalar(1, updates), updates)
    if mode not in _REDUCTIONS:
        raise refusal("scatter mode", mode, ", ".join((*_REDUCTIONS, "sub", "div")))
    return _REDUCTIONS[mode], updates


def _scatter_reduced(
    mode: str, data: Tensor, updates: Tensor, scatter: Callable[[Any, Any, str], Any], exact: bool
) -> Result:
    """Return ``data`` with ``updates`` scattered into it by MIL's ``mode``.

    ``scatter`` builds the scatter from data, updates and OpenVINO's reduction. If ``exact``, an
    extremum is NaN where one of its values is NaN.
    """
    reduction, values = _reduction(mode, updates)
    if exact and mode in _EXTREMA:
        return nan.spread_nan(
            lambda data, values: scatter(data, values, reduction), data, values, sign=_EXTREMA[mode]
        )
    return scatter(data, values, reduction)


def _scatter_divided(data: Tensor, scatter: Callable[[Any], Any]) -> Any:
    """Return integers divided by the product of their updates, rounded towards zero.

    ``scatter`` multiplies the updates into a tensor of the shape of ``data``.
    """
    divisor = scatter(ops.broadcast(scalar(1, data), shape_of(data)))
    return integers.truncated_divide(data, divisor)


def _wrap_negative(indices: Tensor, size: Callable[[], Any]) -> Any:
    """Return indices as int32, with ``size`` added to negative ones."""
    indices = _as_int32(indices)
    data = constant_data(indices)
    if data is not None and int(data.astype(np.int64).min(initial=0)) >= 0:
        return indices
    return ops.select(
        ops.less(indices, scalar(0, indices)),
        ops.add(indices, convert_to(size(), element_type(indices))),
        indices,
    )


def _as_int32(indices: Tensor) -> Any:
    """Return indices as int32, because 8-bit indices may overflow when a size is added."""
    return convert_to(indices, element_type(ints(0)))


def _refuse_validation(indices: Tensor, validate: bool | None) -> None:
    """Refuse to validate indices known only at run time.

    OpenVINO cannot validate indices, so the reference engine runs the program. Constant indices are
    checked when a program is built.
    """
    if validate and constant_data(indices) is None:
        raise refusal("indices known at run time only are to be validated", dims(indices))


def _resolve(indices: Tensor, size: Callable[[], Any], validate: bool | None) -> Any:
    """Return indices as int32, by the rules of iOS17, or of earlier opsets if ``validate`` is None.

    Raises:
        UnsupportedOpError: See ``_refuse_validation``.
    """
    _refuse_validation(indices, validate)
    return _wrap_negative(indices, size) if validate is None else _as_int32(indices)


@translation("gather")
def gather(
    x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Result:
    """Slices of ``x`` at ``indices`` along ``axis``; negative indices count from the end."""
    _refuse_validation(indices, validate_indices)
    axis = normalize_axis(axis, rank(x))
    batch = dims(x)[:batch_dims]
    if 0 in dims(indices):
        return _gather_empty(x, indices, axis, batch_dims)
    if not batch or all(size is not None and size > 1 for size in batch):
        return ops.gather(x, _as_int32(indices), ints(axis), batch_dims)
    return _gather_in_batches(x, _as_int32(indices), axis, batch_dims)


def _gather_empty(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Result:
    """``gather`` with empty indices, for which OpenVINO 2026.4's CPU plugin ends the process.

    No issue is known.
    """
    other_dims = [dim_of(x, dim) for dim in range(rank(x)) if dim != axis]
    index_dims = [dim_of(indices, dim) for dim in range(batch_dims, rank(indices))]
    dims_ = (*other_dims[:axis], *index_dims, *other_dims[axis:])
    sizes = [reshape(size, (1,)) for size in dims_]
    return ops.broadcast(scalar(0, x), ops.concat(sizes, 0))


def _gather_in_batches(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Result:
    """``gather`` for batches that may have size 1, where OpenVINO 2026.4's CPU plugin crashes.

    GatherND does the same, with ``axis`` transposed to directly after the batch axes and the
    result transposed back.
    """
    indices = _wrap_negative(indices, lambda: dim_of(x, axis))
    between = list(range(batch_dims, axis))
    order = [*range(batch_dims), axis, *between, *range(axis + 1, rank(x))]
    gathered = _gather_nd(
        ops.transpose(x, ints(order)), ops.unsqueeze(indices, ints(-1)), batch_dims
    )
    if not between:
        return gathered
    index_axes = list(range(batch_dims, rank(indices)))
    moved = [len(index_axes) + axis_ for axis_ in between]
    trailing = range(len(index_axes) + axis, rank(gathered))
    return ops.transpose(gathered, ints([*range(batch_dims), *moved, *index_axes, *trailing]))


@translation("gather_along_axis", since=Opset.iOS17)
@translation("gather_along_axis", validate_indices=None)
def gather_along_axis(
    x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool | None = False
) -> Result:
    """``y[i][j] = x[indices[i][j]][j]`` for axis 0."""
    chosen = _resolve(indices, lambda: dim_of(x, axis), validate_indices)
    return ops.gather_elements(x, chosen, normalize_axis(axis, rank(x)))


def _leading_sizes(data: Tensor, indices: Tensor, batch_dims: int = 0) -> Any:
    """Return the sizes of the axes of ``data`` that the last axis of ``indices`` addresses."""
    depth = dims(indices)[-1]
    if depth is None:
        raise refusal("index depth is known only at run time", dims(indices))
    return ops.gather(shape_of(data), ints(list(range(batch_dims, batch_dims + depth))), ints(0))


def _gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Any:
    """GatherND with indices clamped to the shape of ``x``.

    OpenVINO 2026.4's GatherND reads memory outside of ``x`` at an index out of range.
    """
    constant, depth = constant_data(indices), dims(indices)[-1]
    if constant is None or depth is None or not _is_inside(constant, dims(x)[batch_dims:][:depth]):
        last = ops.subtract(_leading_sizes(x, indices, batch_dims), ints(1))
        indices = ops.maximum(ops.minimum(indices, last), ints(0))
    return ops.gather_nd(x, indices, batch_dims)


def _is_inside(indices: NDArray[Any], sizes: tuple[int | None, ...]) -> bool:
    """Whether all index vectors [*, len(sizes)] are in range."""
    limits = np.asarray([size or 0 for size in sizes], dtype=np.int64)
    return bool(((indices >= 0) & (indices < limits)).all())


@translation("gather_nd", since=Opset.iOS17)
@translation("gather_nd", validate_indices=None)
def gather_nd(
    x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool | None = False
) -> Result:
    """Slices of ``x`` at index vectors."""
    chosen = _resolve(indices, lambda: _leading_sizes(x, indices, batch_dims), validate_indices)
    return _gather_nd(x, chosen, batch_dims)


@translation("scatter_along_axis")
def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """``data[indices[i][j]][j] = updates[i][j]`` for axis 0, or combined by ``mode``."""
    _refuse_validation(indices, validate_indices)
    if mode == "div" and not is_float(data):
        return _scatter_divided(
            data, lambda ones: scatter_along_axis(ones, indices, updates, axis, "mul")
        )
    axis = normalize_axis(axis, rank(data))
    vector = _find_repeated_vector(indices, axis)
    if vector is not None and mode == "update":
        return _write_slices(data, vector, updates, axis)
    wrapped = make_negative_invalid(_wrap_negative(indices, lambda: dim_of(data, axis)))
    for other in range(rank(data)):
        if other != axis and not is_compared(data, indices, other):
            # OpenVINO 2026.4 writes outside of its memory. No issue is known.
            is_beyond = ops.greater(dim_of(indices, other), dim_of(data, other))
            wrapped = fail_if(is_beyond, wrapped, "indices of a scatter exceed the tensor")

    def write(data: Tensor, values: Tensor, reduction: str) -> Result:
        return ops.scatter_elements_update(data, wrapped, values, ints(axis), reduction)

    return _scatter_reduced(mode, data, updates, write, exact_nan)


def _find_repeated_vector(indices: Tensor, axis: int) -> Any | None:
    """Return the vector along ``axis`` that ``indices`` repeats along all other axes, or None.

    Frameworks write rows of a cache this way; the elements of a row are then contiguous.
    """
    node = output(indices).get_node()
    if node.get_type_name() not in ("Tile", "Broadcast"):
        return None
    source = node.input_value(0)
    sizes = dims(source)
    is_vector = len(sizes) == rank(indices) and all(
        size == 1 for axis_, size in enumerate(sizes) if axis_ != axis
    )
    if not is_vector or sizes[axis] is None or sizes[axis] != dims(indices)[axis]:
        return None
    return reshape(source, (-1,))


def _write_slices(data: Tensor, vector: Tensor, updates: Tensor, axis: int) -> Result:
    """Replace the slices at indices ``vector`` [C] along ``axis`` by ``updates``."""
    indices = _wrap_negative(vector, lambda: dim_of(data, axis))
    return replace_slices(data, indices, updates, axis)


@translation("scatter")
def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """Write the slices ``updates`` to ``data`` at ``indices`` [C] along ``axis``."""
    _refuse_validation(indices, validate_indices)
    axis = normalize_axis(axis, rank(data))
    if mode == "update":
        return _write_slices(data, indices, updates, axis)
    data, indices, updates = fit_slices(data, indices, updates, axis)
    shape = [1] * rank(data)
    shape[axis] = -1
    column = ops.reshape(_as_int32(indices), ints(shape), special_zero=False)
    repeated = ops.broadcast(column, shape_of(updates))
    return scatter_along_axis(data, repeated, updates, axis, mode, exact_nan=exact_nan)


@translation("scatter_nd")
def scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """Write the slices ``updates`` to ``data`` at index vectors."""
    _refuse_validation(indices, validate_indices)
    if mode == "div" and not is_float(data):
        return _scatter_divided(data, lambda ones: scatter_nd(ones, indices, updates, "mul"))
    wrapped = _wrap_negative(indices, lambda: _leading_sizes(data, indices))

    def write(data: Tensor, values: Tensor, reduction: str) -> Result:
        return ops.scatter_nd_update(data, wrapped, values, reduction)

    return _scatter_reduced(mode, data, updates, write, exact_nan)


@translation("topk")
def topk(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",  # noqa: ARG001 - the declared output type says the same
) -> Result:
    """The ``k`` largest (smallest if ``ascending``) elements along ``axis``, and their indices.

    All elements if ``k`` is -1.
    """
    axis_ = normalize_axis(axis, rank(x))
    if is_float(x) and top_k.is_long(x, k, axis_):
        best_indices = top_k.first_indices(nan.sort_key(x), k, axis_, "min" if ascending else "max")
        best: Result = ops.gather_elements(x, best_indices, axis_)
    else:
        count = ints(k) if k != -1 else dim_of(x, axis)
        best, best_indices = _sort(x, count, axis, ascending, sort)
    return (best, best_indices) if return_indices else best


@translation("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Result:
    """Indices that sort ``x`` along ``axis``."""
    return _sort(x, dim_of(x, axis), axis, ascending, sort=True)[1]


def _sort(x: Tensor, count: Any, axis: int, ascending: bool, sort: bool) -> tuple[Result, Result]:
    """Return the first ``count`` elements in order, and their indices; NaN is the largest."""
    axis = normalize_axis(axis, rank(x))
    best = ops.topk(
        nan.sort_key(x) if is_float(x) else x,
        count,
        axis,
        "min" if ascending else "max",
        "value" if sort else "none",
        index_element_type="i32",
        stable=sort,
    )
    values, indices = best.outputs()
    return (ops.gather_elements(x, indices, axis) if is_float(x) else values), indices


@translation("one_hot")
def one_hot(
    indices: Tensor,
    one_hot_vector_size: Tensor,
    axis: int = -1,
    on_value: Tensor | None = None,
    off_value: Tensor | None = None,
) -> Result:
    """Vectors along a new ``axis``: ``on_value`` at each index, ``off_value`` elsewhere."""
    on = ints(1) if on_value is None else on_value
    off = ints(0) if off_value is None else off_value
    size = require_room(one_hot_vector_size, one_hot_vector_size, on, repeats_for=indices)
    return ops.one_hot(indices, size, on, off, axis)


@translation("non_zero")
def non_zero(x: Tensor) -> Result:
    """Indices [count, rank] of the nonzero elements."""
    return ops.transpose(ops.non_zero(x, "i32"), ints((1, 0)))


@translation("fill")
def fill(shape: Tensor, value: Tensor | None = None) -> Result:
    """A tensor of shape ``shape``, every element ``value``."""
    number = ops.constant(np.float32(0)) if value is None else value
    return ops.broadcast(number, require_room(shape, shape, number))


@translation("fill_like")
def fill_like(ref_tensor: Tensor, value: Tensor | None = None) -> Result:
    """A tensor of the shape of ``ref_tensor``, every element ``value``."""
    return fill(shape_of(ref_tensor), value)


@translation("range_1d")
def range_1d(end: Tensor, start: Tensor, step: Tensor) -> Result:
    """``start``, ``start + step``, ... below ``end``."""
    if any(constant_data(bound) is None for bound in (start, end, step)):
        count = ops.divide(ops.subtract(f32(end), f32(start)), f32(step))
        start, end, step = (require_room(bound, count, start) for bound in (start, end, step))
    return ops.range(start, end, step, element_type(start).get_type_name())
