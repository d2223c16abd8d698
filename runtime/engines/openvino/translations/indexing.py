"""Ops that read or write elements by index, and those that make tensors of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.computed_sizes import require_room
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
    reshape,
    scalar,
    shape_of,
)
from coreml_delegate.runtime.engines.openvino.plugin import nan, top_k
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal
from coreml_delegate.targets import Opset

# MIL scatter mode -> OpenVINO's reduction; the two others are a sum and a product of the inverse.
_REDUCTIONS = {"update": "none", "add": "sum", "mul": "prod", "max": "max", "min": "min"}
_EXTREMA = {"max": 1, "min": -1}


def _reduction(mode: str, updates: Tensor) -> tuple[str, Any]:
    """OpenVINO's reduction for a scatter mode, and the updates it takes."""
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
    """``updates`` scattered into ``data`` under a mode.

    Args:
        mode: Of MIL.
        data: What is written to.
        updates: What is written.
        scatter: Writes updates into data with a reduction of OpenVINO's.
        exact: Whether an extremum is NaN where one of its values is.
    """
    reduction, values = _reduction(mode, updates)
    if exact and mode in _EXTREMA:
        return nan.spread_nan(
            lambda data, values: scatter(data, values, reduction), data, values, sign=_EXTREMA[mode]
        )
    return scatter(data, values, reduction)


def _scatter_divided(data: Tensor, scatter: Callable[[Any], Any]) -> Any:
    """Integers divided by the product of their updates; what remains is dropped.

    Args:
        data: Integers.
        scatter: Multiplies the updates into a tensor of the shape of ``data``.
    """
    divisor = scatter(ops.broadcast(scalar(1, data), shape_of(data)))
    return ops.divide(ops.subtract(data, ops.mod(data, divisor)), divisor)


def _wrap_negative(indices: Tensor, size: Callable[[], Any]) -> Any:
    """Indices with the negative ones counted from the end, as opsets before iOS17 have them."""
    data = constant_data(indices)
    if data is not None and int(data.astype(np.int64).min(initial=0)) >= 0:
        return indices
    return ops.select(
        ops.less(indices, scalar(0, indices)),
        ops.add(indices, convert_to(size(), element_type(indices))),
        indices,
    )


def _as_int32(indices: Tensor) -> Any:
    """Indices as int32: 8-bit ones could not hold a sum with a size."""
    return convert_to(indices, element_type(ints(0)))


def _refuse_validation(indices: Tensor, validate: bool) -> None:
    """Refuse to validate indices that are known only at run time.

    OpenVINO has no such check, so the reference engine runs the program. Constant indices are
    checked when a program is made.
    """
    if validate and constant_data(indices) is None:
        raise refusal("indices known at run time only are to be validated", dims(indices))


@translation("gather")
def gather(
    x: Tensor,
    indices: Tensor,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Result:
    """Slices of ``x`` at ``indices`` of ``axis``; OpenVINO counts negative indices from the end."""
    _refuse_validation(indices, validate_indices)
    axis = normalize_axis(axis, rank(x))
    batch = dims(x)[:batch_dims]
    if 0 in dims(indices):
        return _gather_nothing(x, indices, axis, batch_dims)
    if not batch or all(size is not None and size > 1 for size in batch):
        return ops.gather(x, _as_int32(indices), ints(axis), batch_dims)
    return _gather_in_batches(x, _as_int32(indices), axis, batch_dims)


def _gather_nothing(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Result:
    """``gather`` without an index, with which OpenVINO 2026.4's CPU plugin ends the process.

    No issue is known.
    """
    kept = [dim_of(x, place) for place in range(rank(x)) if place != axis]
    read = [dim_of(indices, place) for place in range(batch_dims, rank(indices))]
    sizes = [reshape(size, (1,)) for size in (*kept[:axis], *read, *kept[axis:])]
    return ops.broadcast(scalar(0, x), ops.concat(sizes, 0))


def _gather_in_batches(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Result:
    """``gather`` for batches that may have size 1, where OpenVINO 2026.4's CPU plugin crashes.

    GatherND does the same with the axis moved behind the batch axes, and the result's axes moved
    back.
    """
    between = list(range(batch_dims, axis))
    order = [*range(batch_dims), axis, *between, *range(axis + 1, rank(x))]
    found = _gather_nd(ops.transpose(x, ints(order)), ops.unsqueeze(indices, ints(-1)), batch_dims)
    if not between:
        return found
    read = list(range(batch_dims, rank(indices)))
    moved = [len(read) + place for place in between]
    rest = range(len(read) + axis, rank(found))
    return ops.transpose(found, ints([*range(batch_dims), *moved, *read, *rest]))


def _gather_along_axis(x: Tensor, indices: Tensor, axis: int) -> Result:
    return ops.gather_elements(x, indices, normalize_axis(axis, rank(x)))


@translation("gather_along_axis")
def gather_along_axis_ios15(x: Tensor, indices: Tensor, axis: int = 0) -> Result:
    """``x`` at ``indices`` of ``axis``, place by place; negative indices count from the end."""
    return _gather_along_axis(x, _wrap_negative(_as_int32(indices), lambda: dim_of(x, axis)), axis)


@translation("gather_along_axis", since=Opset.iOS17)
def gather_along_axis(
    x: Tensor,
    indices: Tensor,
    axis: int = 0,
    validate_indices: bool = False,
) -> Result:
    """``x`` at ``indices`` of ``axis``, place by place."""
    _refuse_validation(indices, validate_indices)
    return _gather_along_axis(x, _as_int32(indices), axis)


def _leading_sizes(data: Tensor, indices: Tensor, batch_dims: int = 0) -> Any:
    """Return the sizes of the axes of ``data`` that the last axis of ``indices`` addresses."""
    depth = dims(indices)[-1]
    if depth is None:
        raise refusal("index depth is known only at run time", dims(indices))
    return ops.gather(shape_of(data), ints(list(range(batch_dims, batch_dims + depth))), ints(0))


def _gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Any:
    """GatherND with indices clamped to ``x``.

    OpenVINO 2026.4's own reads memory outside of ``x`` at an index out of range.
    """
    places, depth = constant_data(indices), dims(indices)[-1]
    if places is None or depth is None or not _is_inside(places, dims(x)[batch_dims:][:depth]):
        last = ops.subtract(_leading_sizes(x, indices, batch_dims), ints(1))
        indices = ops.maximum(ops.minimum(indices, last), ints(0))
    return ops.gather_nd(x, indices, batch_dims)


def _is_inside(places: NDArray[Any], sizes: tuple[int | None, ...]) -> bool:
    """Whether all index vectors [*, len(sizes)] are in range."""
    limits = np.asarray([size or 0 for size in sizes], dtype=np.int64)
    return bool(((places >= 0) & (places < limits)).all())


@translation("gather_nd")
def gather_nd_ios15(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Result:
    """Slices of ``x`` at index vectors; negative indices count from the end."""
    wrapped = _wrap_negative(_as_int32(indices), lambda: _leading_sizes(x, indices, batch_dims))
    return _gather_nd(x, wrapped, batch_dims)


@translation("gather_nd", since=Opset.iOS17)
def gather_nd(
    x: Tensor,
    indices: Tensor,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Result:
    """Slices of ``x`` at index vectors."""
    _refuse_validation(indices, validate_indices)
    return _gather_nd(x, _as_int32(indices), batch_dims)


def _scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """``updates`` written into ``data`` at ``indices`` of ``axis``, place by place."""
    _refuse_validation(indices, validate_indices)
    if mode == "div" and not is_float(data):
        return _scatter_divided(
            data, lambda ones: _scatter_along_axis(ones, indices, updates, axis, "mul")
        )
    axis = normalize_axis(axis, rank(data))
    vector = _find_repeated_vector(indices, axis)
    if vector is not None and mode == "update":
        return _write_slices(data, vector, updates, axis)
    wrapped = make_negative_invalid(_wrap_negative(_as_int32(indices), lambda: dim_of(data, axis)))
    for other in range(rank(data)):
        if other != axis and not is_compared(data, indices, other):
            # OpenVINO 2026.4 writes outside of its memory. No issue is known.
            is_beyond = ops.greater(dim_of(indices, other), dim_of(data, other))
            wrapped = fail_if(is_beyond, wrapped, "indices of a scatter exceed the tensor")

    def scatter(data: Tensor, values: Tensor, reduction: str) -> Result:
        return ops.scatter_elements_update(data, wrapped, values, ints(axis), reduction)

    return _scatter_reduced(mode, data, updates, scatter, exact_nan)


def _find_repeated_vector(indices: Tensor, axis: int) -> Any | None:
    """Return the vector along ``axis`` that ``indices`` repeats along all other axes, or None.

    Frameworks write rows of a cache this way; the elements of a row then lie side by side.
    """
    node = output(indices).get_node()
    if node.get_type_name() not in ("Tile", "Broadcast"):
        return None
    source = node.input_value(0)
    sizes = dims(source)
    alone = len(sizes) == rank(indices) and all(
        size == 1 for other, size in enumerate(sizes) if other != axis
    )
    if not alone or sizes[axis] is None or sizes[axis] != dims(indices)[axis]:
        return None
    return reshape(source, (-1,))


def _write_slices(data: Tensor, vector: Tensor, updates: Tensor, axis: int) -> Result:
    """Replace the slices at ``vector`` [C] of ``axis`` by ``updates``."""
    places = _wrap_negative(_as_int32(vector), lambda: dim_of(data, axis))
    return replace_slices(data, places, updates, axis)


def _scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """Slices ``updates`` written into ``data`` at ``indices`` [C] of ``axis``."""
    _refuse_validation(indices, validate_indices)
    axis = normalize_axis(axis, rank(data))
    if mode == "update":
        return _write_slices(data, indices, updates, axis)
    data, indices, updates = fit_slices(data, indices, updates, axis)
    shape = [1] * rank(data)
    shape[axis] = -1
    column = ops.reshape(_as_int32(indices), ints(shape), special_zero=False)
    places = ops.broadcast(column, shape_of(updates))
    return _scatter_along_axis(data, places, updates, axis, mode, exact_nan=exact_nan)


def _scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool = False,
    *,
    exact_nan: bool = False,
) -> Result:
    """Slices ``updates`` written into ``data`` at index vectors."""
    _refuse_validation(indices, validate_indices)
    if mode == "div" and not is_float(data):
        return _scatter_divided(data, lambda ones: _scatter_nd(ones, indices, updates, "mul"))
    wrapped = _wrap_negative(_as_int32(indices), lambda: _leading_sizes(data, indices))

    def scatter(data: Tensor, values: Tensor, reduction: str) -> Result:
        return ops.scatter_nd_update(data, wrapped, values, reduction)

    return _scatter_reduced(mode, data, updates, scatter, exact_nan)


translation("scatter")(_scatter)
translation("scatter_along_axis")(_scatter_along_axis)
translation("scatter_nd")(_scatter_nd)


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

    All of them if ``k`` is -1.
    """
    at = normalize_axis(axis, rank(x))
    if is_float(x) and top_k.is_long(x, k, at):
        places = top_k.first_indices(nan.sort_key(x), k, at, "min" if ascending else "max")
        best: Result = ops.gather_elements(x, places, at)
    else:
        count = ints(k) if k != -1 else dim_of(x, axis)
        best, places = _sort(x, count, axis, ascending, sort)
    return (best, places) if return_indices else best


@translation("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Result:
    """Indices that sort ``x`` along ``axis``."""
    return _sort(x, dim_of(x, axis), axis, ascending, sort=True)[1]


def _sort(x: Tensor, count: Any, axis: int, ascending: bool, sort: bool) -> tuple[Result, Result]:
    """The first ``count`` elements and their indices in an order whose largest element is NaN."""
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
    values, places = best.outputs()
    return (ops.gather_elements(x, places, axis) if is_float(x) else values), places


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
    size = require_room(one_hot_vector_size, one_hot_vector_size, on, beside=indices)
    return ops.one_hot(indices, size, on, off, axis)


@translation("non_zero")
def non_zero(x: Tensor) -> Result:
    """Indices [count, rank] of the elements that are not zero."""
    return ops.transpose(ops.non_zero(x, "i32"), ints((1, 0)))


@translation("fill")
def fill(shape: Tensor, value: Tensor | None = None) -> Result:
    """A tensor of the given shape, every element ``value``."""
    number = ops.constant(np.float32(0)) if value is None else value
    return ops.broadcast(number, require_room(shape, shape, number))


@translation("fill_like")
def fill_like(ref_tensor: Tensor, value: Tensor | None = None) -> Result:
    """A tensor of the shape of ``ref_tensor``, every element ``value``."""
    return fill(shape_of(ref_tensor), value)


@translation("range_1d")
def range_1d(end: Tensor, start: Tensor, step: Tensor) -> Result:
    """``start``, ``start + step``, ... below ``end``."""
    if any(constant_data(each) is None for each in (start, end, step)):
        count = ops.divide(ops.subtract(f32(end), f32(start)), f32(step))
        start, end, step = (require_room(each, count, start) for each in (start, end, step))
    return ops.range(start, end, step, element_type(start).get_type_name())
